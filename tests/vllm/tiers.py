"""Prints what kvplane's tiers did on a live vLLM, a line per model, scheduler and tier: `python -m tests.vllm.tiers`.

    python -m tests.vllm.tiers                        # all of them, then faults: half an hour
    python -m tests.vllm.tiers --models llama --seeds 1-1
    python -m tests.vllm.tiers --kills 30             engines, their ranks, and services that follow are killed

Tokens are compared with those of a stock vLLM that computes each prompt alone; of models in bfloat16 (see `Live.seed`
of `tiers_live`) also with those that it computes again behind a preemption, and with those that it gives to the same
requests without a connector. Hit tokens are those of an infinite cache in which each request is computed when the next
one comes; the device is so small that it hits few of them. Next to kvplane's tiers is LMCache's connector on the same
requests, where it starts. kvplane's scheduler refuses it on models with windows: tokens of these are printed and not
judged. Faults are those of `tier_faults.controls`. Ends with status 1 if a token differs, something is left, less than
LOADED_PERCENT of the hit tokens are loaded by kvplane's tiers, or a fault is not found.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from tests.service.rig import running
from tests.vllm import environment, tier_faults
from tests.vllm.tier_runs import LMCACHE_MODES, POOLS, compare, computed, left_of, options, run, run_with_lmcache

SCHEDULERS = ("stock", "stock async", "kvplane", "mirror")
TIERS = ("host", "disk")
LOADED_PERCENT = 60
LEFT = "in _update_from_kv_xfer_finished\n[rank0]:     assert req_id in self.requests"
COLUMNS = "{:8} {:12} {:8} {:>8} {:>7} {:>9} {:>8} {:>8} {:>4} {:>8} {:>6}"
HEADS = "model scheduler tier requests aborted preempted hits loaded % disk differ".split()


def main() -> int:
    """Run all engines; returns the status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=list(POOLS), choices=POOLS)
    parser.add_argument("--schedulers", nargs="+", default=SCHEDULERS, choices=SCHEDULERS)
    parser.add_argument("--seeds", default="1-3", help="first and last")
    parser.add_argument("--kills", type=int, default=0, metavar="N", help="kill N processes instead, of seed 1")
    given = parser.parse_args()
    environment.set_up()
    environment.write_models(*given.models)
    if given.kills:
        return tier_faults.kill_all(given.models, given.kills)
    say(COLUMNS.format(*HEADS))
    is_wrong, ours = False, [0, 0]
    for model, scheduler, tier in rows(given.models, given.schedulers):
        found = run_row(model, scheduler, tier, given.seeds)
        if found is None:
            say(f"{model:8} {scheduler:12} {tier:8} vLLM ended: its connector names a request that has left")
            continue
        differ, _, _ = compare(found, computed(model, given.seeds))
        left, hits, loaded = left_of(model, found), found["infinite"], found["loaded_tokens"]
        sent, aborted = (sum(seed[name] for seed in found["seeds"]) for name in ("sent", "aborted"))
        numbers = sent, aborted, found["preempted"], hits, loaded, 100 * loaded // max(1, hits), found["from_disk"]
        say(COLUMNS.format(model, scheduler, tier, *numbers, differ) + (f" left {left}" if left else ""))
        is_wrong = is_wrong or bool(left) or (differ > 0 and (tier != "lmcache" or model == "llama"))
        if tier != "lmcache":
            ours = [ours[0] + hits, ours[1] + loaded]
    percent = 100 * ours[1] // max(1, ours[0])
    say(f"kvplane's tiers loaded {percent} % of the hit tokens")
    are_found = tier_faults.controls(given.models)
    return int(is_wrong or percent < LOADED_PERCENT or not are_found)


def rows(models: list[str], schedulers: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield model, scheduler and tier of each line."""
    for model in models:
        for scheduler in schedulers:
            yield from ((model, scheduler, tier) for tier in TIERS)
            if model == "llama" or (model in LMCACHE_MODES and scheduler.startswith("stock")):
                yield model, scheduler, "lmcache"


def run_row(model: str, scheduler: str, tier: str, seeds: str) -> dict[str, Any] | None:
    """Return what an engine did that begins with empty tiers; None = LMCache has ended vLLM's own scheduler."""
    with ExitStack() as stack:
        kind = f"mirror {stack.enter_context(running()).address} r" if scheduler == "mirror" else scheduler
        if tier == "lmcache":
            try:
                return run_with_lmcache(model, kind, seeds)
            except AssertionError as error:
                if not kind.startswith("stock") or LEFT not in str(error):
                    raise
                return None
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        return run(model, kind, seeds, options(model, tier, folder))


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
