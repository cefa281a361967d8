"""The section `prefetch` of a step, and its result: prompts whose hit is copied nearer before they are admitted."""

from __future__ import annotations

from enum import IntEnum

from kvplane.base.sections import Prefetch, Prefetched

__all__ = ["NO_REQUEST", "Prefetch", "PrefetchOutcome", "Prefetched"]

NO_REQUEST = (1 << 32) - 1  # in `Prefetch.slot`: the row gives the hashes of a prompt


class PrefetchOutcome(IntEnum):
    """What became of a row."""

    ALL = 0  # everything that was missing in the first tier is being copied, or nothing was
    TOO_LATE = 1  # it would take longer than `within_ns`, so nothing is copied
    TOO_MANY = 2  # a part is copied: as much as may be in flight, or as the first tier can hold without a loss
