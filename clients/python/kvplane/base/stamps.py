"""Stamps: versions of a page's content.

    63       56 55                32 31                 0
    | generation |      epoch       |      counter       |

No stamp is used twice in one incarnation of the memory, so equal stamps mean equal content. The epoch increases with
each engine life, the counter with each allocated page, and the generation when the counter of an epoch is exhausted.

The null block has no page. Its stamp is that of the last reset of the cache: an older stamp, of any service, does not
prove its content.
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
    """The three fields of a stamp."""

    generation: int
    epoch: int
    counter: int

    def pack(self) -> int:
        """The u64 that is written to the stamp table."""
        assert 0 <= self.generation <= MAX_GENERATION, self
        assert 0 <= self.epoch <= MAX_EPOCH, self
        assert 0 <= self.counter <= MAX_COUNTER, self
        return self.generation << (EPOCH_BITS + COUNTER_BITS) | self.epoch << COUNTER_BITS | self.counter

    @classmethod
    def unpack(cls, value: int) -> Stamp:
        """The fields of a packed stamp."""
        above, counter = value >> COUNTER_BITS, value & MAX_COUNTER
        return cls(above >> EPOCH_BITS, above & MAX_EPOCH, counter)


def in_time(stamp: int) -> int:
    """A sort key of the stamps of one memory, in the order in which they were assigned: epoch, generation, counter."""
    counted = stamp & MAX_COUNTER
    return (stamp & MAX_EPOCH << COUNTER_BITS) << GENERATION_BITS | stamp >> 56 << COUNTER_BITS | counted


def newest_epoch(stamps: Iterable[int]) -> int:
    """The highest epoch of packed stamps, 0 when there are none."""
    return max({stamp >> COUNTER_BITS & MAX_EPOCH for stamp in stamps}, default=0)
