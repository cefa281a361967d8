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


@dataclass(frozen=True, slots=True)
class GroupCounters:
    """Of one group: blocks held and keys now, the rest since registration."""

    used_blocks: int
    cached_blocks: int
    allocated_blocks: int
    hit_blocks: int
    evicted_blocks: int
