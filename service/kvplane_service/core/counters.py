"""What a replica counts: events since it was registered, and blocks by passing over tables and pool."""

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
    """Counts since registration; those without a unit in their name or comment are events."""

    steps: int = 0
    admitted: int = 0
    ended: int = 0
    preempted: int = 0
    refused: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    granted_tokens: int = 0
    withdrawn_keys: int = 0
    unaligned_chunks: int = 0  # rows that ended inside a state block: no chunk of their step could hold a whole one
    starved_chunks: int = 0  # aligned rows without tokens, after more than PATIENT_ROWS such rows of the request


@dataclass(frozen=True, slots=True)
class GroupCounters:
    """Counters of one group: blocks held and keyed now, the others since registration."""

    used_blocks: int
    cached_blocks: int
    allocated_blocks: int
    hit_blocks: int
    evicted_blocks: int


@dataclass(slots=True)
class Residency:
    """Histograms of block lifetimes in steps, by power of two (index: bit length of the number of steps)."""

    lifetime: list[int]  # from one allocation of the block to the next
    idle_before_evict: list[int]  # from the last use to the eviction of a key
    reuse_gap: list[int]  # between two uses of a cached block

    @classmethod
    def empty(cls) -> Residency:
        """All zero."""
        return cls([0] * 65, [0] * 65, [0] * 65)  # bit lengths 0 to 64


def count_by_group(pool: BlockPool, managers: Sequence[GroupManager]) -> list[GroupCounters]:
    """Counters of each group; passes over the whole pool and changes nothing."""
    cached = [0] * len(managers)
    for block in range(pool.num_blocks):
        key = pool.key_of(block)
        if key is not None:
            cached[key.group] += 1
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
    """Per group, leading blocks that every running request shares."""
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
