"""Prints what kvplane's tiers did on a live vLLM, a line per model, scheduler and tier: `python -m tests.vllm.tiers`.

    python -m tests.vllm.tiers                        # all of them, half an hour
    python -m tests.vllm.tiers --models llama --seeds 1-1
    python -m tests.vllm.tiers --kills 30             engines with one disk after another are killed by SIGKILL

Tokens are compared with those of a stock vLLM that computes each prompt alone; of models in bfloat16 (see
`tiers_live.Live.right`) also with those that it computes again behind a preemption. Hit tokens are those of an infinite
cache in which each request is computed when the next one comes; the device is so small that it hits few of them. Ends
with status 1 if a token differs, something is left, or less than LOADED_PERCENT of the hit tokens are loaded.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from tests.service.rig import running
from tests.vllm import environment, processes

# By model: blocks of the device, so few that it preempts, and host memory, so small that most hits are on the disk.
POOLS = {"llama": 26, "gptoss": 44, "gemma3": 100, "mistral": 16, "gdn": 34, "mamba2": 14}
SMALL = {"llama": "3MiB", "gptoss": "3MiB", "gemma3": "2MiB", "mistral": "3MiB", "gdn": "4MiB", "mamba2": "512KiB"}
LARGE, DISK_SIZE = "64MiB", "200MiB"
SCHEDULERS = ("stock", "stock async", "kvplane", "mirror")
TIERS = ("host", "disk")
LOADED_PERCENT = 60
COLUMNS = "{:8} {:12} {:5} {:>8} {:>7} {:>10} {:>8} {:>8} {:>9} {:>6}"


def options(model: str, tier: str, folder: str) -> str:
    """Return the options of the connector as JSON."""
    disk = {"host": SMALL[model], "disk": folder, "disk_size": DISK_SIZE}
    return json.dumps({"host": LARGE} if tier == "host" else disk)


def run(model: str, kind: str, seeds: str, *target: str, pool: int = 0) -> dict[str, Any]:
    """Return what an engine did."""
    found: dict[str, Any] = processes.run("tiers_live.py", model, kind, pool or POOLS[model], seeds, *target)
    return found | found.get("counts", {})


def computed(model: str, kind: str, seeds: str) -> dict[str, Any]:
    """Return the answers of a stock engine that computes each prompt alone, with as many ranks as `kind`."""
    return run(model, "stock tp2" if "tp2" in kind else "stock", seeds, "null", pool=2000)


def compare(found: dict[str, Any], right: dict[str, Any]) -> tuple[int, int, int]:
    """Return how many tokens differ, in how many answers, and of how many."""
    pairs = [
        (one, one if one in expected["tokens"][prompt] else expected["tokens"][prompt][0])
        for seed, expected in zip(found["seeds"], right["seeds"], strict=False)
        for prompt, answers in seed["tokens"].items()
        for one in answers
    ]
    tokens = sum(a != b for one, other in pairs for a, b in zip(one, other, strict=True))
    return tokens, sum(one != other for one, other in pairs), len(pairs)


def main() -> int:
    """Run all engines; returns the status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=list(POOLS), choices=POOLS)
    parser.add_argument("--schedulers", nargs="+", default=SCHEDULERS, choices=SCHEDULERS)
    parser.add_argument("--seeds", default="1-3", help="first and last")
    parser.add_argument("--kills", type=int, default=0, metavar="N", help="kill N engines instead, of seed 1")
    given = parser.parse_args()
    environment.set_up()
    environment.write_models(*given.models)
    if given.kills:
        return kill_all(given.models, [one for one in given.schedulers if one != "mirror"], given.kills)
    heads = "model scheduler tier requests aborted preempted hits loaded disk differ".split()
    sys.stdout.write(COLUMNS.format(*heads) + "\n")
    rows = list(table(given.models, given.schedulers, given.seeds))
    differ, hits, loaded = (sum(column) for column in zip(*rows, strict=True))
    percent = 100 * loaded // max(1, hits)
    sys.stdout.write(f"{differ} tokens differ, {percent} % of hit tokens loaded\n")
    return int(differ > 0 or percent < LOADED_PERCENT)


def kill_all(models: list[str], schedulers: list[str], number: int) -> int:
    """Kill engines in the middle of their work, each on the disk of the one before; returns the status."""
    rng, differ, compared = random.Random(number), 0, 0
    pairs = [(model, scheduler) for scheduler in schedulers for model in models]
    with ExitStack() as stack:
        right = {model: computed(model, "stock", "1-1") for model in models}
        folders = {model: stack.enter_context(tempfile.TemporaryDirectory()) for model in models}
        for kill in range(1, number + len(models) + 1):
            model, scheduler = pairs[kill % len(pairs)]
            steps = rng.randrange(100, 600)
            fault = [f"killed {steps}"] if kill <= number else []
            found = run(model, scheduler, "1-1", options(model, "disk", folders[model]), *fault)
            tokens, wrong, answers = compare(found, right[model])
            differ, compared = differ + tokens, compared + answers
            what = f"killed at step {steps}" if "killed" in found else "ended well"
            numbers = f"{found['kept']} keys kept, {found['loaded_tokens']} tokens loaded"
            sys.stdout.write(f"{model}, {scheduler}: {numbers}; {wrong} of {answers} answers differ; {what}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{number} kills, {compared} answers compared, {differ} tokens differ\n")
    return int(differ > 0)


def table(models: list[str], schedulers: list[str], seeds: str) -> Iterator[tuple[int, int, int]]:
    """Print the lines; yields of each the tokens that differ, the hit tokens, and those that were loaded."""
    for model in models:
        right = computed(model, "stock", seeds)
        for scheduler in schedulers:
            for tier in TIERS:
                with ExitStack() as stack:
                    folder = stack.enter_context(tempfile.TemporaryDirectory())
                    kind = scheduler
                    if scheduler == "mirror":
                        kind = f"mirror {stack.enter_context(running()).address} r"
                    found = run(model, kind, seeds, options(model, tier, folder))
                differ, _, _ = compare(found, right)
                left = [*found["left"].values(), POOLS[model] - 1 - found["free"], found["mismatched"]]
                assert not any(left), f"{model}, {scheduler}, {tier} left {found['left']}, {found['free']} free"
                sent, aborted = (sum(seed[name] for seed in found["seeds"]) for name in ("sent", "aborted"))
                numbers = sent, aborted, found["preempted"], found["infinite"], found["loaded_tokens"]
                sys.stdout.write(COLUMNS.format(model, scheduler, tier, *numbers, found["from_disk"], differ) + "\n")
                sys.stdout.flush()
                yield differ, found["infinite"], found["loaded_tokens"]


if __name__ == "__main__":
    sys.exit(main())
