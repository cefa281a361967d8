"""Columns: arrays of the standard library, which are compact and fast one by one, and numpy's over the same bytes.

A pool has a column for each thing that it knows of its blocks. numpy stays with what goes through all of them at once.
"""

from __future__ import annotations

from array import array
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

U32, U64 = "I", "Q"  # type codes of columns

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


def rows_in_order(values: Words) -> Ints:
    """Numbers of the values from the least on; equal ones stay in order. `values` are overwritten."""
    bits = len(values).bit_length()
    if not len(values) or int(values.max()).bit_length() + bits > 64:
        return np.argsort(values, kind="stable")
    values <<= np.uint64(bits)  # with the number in the low bits they can be sorted themselves, which is faster
    values |= np.arange(len(values), dtype=np.uint64)
    values.sort()
    values &= np.uint64((1 << bits) - 1)
    return values.view(np.int64)
