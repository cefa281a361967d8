"""Engines with a fault planted in the adapter, and what stock shows that they do not: prints the differences as JSON.

python tests/vllm/twins.py MODEL [FAULT...]

Runs in the environment of vLLM (`environment`). The product has no hooks: each fault replaces methods of the manager
of a running scheduler. A fault runs in a fork of an engine that has started already; "" is the run without a fault.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from workload import EVENTS, Observed, engine

POOLS = {"llama": 30, "qwen3next": 30}
SEED = {"llama": 1, "qwen3next": 1}
Fault = Callable[[Any], None]  # plants it into the manager of a running engine


def lose_zeroes(manager: Any) -> None:
    """The pages of new blocks are not zeroed."""
    take = manager.take_new_block_ids
    manager.take_new_block_ids = lambda: take()[1:]


def adopt_one_more(manager: Any) -> None:
    """The hit is one block longer than what was found."""
    look_up = manager.get_computed_blocks

    def one_more(request: Any, *rest: Any) -> Any:
        blocks, tokens, longest = look_up(request, *rest)
        if not tokens:
            return blocks, tokens, longest
        free = manager.blocks[list(manager.pool.free)[-1]]
        longer = tuple([*row, free] for row in blocks.blocks)
        return KVCacheBlocks(longer), tokens + manager.spec.hash_block_size, longest

    manager.get_computed_blocks = one_more


def forget_limit(manager: Any) -> None:
    """The allocator admits one block less of a hit than the scheduler has."""
    admit = manager._admit
    manager._admit = lambda known, hit, *rest: admit(known, max(0, hit - manager.spec.hash_block_size), *rest)


def lose_denials(manager: Any) -> None:
    """The scheduler is not notified that there are no free blocks, so that it does not preempt."""
    allocate = manager.allocate_slots

    def granted(*args: Any, **options: Any) -> Any:
        found = allocate(*args, **options)
        return manager.empty_kv_cache_blocks if found is None else found

    manager.allocate_slots = granted


def lose_preemptions(manager: Any) -> None:
    """The allocator is not notified of preempted requests."""
    free = manager.free_id
    manager.free_id = lambda one: free(one) if manager.known[one].request.is_finished() else None


def swap_blocks(manager: Any) -> None:
    """One new block in each grant of several is a block of another request."""
    view = manager._view

    def swapped(rows: Any) -> Any:
        used = [block for block in range(1, len(manager.blocks)) if manager.pool.references[block]]
        others = [block for block in used if all(block not in row for row in rows)]
        return view([[others[0], *row[1:]] if row and others else row for row in rows])

    manager._view = swapped


def lose_events(manager: Any) -> None:
    """The last cache event of a step is lost."""
    take = manager.take_pending_events
    manager.take_pending_events = lambda: take()[:-1]


def lose_hashes(manager: Any) -> None:
    """The last hash of a prompt is not reported."""
    progress = manager._progress

    def shortened(known: Any, *args: Any, **options: Any) -> Any:
        update = progress(known, *args, **options)
        return update._replace(digests=list(update.digests)[:-1])

    manager._progress = shortened


def keep_cache(manager: Any) -> None:
    """A reset of the cache is answered and not carried out."""
    manager.reset_prefix_cache = lambda: True
    manager.block_pool.reset_prefix_cache = lambda: True


def keep_held(manager: Any) -> None:
    """A finished request keeps its blocks."""
    manager.free_id = lambda one: None


FAULTS: dict[str, tuple[str, Fault]] = {  # name -> model that shows it, fault
    "zero order lost": ("qwen3next", lose_zeroes),
    "one block too many adopted": ("llama", adopt_one_more),
    "one block too few adopted": ("llama", forget_limit),
    "denial not reported": ("llama", lose_denials),
    "preemption not reported": ("llama", lose_preemptions),
    "block of another request": ("llama", swap_blocks),
    "event lost": ("llama", lose_events),
    "hash not reported": ("llama", lose_hashes),
    "reset not done": ("llama", keep_cache),
    "finished request not freed": ("llama", keep_held),
}


def forked(folder: Path, work: Callable[[], Any]) -> Any:
    """Run `work` in a fork of this process; returns its result, or the last line of its exception."""
    report, pid = folder / "report.json", os.fork()
    if not pid:
        try:
            report.write_text(json.dumps(work()))
        except BaseException:
            report.write_text(json.dumps({"error": traceback.format_exc().strip().splitlines()[-1]}))
        os._exit(0)
    os.waitpid(pid, 0)
    return json.loads(report.read_text())


def bound(scheduler: Any, most: int) -> None:
    """Let the scheduler fail after this many steps: a fault may leave it without an end."""
    schedule, steps = scheduler.schedule, iter(range(most))

    def bounded(*args: Any, **options: Any) -> Any:
        assert next(steps, None) is not None, "more than twice the steps of stock"
        return schedule(*args, **options)

    scheduler.schedule = bounded


def main(model: str, names: list[str]) -> None:
    """Run stock, and each fault; print what differs from stock."""
    with TemporaryDirectory() as name:
        folder = Path(name)

        def run(observed: Observed, fault: Fault | None) -> dict[str, Any]:
            if fault is not None:
                fault(observed.scheduler.kv_cache_manager)
                bound(observed.scheduler, 2 * stock["steps"])
            return observed.seed(SEED[model], observed.llm.reset_prefix_cache)

        stock = forked(folder, lambda: run(Observed(engine(model, "stock", POOLS[model], **EVENTS), model), None))
        observed = Observed(engine(model, "kvplane", POOLS[model], **EVENTS), model)
        found = {}
        for one in ["", *(names or [fault for fault, (shown, _) in FAULTS.items() if shown == model])]:
            result = forked(folder, lambda: run(observed, FAULTS[one][1] if one else None))  # noqa: B023
            found[one] = result.get("error") or [field for field in stock if stock[field] != result[field]]
            sys.stderr.write(f"{one}: {found[one]}\n")
    print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2:])
