"""What a replica counts, since it was registered."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Plain integers, read by the shell. Tokens unless the name says otherwise."""

    steps: int = 0
    admitted: int = 0
    ended: int = 0
    preempted: int = 0
    refused: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    granted_tokens: int = 0
    withdrawn_keys: int = 0
    unaligned_chunks: int = 0  # rows that advanced within a state block, since no chunk of their step could hold one
    starved_chunks: int = 0  # aligned rows that got nothing, and more than PATIENT_ROWS rows of the request before


@dataclass(frozen=True, slots=True)
class GroupCounters:
    """Of one group: blocks held and keys now, the rest since registration."""

    used_blocks: int
    cached_blocks: int
    allocated_blocks: int
    hit_blocks: int
    evicted_blocks: int


@dataclass(slots=True)
class Residency:
    """How long blocks live, in steps: histograms by power of two (index = bit length of the number of steps)."""

    lifetime: list[int]  # from being handed out to being handed out again
    idle_before_evict: list[int]  # from the last use to the eviction of a key
    reuse_gap: list[int]  # between two uses of a cached block

    @classmethod
    def empty(cls) -> Residency:
        """All zero."""
        return cls([0] * 65, [0] * 65, [0] * 65)  # a step number has at most 64 bits
