"""Counters of a replica: events since its registration, and blocks counted in one pass over tables and pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


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


class GroupTotals(NamedTuple):
    """Keys of one group, and the blocks that it allocated and took from the cache since the registration."""

    keys: int
    allocated: int
    adopted: int


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


@dataclass(slots=True)
class GroupUse:
    """Blocks of one group in one tier: `held` now; `stored`, `loaded` and `evicted` since the replica began."""

    held: int = 0
    stored: int = 0
    loaded: int = 0
    evicted: int = 0


@dataclass(slots=True)
class TierCounters:
    """What happened since the replica began, in rows unless stated otherwise; decides nothing."""

    saved: int = 0
    moved: int = 0
    discarded: int = 0  # saved or moved in vain: the source changed meanwhile
    failed: int = 0  # saves and moves that failed
    loaded: int = 0
    loads: int = 0  # jobs
    loads_failed: int = 0  # jobs
    loaded_tokens: int = 0  # of hits: tokens beyond the hit of the device alone
    waited: int = 0  # refusals of admissions until loads in flight end, because of `most_loading`
    given_up: int = 0  # admissions for which loads in flight that no request waits for leave no room, or that share one
    no_slot: int = 0  # saves and moves that found no slot to write
    no_job: int = 0  # the same, and loads, with MAX_JOBS in flight
    too_slow: int = 0  # admissions whose hit is computed sooner than it would be loaded
    # Jobs that load, by what their hit is put together from, and by the only groups that lacked something.
    device_host: int = 0
    host_disk: int = 0
    device_host_disk: int = 0
    windows_alone: int = 0
    states_alone: int = 0
    prefetched: int = 0  # blocks whose copy into the first tier a prefetch ordered; `moved` has them too
    prefetches_late: int = 0  # prefetches that would have ended too late
