"""Columns over all blocks of a pool: arrays of the standard library, and numpy views of the same bytes.

Arrays are compact, and single entries are read and written fast. Passes over many entries use numpy.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvplane.base.stamps import COUNTER_BITS, EPOCH_BITS, GENERATION_BITS, MAX_COUNTER, MAX_EPOCH, Stamp, in_time

U32, U64 = "I", "Q"  # type codes of columns
SLICE_BLOCKS = 4096  # between two yields of a pass over many blocks: a few milliseconds at most

_COUNTERS, _EPOCHS = np.uint64(MAX_COUNTER), np.uint64(Stamp(0, MAX_EPOCH, 0).pack())
_COUNTER_BITS, _GENERATION_BITS = np.uint64(COUNTER_BITS), np.uint64(GENERATION_BITS)
_GENERATION_AT = np.uint64(EPOCH_BITS + COUNTER_BITS)

Bytes: TypeAlias = npt.NDArray[np.uint8]
Ints: TypeAlias = npt.NDArray[np.integer[Any]]
Words: TypeAlias = npt.NDArray[np.uint64]
Mask: TypeAlias = npt.NDArray[np.bool_]


def zeros(code: str, count: int) -> array[int]:
    """A column of zeros."""
    return array(code, bytes(count * array(code).itemsize))


def column(code: str, values: npt.NDArray[Any]) -> array[int]:
    """A column of these values."""
    made = array(code)
    made.frombytes(np.ascontiguousarray(values, code).view(np.uint8).data)
    return made


def words_of(values: Sequence[int]) -> Words:
    """These u64 values as a numpy array; a column is not copied."""
    return np.frombuffer(values if isinstance(values, array | memoryview) else array(U64, values), np.uint64)


def behind_reset(stamps: Words, last_reset: int) -> Mask:
    """Which of these stamps were issued after a reset; `last_reset` 0: there was none."""
    if not last_reset:
        return np.ones(len(stamps), np.bool_)
    generations = stamps >> _GENERATION_AT << _COUNTER_BITS
    given: Words = (stamps & _EPOCHS) << _GENERATION_BITS | generations | stamps & _COUNTERS  # as `in_time`
    return given > np.uint64(in_time(last_reset))


def are_equal(some: Sequence[int], others: Sequence[int]) -> bool:
    """Whether two sequences of u64 values are equal."""
    return len(some) == len(others) and (some is others or bool((words_of(some) == words_of(others)).all()))


def put_zeros(target: array[int], at: Sequence[int] | Ints) -> None:
    """Set these entries to 0."""
    np.frombuffer(target, target.typecode)[at] = 0


def put_range(target: array[int], at: Ints, first: int) -> None:
    """Set these entries to `first`, `first` + 1 and so on."""
    np.frombuffer(target, target.typecode)[at] = np.arange(first, first + len(at), dtype=target.typecode)


def rows_in_order(values: Words) -> Ints:
    """Row numbers in ascending order of the values; equal values keep their order. Overwrites `values`."""
    bits = len(values).bit_length()
    if not len(values) or int(values.max()).bit_length() + bits > 64:
        return np.argsort(values, kind="stable")
    values <<= np.uint64(bits)  # sorting words that carry their row number is faster than argsort
    values |= np.arange(len(values), dtype=np.uint64)
    values.sort()
    values &= np.uint64((1 << bits) - 1)
    return values.view(np.int64)
