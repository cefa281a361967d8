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


def count_by_cell(pool: BlockPool, managers: Sequence[GroupManager], cells: int) -> list[list[int]]:
    """Return, per group, the held and then the cached free blocks of each of `cells` cells, and behind them the blocks
    in use that neither a table nor a key gives to a group. Block b is in cell b * cells // num_blocks. Changes nothing.
    """
    assert 0 < cells <= pool.num_blocks, "as many cells as blocks at most"
    groups = len(managers)
    counts = [[0] * cells for _ in range(2 * groups + 1)]
    group_of = {block: manager.group for manager in managers for table in manager.table for block in table}
    for block in range(1, pool.num_blocks):
        key = pool.key_of(block)
        group = group_of.get(block, groups if key is None else key[1])
        if pool.references[block]:
            counts[2 * group][block * cells // pool.num_blocks] += 1
        elif group < groups:
            counts[2 * group + 1][block * cells // pool.num_blocks] += 1
    return counts


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
