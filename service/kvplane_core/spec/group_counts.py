"""Blocks counted in one pass over tables and pool."""

from __future__ import annotations

from collections.abc import Sequence

from kvplane_core.face.counters import GroupCounters
from kvplane_core.face.keys import NULL_BLOCK
from kvplane_core.spec.managers import GroupManager
from kvplane_core.spec.pool import BlockPool
from kvplane_core.spec.requests import Requests


def count_by_group(pool: BlockPool, managers: Sequence[GroupManager]) -> list[GroupCounters]:
    """Return the counters of each group. Passes over the whole pool; changes nothing."""
    cached = [0] * len(managers)
    for block in range(pool.num_blocks):
        key = pool.key_of(block)
        if key is not None:
            _, group, _ = key
            cached[group] += 1
    return [
        GroupCounters(
            used_blocks=len({block for table in manager.table for block in table if block}),
            cached_blocks=cached[manager.group],
            allocated_blocks=manager.allocated,
            hit_blocks=manager.adopted,
            evicted_blocks=pool.evicted_keys[manager.group],
        )
        for manager in managers
    ]


def count_common_blocks(requests: Requests, managers: Sequence[GroupManager]) -> list[int]:
    """Return, per group, how many leading blocks are the same in the tables of all running requests."""
    running = [slot for slot in requests.slots() if requests.running[slot]]
    counts = []
    for manager in managers:
        shared = 0
        for column in zip(*(manager.table[slot] for slot in running), strict=False):
            if column[0] == NULL_BLOCK or any(block != column[0] for block in column):
                break
            shared += 1
        counts.append(shared)
    return counts
