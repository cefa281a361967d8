"""Counters of a replica: events since its registration, and blocks counted in one pass over tables and pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvplane_service.core.keys import NULL_BLOCK

if TYPE_CHECKING:
    from kvplane_service.core.managers import GroupManager
    from kvplane_service.core.pool import BlockPool
    from kvplane_service.core.requests import Requests


@dataclass(slots=True)
class Counters:
    """Counts since the replica was registered. A count without a unit in its name or comment counts events."""

    steps: int = 0
    admitted: int = 0
    ended: int = 0
    preempted: int = 0
    refused: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    granted_tokens: int = 0
    withdrawn_keys: int = 0
    unaligned_chunks: int = 0  # rows that ended inside a block of state: the budget was below one block
    starved_chunks: int = 0  # rows of 0 tokens for lack of room for a state block, after PATIENT_ROWS in sequence


@dataclass(frozen=True, slots=True)
class GroupCounters:
    """Counters of one group: used and cached blocks at the time of the call, all other counts since
    the registration.
    """

    used_blocks: int
    cached_blocks: int
    allocated_blocks: int
    hit_blocks: int
    evicted_blocks: int


@dataclass(slots=True)
class Residency:
    """Histograms of block lifetimes: entry n counts the lifetimes whose number of steps has n binary digits."""

    lifetime: list[int]  # from one allocation of the block to the next
    idle_before_evict: list[int]  # from the last use to the eviction of a key
    reuse_gap: list[int]  # between two uses of a cached block

    @classmethod
    def empty(cls) -> Residency:
        """Return histograms whose entries are all 0."""
        return cls([0] * 65, [0] * 65, [0] * 65)  # bit lengths 0 to 64


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
