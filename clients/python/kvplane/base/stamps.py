"""Stamps: the version numbers of the contents of pages.

    63       56 55                32 31                 0
    | generation |      epoch       |      counter       |

No stamp is used twice in one incarnation (one allocation) of the memory, so equal stamps mean equal content. The epoch
increases with each engine life, the counter with each allocated page, and the generation when the counter of an epoch
is exhausted.

The null block has no page. Its stamp records the last reset of the cache: an older stamp of another block does not
prove what the block's page contains, whichever service wrote that stamp.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

GENERATION_BITS = 8
EPOCH_BITS = 24
COUNTER_BITS = 32
MAX_GENERATION = (1 << GENERATION_BITS) - 1
MAX_EPOCH = (1 << EPOCH_BITS) - 1
MAX_COUNTER = (1 << COUNTER_BITS) - 1


class Stamp(NamedTuple):
    """The three fields of a stamp, the version number of a page's content."""

    generation: int
    epoch: int
    counter: int

    def pack(self) -> int:
        """Return the stamp as the u64 that is written to the stamp table."""
        assert 0 <= self.generation <= MAX_GENERATION, self
        assert 0 <= self.epoch <= MAX_EPOCH, self
        assert 0 <= self.counter <= MAX_COUNTER, self
        return self.generation << (EPOCH_BITS + COUNTER_BITS) | self.epoch << COUNTER_BITS | self.counter

    @classmethod
    def unpack(cls, value: int) -> Stamp:
        """Return the fields of a stamp, given as a u64."""
        above, counter = value >> COUNTER_BITS, value & MAX_COUNTER
        return cls(above >> EPOCH_BITS, above & MAX_EPOCH, counter)


def in_time(stamp: int) -> int:
    """Return a sort key that orders stamps of one memory by the time of their assignment: epoch,
    generation, counter.
    """
    counted = stamp & MAX_COUNTER
    return (stamp & MAX_EPOCH << COUNTER_BITS) << GENERATION_BITS | stamp >> 56 << COUNTER_BITS | counted


def newest_epoch(stamps: Iterable[int]) -> int:
    """Return the highest epoch of the given stamps (page version numbers, u64 each); 0 if there are no stamps."""
    return max({stamp >> COUNTER_BITS & MAX_EPOCH for stamp in stamps}, default=0)
