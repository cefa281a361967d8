"""Operations on stamp tables, with numpy, so that they do not block the event loop.

A stamp table has the stamps of all blocks of a page memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvplane.base.groups import NULL_BLOCK, ReplicaSpec, TierKind
from kvplane.base.session import OpenRequest
from kvplane.base.stamp_table import StampReading
from kvplane.base.stamps import MAX_EPOCH, Stamp, in_time
from kvplane_core.face.columns import Words, behind_reset, words_of

_PIECE = 1 << 16  # stamps processed at a time, so that they and the results fit the CPU cache
_EPOCH_BITS = np.uint64(Stamp(0, MAX_EPOCH, 0).pack())


def newest_epoch(stamps: Sequence[int]) -> int:
    """Return the highest epoch of packed stamps, 0 if there are none."""
    return max((Stamp.unpack(int((piece & _EPOCH_BITS).max())).epoch for piece in _pieces(words_of(stamps))), default=0)


def confirmed(shown: Sequence[int], reading: StampReading) -> Sequence[int]:
    """Return the stamps on which the engine's table `shown` and the table `reading` agree; 0 for blocks where they
    differ.
    """
    if len(reading.stamps) != len(shown):
        return no_stamps(len(shown))
    proven, last_reset = words_of(shown).copy(), max(shown[NULL_BLOCK], reading.stamps[NULL_BLOCK], key=in_time)
    for piece, read in zip(_pieces(proven), _pieces(words_of(reading.stamps)), strict=True):
        piece[(piece != read) | ~behind_reset(piece, last_reset)] = 0
    proven[NULL_BLOCK] = last_reset
    return memoryview(proven.view(np.uint8).data).cast("Q")


def no_stamps(num_blocks: int) -> Sequence[int]:
    """Return a stamp table of zeros, by which no key counts as verified."""
    return memoryview(bytes(num_blocks * 8)).cast("Q")


@dataclass(frozen=True, slots=True)
class Contents:
    """Identifies what a stamp table describes; 0 = unknown.

    Stamps are unique within equal numbers only: a service that lost its store gives an epoch again, and content of
    other pages, or of another disk, then gets stamps that were given before.

    Attributes:
        pages: incarnation of the page memory; the slots of host tiers are as old.
        disks: incarnation of what the disk tiers hold, which outlives the pages.
    """

    pages: int = 0
    disks: int = 0

    @classmethod
    def named_by(cls, request: OpenRequest) -> Contents:
        """Return what an engine states when it opens a session."""
        return cls(request.incarnation, request.disk_incarnation)

    def may_have_pages_of(self, before: Contents) -> bool:
        """Whether the page memory is that of `before`; an unknown one counts as the same."""
        return not self.pages or not before.pages or self.pages == before.pages

    def after(self, before: Contents) -> Contents:
        """Return what is known of an engine life that states these numbers, behind one with those of `before`."""
        pages = self.pages or before.pages
        return Contents(pages, self.disks or (before.disks if pages == before.pages else 0))


def shown_of(shown: Sequence[int], spec: ReplicaSpec, now: Contents, before: Contents) -> Sequence[int]:
    """Return a stamp table that proves what `shown` proves of keys from before: with page memory of another incarnation
    no block and no slot of a host tier, with other or unknown disks no slot at all.
    """
    if now.may_have_pages_of(before):
        return shown  # as long as the page memory exists, a disk tier has the same file
    return disks_alone(shown, spec) if now.disks and now.disks == before.disks else ()


def disks_alone(shown: Sequence[int], spec: ReplicaSpec) -> Sequence[int]:
    """Return a stamp table that proves no block and no slot of a host tier, and the slots of disks as `shown` does; an
    empty one if it has no slots.
    """
    first = spec.num_blocks
    if len(shown) <= first:
        return ()
    kept = words_of(shown).copy()
    kept[:first] = 0
    for tier in spec.tiers:
        if tier.kind is not TierKind.DISK:
            kept[first : first + tier.num_blocks] = 0
        first += tier.num_blocks
    return memoryview(kept.view(np.uint8).data).cast("Q")


def _pieces(words: Words) -> Iterator[Words]:
    for start in range(0, len(words), _PIECE):
        yield words[start : start + _PIECE]
