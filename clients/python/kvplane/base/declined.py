"""Admissions whose hit in the tiers is longer than what they got, and why that hit is not loaded."""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import dataclass, field
from enum import IntEnum

from kvplane.base.section_methods import RowsMethods


class WhyDeclined(IntEnum):
    """Why the hit of an admission is not loaded."""

    TOO_SLOW = 1  # to load it takes longer than to compute it
    NO_JOB = 2  # too many jobs are in flight
    WAITS = 3  # the row is deferred: loads in flight load a part of the hit, or leave no room for another one
    GIVEN_UP = 4  # the same, but no request waits any more for these loads, so that they may never end


@dataclass(slots=True)
class Declined(RowsMethods):
    """Columns, one entry for each such admission.

    Attributes:
        row: number of the admit row.
        why: a `WhyDeclined`.
        tier: number of the farthest tier that would be read.
        hit: tokens of the hit that is not loaded.
        load_ns: u64, time to load it, behind the loads in flight, by `Cache.costs_ns`; 0 if it is unknown.
        compute_ns: u64, time to compute what it has beyond the hit of the device; 0 if it is unknown.
    """

    row: MutableSequence[int] = field(default_factory=list)
    why: MutableSequence[int] = field(default_factory=list)
    tier: MutableSequence[int] = field(default_factory=list)
    hit: MutableSequence[int] = field(default_factory=list)
    load_ns: MutableSequence[int] = field(default_factory=list)
    compute_ns: MutableSequence[int] = field(default_factory=list)
