"""The section `prefetch` of a step, and its result: prompts whose hit is copied nearer before they are admitted."""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import dataclass, field
from enum import IntEnum

from kvplane.base.section_methods import RowsMethods

NO_REQUEST = (1 << 32) - 1  # in `Prefetch.slot`: the row gives the hashes of a prompt


@dataclass(slots=True)
class Prefetch:
    """Prompts that will be admitted soon. What of their longest hit only tiers behind the first one have is copied into
    the first one, within limits. A row that is sent again changes nothing but what is still missing; one of a
    request that runs changes nothing.

    Attributes:
        slot: of a request, or NO_REQUEST.
        num_hashes: hashes of the row; 0 for a request.
        hashes: the digests of all rows, joined.
        domain: of rows with hashes; one per row or none.
        within_ns: u64, default 0 = at any time: the copy is left out if it would take longer, by `Cache.costs_ns`.
    """

    slot: list[int] = field(default_factory=list)
    num_hashes: list[int] = field(default_factory=list)
    hashes: bytes = b""
    domain: list[str] = field(default_factory=list)
    within_ns: list[int] = field(default_factory=list)


class PrefetchOutcome(IntEnum):
    """What became of a row."""

    ALL = 0  # everything that was missing in the first tier is being copied, or nothing was
    TOO_LATE = 1  # it would take longer than `within_ns`, so nothing is copied
    TOO_MANY = 2  # a part is copied: as much as may be in flight, or as the first tier can hold without a loss


@dataclass(slots=True)
class Prefetched(RowsMethods):
    """Columns, one entry for each row.

    Attributes:
        hit: tokens of the longest hit of device and tiers.
        blocks: blocks whose copy into the first tier was ordered.
        outcome: a `PrefetchOutcome`.
    """

    hit: MutableSequence[int] = field(default_factory=list)
    blocks: MutableSequence[int] = field(default_factory=list)
    outcome: MutableSequence[int] = field(default_factory=list)
