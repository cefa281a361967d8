"""Columns: tensors of many integers in host memory, made and read without a statement of Python per number.

torch has no fast way to do so without numpy, which a worker's image need not have.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable

import torch
from torch import Tensor

_CODES = {torch.int32: "i", torch.int64: "q", torch.uint64: "Q"}


def column(values: Iterable[int], dtype: torch.dtype = torch.int64) -> Tensor:
    """Return numbers as a tensor of int32, int64 or uint64. Raises struct.error if a number is out of its range."""
    numbers = tuple(values)
    # torch maps no empty buffer, so eight bytes follow the numbers.
    packed = bytearray(struct.pack(f"{len(numbers)}{_CODES[dtype]}8x", *numbers))
    return torch.frombuffer(packed, dtype=dtype)[: len(numbers)]


def numbers(of: Tensor) -> tuple[int, ...]:
    """Return the numbers of a contiguous column in host memory."""
    assert of.is_contiguous()
    packed = ctypes.string_at(of.data_ptr(), of.nbytes)  # a copy, made while `of` keeps its memory
    return struct.unpack(f"{len(of)}{_CODES[of.dtype]}", packed)
