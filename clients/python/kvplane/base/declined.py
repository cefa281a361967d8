"""Admissions whose hit in the tiers is longer than what they got, and why that hit is not loaded."""

from __future__ import annotations

from enum import IntEnum

from kvplane.base.sections import Declined

__all__ = ["Declined", "WhyDeclined"]


class WhyDeclined(IntEnum):
    """Why the hit of an admission is not loaded."""

    TOO_SLOW = 1  # to load it takes longer than to compute it
    NO_JOB = 2  # too many jobs are in flight
    WAITS = 3  # the row is deferred: loads in flight load a part of the hit, or leave no room for another one
    GIVEN_UP = 4  # the same, but no request waits any more for these loads, so that they may never end
