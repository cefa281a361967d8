"""The section `retain` of a step, and its result: cached prefixes that are evicted after all others, until a time."""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import dataclass, field
from enum import IntEnum

from kvplane.base.section_methods import RetainMethods, RowsMethods

MAX_PRIORITY = 100
MAX_RETAINED = 1024  # prefixes of one replica
MAX_RETAINED_PER_BLOCK = 8  # their blocks, each counted once per prefix, per block of the pool and slot that retains
MAX_RETAINED_NS = 7 * 24 * 3600 * 1_000_000_000  # from `Retain.now_ns` to an end
MAX_OWNER_CHARS = 256


@dataclass(slots=True)
class Retain(RetainMethods):
    """Prefixes to retain: the blocks that a hit of the whole prefix needs, as far as they are cached now, are evicted
    after all blocks that are not retained, those of lower priority first. What is retained is not held: it is evicted
    before an allocation fails for it. A row renews an earlier one with equal owner, domain and hashes.

    With tiers that retain, what is cached in them alone is retained too, and what is retained stays so in the tiers to
    which it moves; it counts in the place where it was found and in all tiers behind that.

    Attributes:
        num_hashes: hashes of each row, 1 at least.
        hashes: the digests of all rows, joined.
        domain: default "".
        owner: name of the owner of the retention; default "".
        priority: 0 to MAX_PRIORITY; default 0.
        until_ns: u64: the end. A row whose end is not after `now_ns` releases the prefix.
        percent: default 0: the blocks that may be retained for the owner, of those of the pool, and of the slots of
            each tier, there at most `TierSpec.retained_percent`; a row that would exceed them changes nothing.
        now_ns: u64, one entry or none, default 0: the time of the part, on the clock of `until_ns`. What ends by then
            is released first, also without rows.
    """

    num_hashes: list[int] = field(default_factory=list)
    hashes: bytes = b""
    domain: list[str] = field(default_factory=list)
    owner: list[str] = field(default_factory=list)
    priority: list[int] = field(default_factory=list)
    until_ns: list[int] = field(default_factory=list)
    percent: list[int] = field(default_factory=list)
    now_ns: list[int] = field(default_factory=list)


class RetainOutcome(IntEnum):
    """What became of a row."""

    RETAINED = 0  # what is cached of the prefix is retained; nothing if nothing is
    RELEASED = 1  # it is not retained for this owner any more, or was not
    OVER_BUDGET = 2  # of the pool `left` blocks are left for the owner, fewer than the row needs
    TOO_MANY = 3  # MAX_RETAINED prefixes are retained, or MAX_RETAINED_PER_BLOCK is reached
    OTHER_OWNER = 4  # a release of what is retained for others alone
    OVER_HOST_BUDGET = 5  # as OVER_BUDGET, of the host tier
    OVER_DISK_BUDGET = 6  # as OVER_BUDGET, of the disk


@dataclass(slots=True)
class Retained(RowsMethods):
    """Columns, one entry for each row; and the number of the replica.

    Attributes:
        hit: tokens of the longest cached prefix.
        blocks: keys of blocks that the row retains, or would; one content of one group is one key.
        left: further keys that may be retained for the owner, behind this row: in the place that is over its budget,
            else in the one with the fewest.
        outcome: a `RetainOutcome`.
        next_end_ns: one entry: the earliest end of what is retained; none if nothing is.
    """

    hit: MutableSequence[int] = field(default_factory=list)
    blocks: MutableSequence[int] = field(default_factory=list)
    left: MutableSequence[int] = field(default_factory=list)
    outcome: MutableSequence[int] = field(default_factory=list)
    next_end_ns: MutableSequence[int] = field(default_factory=list)
