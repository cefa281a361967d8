"""`python -m tests.vllm.shapes [--seeds N] [--modes LIST] [SHAPE ...]`: an unmodified vLLM and one with kvplane's
scheduler in each of its modes, live on a CPU, on shapes of models and options: whether tokens and decisions are equal.

Tokens, cached tokens, steps, preemptions, block tables and KV events are compared with those of stock; where a service
decides, tokens alone must be equal, since it decides a step earlier or later. The last line counts; exit 1 if a token
differs in any mode, or a decision in process or mirrored.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.service.rig import running
from tests.vllm import environment, processes
from tests.vllm.test_live import differing

MODES = ("inprocess", "mirror", "remote-off", "remote-on")
DECIDES = ("inprocess", "mirror")  # alone, as stock does


@dataclass(frozen=True)
class Shape:
    """A model with options.

    Attributes:
        num_blocks: of the pool; few, so that requests are preempted and blocks evicted.
        options: of the engine.
        flag: of `workload.py`.
    """

    model: str
    num_blocks: int
    options: dict[str, Any] = field(default_factory=dict)
    flag: str = ""


ASYNC = {"async_scheduling": True}
SHAPES = {
    "llama": Shape("llama", 28),
    "llama, async": Shape("llama", 28, ASYNC),
    "llama, priorities": Shape("llama", 28, flag="--priority"),
    "llama, n-gram": Shape("llama", 28, flag="--ngram"),
    "llama, chunks of 64": Shape("llama", 28, {"max_num_batched_tokens": 64, "max_num_seqs": 8}),
    "llama, blocks of 128": Shape("llama", 14, {"block_size": 128}),
    "llama, no prefix cache": Shape("llama", 28, {"enable_prefix_caching": False}),
    "llama, draft model": Shape("llama", 40, {"speculative_config": {"model": "mha", "num_speculative_tokens": 2}}),
    "heads of their own, blocks of 128": Shape("mha", 14, {"block_size": 128}),
    "qwen3": Shape("qwen3", 28),
    "mixtral": Shape("mixtral", 28),
    "gemma3": Shape("gemma3", 105),
    "gemma3, async": Shape("gemma3", 105, ASYNC),
    "gemma2": Shape("gemma2", 50),
    "gptoss": Shape("gptoss", 50),
    "gptoss, async": Shape("gptoss", 50, ASYNC),
    "gptoss, n-gram": Shape("gptoss", 50, flag="--ngram"),
    "gptoss, priorities": Shape("gptoss", 50, flag="--priority"),
    "mistral, windows alone": Shape("mistral", 16),
    "starcoder2, windows alone": Shape("starcoder2", 16),
    "cohere2": Shape("cohere2", 90),
    "olmo3": Shape("olmo3", 90),
    "llama4, chunks of attention": Shape("llama4", 90),
    "deepseek, latent": Shape("deepseek", 28),
    "qwen3next, states": Shape("qwen3next", 22),
}


def play(shape: Shape, mode: str, seeds: str) -> dict[str, Any]:
    """Run one engine. Raises AssertionError with its output if it fails."""
    options = dict(shape.options)
    if draft := options.get("speculative_config"):
        options["speculative_config"] = {**draft, "model": str(environment.MODELS / draft["model"])}
    given = ["--with", json.dumps(options)] if options else []
    given += [shape.flag] if shape.flag else []
    kind = {"inprocess": "kvplane"}.get(mode, mode.partition("-")[0])
    if mode in ("stock", "inprocess"):
        return processes.run("workload.py", shape.model, kind, seeds, shape.num_blocks, *given)
    pipeline = mode.partition("-")[2]
    with running() as service:
        target = [service.address, "r", *([pipeline] if pipeline else [])]
        return processes.run("workload.py", shape.model, kind, seeds, shape.num_blocks, *given, *target)


def outcome(stock: dict[str, Any], ours: dict[str, Any], mode: str) -> str:
    """Whether they are equal, or what differs."""
    names = {name for found in differing(stock, ours).values() for name in found}
    if "tokens" in names:
        return "TOKENS"
    return "equal" if not names else ("DECISIONS: " if mode in DECIDES else "tokens equal; other ") + ", ".join(names)


def row(name: str, seeds: str, modes: list[str]) -> Counter[str]:
    """Print the row of a shape, and return how often each outcome was seen."""
    shape, found = SHAPES[name], Counter[str]()
    try:
        stock = play(shape, "stock", seeds)
    except AssertionError as error:
        print(f"| {name} | stock does not run here: {str(error).strip().splitlines()[-1][:100]} |", flush=True)
        return Counter(skipped=1)
    cells = []
    for mode in modes:
        try:
            cell = outcome(stock, play(shape, mode, seeds), mode)
        except AssertionError as error:
            cell = f"FAILED: {str(error).strip().splitlines()[-1][:160]}"
        found[cell.partition(":")[0]] += 1
        cells.append(cell)
    requests = sum(len(seed["tokens"]) for seed in stock["seeds"])
    preempted, hit = (
        sum(seed["preempted"] for seed in stock["seeds"]),
        sum(sum(seed["cached"]) for seed in stock["seeds"]),
    )
    print(f"| {name} | {requests} | {preempted} | {hit} | {' | '.join(cells)} |", flush=True)
    return found


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("shapes", nargs="*")
    given = parser.parse_args()
    environment.set_up()
    chosen, modes = given.shapes or list(SHAPES), given.modes.split(",")
    environment.write_models(*{SHAPES[name].model for name in chosen}, "mha")
    print(
        f"| shape | requests | preempted | tokens hit | {' | '.join(modes)} |\n|{'---|' * (4 + len(modes))}", flush=True
    )
    counts = sum((row(name, f"1-{given.seeds}", modes) for name in chosen), Counter[str]())
    wrong = sum(counts[name] for name in ("TOKENS", "DECISIONS", "FAILED"))
    print(f"{counts.total()} cells: {dict(counts)}; {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
