"""Functions on columns: arrays of the standard library with one integer per entry, and numpy views of the bytes of such
an array.

An array is compact, and reading or writing a single entry is fast. Passes over many entries use numpy.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from kvplane.base.stamps import COUNTER_BITS, EPOCH_BITS, GENERATION_BITS, MAX_COUNTER, MAX_EPOCH, Stamp, in_time

U32, U64 = "I", "Q"  # type codes of columns
PIECE = 1024  # entries of a piece, some microseconds of work each at most
SLICE_BLOCKS = 4096  # blocks between two yields of a pass over many: a few milliseconds at most

_COUNTERS, _EPOCHS = np.uint64(MAX_COUNTER), np.uint64(Stamp(0, MAX_EPOCH, 0).pack())
_COUNTER_BITS, _GENERATION_BITS = np.uint64(COUNTER_BITS), np.uint64(GENERATION_BITS)
_GENERATION_AT = np.uint64(EPOCH_BITS + COUNTER_BITS)

Bytes: TypeAlias = npt.NDArray[np.uint8]
Ints: TypeAlias = npt.NDArray[np.integer[Any]]
Words: TypeAlias = npt.NDArray[np.uint64]
Mask: TypeAlias = npt.NDArray[np.bool_]
_T = TypeVar("_T")


def zeros(code: str, count: int) -> array[int]:
    """Return a new column of `count` zeros; `code` is the type code of its entries: `U32` or `U64`."""
    return array(code, bytes(count * array(code).itemsize))


def pieces(items: Iterable[_T], count: int = PIECE) -> Iterator[list[_T]]:
    """Yield the items in lists of at most `count`, so that long work can be split."""
    iterator = iter(items)
    while piece := list(islice(iterator, count)):
        yield piece


def column(code: str, values: npt.NDArray[Any]) -> array[int]:
    """Copy the values into a new column; `code` is the type code of its entries: `U32` or `U64`."""
    made = array(code)
    made.frombytes(np.ascontiguousarray(values, code).view(np.uint8).data)
    return made


def words_of(values: Sequence[int]) -> Words:
    """Return u64 values as a numpy array, which shares the bytes of a column; the values of a list are copied."""
    return np.frombuffer(values if isinstance(values, array | memoryview) else array(U64, values), np.uint64)


def behind_reset(stamps: Words, last_reset: int) -> Mask:
    """Return a mask: which stamps (version numbers of block contents) were issued after the reset of the cache.

    `last_reset` is the stamp that the reset issued; 0 if there was no reset, then every entry of the mask is true.
    """
    if not last_reset:
        return np.ones(len(stamps), np.bool_)
    generations = stamps >> _GENERATION_AT << _COUNTER_BITS
    given: Words = (
        (stamps & _EPOCHS) << _GENERATION_BITS | generations | stamps & _COUNTERS
    )  # the order of `stamps.in_time`
    return given > np.uint64(in_time(last_reset))


def are_equal(some: Sequence[int], others: Sequence[int]) -> bool:
    """Whether two sequences of u64 values are equal."""
    return len(some) == len(others) and (some is others or bool((words_of(some) == words_of(others)).all()))


def rows_in_order(values: Words) -> Ints:
    """Return the positions of the values, sorted by value; equal values keep their order. Overwrites `values`."""
    bits = len(values).bit_length()
    if not len(values) or int(values.max()).bit_length() + bits > 64:
        return np.argsort(values, kind="stable")
    values <<= np.uint64(bits)  # sorting words that carry their row number is faster than argsort
    values |= np.arange(len(values), dtype=np.uint64)
    values.sort()
    values &= np.uint64((1 << bits) - 1)
    return values.view(np.int64)
