"""Operations on stamp tables, with numpy, so that they do not block the event loop.

A stamp table has the stamps (version numbers of contents) of all blocks of a page memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvplane.base.groups import NULL_BLOCK, ReplicaSpec, TierKind
from kvplane.base.stamp_table import StampReading
from kvplane.base.stamps import MAX_EPOCH, Stamp, in_time
from kvplane_service.core.columns import Words, behind_reset, words_of

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


def disks_alone(shown: Sequence[int], spec: ReplicaSpec) -> Sequence[int]:
    """Return a stamp table that proves no block and no slot of a host tier, and the slots of disks as `shown` does; an
    empty one if it has no slots.

    For pages that were allocated again: what is on a disk outlives them. The slots of the host do not; other slots of
    the same versions may have taken their place, if a service that lost its store gave out an epoch again.
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
