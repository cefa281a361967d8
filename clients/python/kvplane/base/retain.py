"""The section `retain` of a step, and its result: cached prefixes that are evicted after all others, until a time."""

from __future__ import annotations

from enum import IntEnum

from kvplane.base.sections import Retain, Retained

__all__ = [
    "MAX_OWNER_CHARS",
    "MAX_PRIORITY",
    "MAX_RETAINED",
    "MAX_RETAINED_NS",
    "MAX_RETAINED_PER_BLOCK",
    "Retain",
    "RetainOutcome",
    "Retained",
]

MAX_PRIORITY = 100
MAX_RETAINED = 1024  # prefixes of one replica
MAX_RETAINED_PER_BLOCK = 8  # their blocks, each counted once per prefix, per block of the pool and slot that retains
MAX_RETAINED_NS = 7 * 24 * 3600 * 1_000_000_000  # from `Retain.now_ns` to an end
MAX_OWNER_CHARS = 256


class RetainOutcome(IntEnum):
    """What became of a row."""

    RETAINED = 0  # what is cached of the prefix is retained; nothing if nothing is
    RELEASED = 1  # it is not retained for this owner any more, or was not
    OVER_BUDGET = 2  # of the pool `left` blocks are left for the owner, fewer than the row needs
    TOO_MANY = 3  # MAX_RETAINED prefixes are retained, or MAX_RETAINED_PER_BLOCK is reached
    OTHER_OWNER = 4  # a release of what is retained for others alone
    OVER_HOST_BUDGET = 5  # as OVER_BUDGET, of the host tier
    OVER_DISK_BUDGET = 6  # as OVER_BUDGET, of the disk
