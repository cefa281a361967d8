"""Element types of pages, decoded and encoded with numpy, independent of backends."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

# Bytes of 0xFF are NaN in each type: results that depend on a page that was not written are NaN.
POISON = 0xFF


@dataclass(frozen=True)
class Format:
    """One element type.

    Attributes:
        name: name of the PyTorch type.
        num_bytes: bytes of an element.
        mantissa_bits: stored bits of the mantissa.
        min_exponent: exponent of the smallest normal number.
        largest: largest finite number.
    """

    name: str
    num_bytes: int
    mantissa_bits: int
    min_exponent: int
    largest: float

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.name)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def is_8bit(self) -> bool:
        return self.num_bytes == 1

    @property
    def eps(self) -> float:
        """Distance from 1 to the next number."""
        return float(2.0**-self.mantissa_bits)

    def step(self, value: np.ndarray) -> np.ndarray:
        """Distance between neighbours of the format around `value`."""
        _, exponent = np.frexp(np.abs(value))
        return np.asarray(np.exp2(np.maximum(exponent - 1, self.min_exponent) - self.mantissa_bits))

    def decode(self, data: np.ndarray) -> np.ndarray:
        """Values of uint8 [..., n x num_bytes] as float64 [..., n]."""
        data = np.ascontiguousarray(data)
        if self.is_8bit:
            return self._table[data]
        if self.name == "bfloat16":
            return widened((data.view(np.uint16).astype(np.uint32) << 16).view(np.float32))
        return widened(data.view(self.name))

    def encode(self, values: np.ndarray) -> np.ndarray:
        """The nearest elements to float64 [..., n] as uint8 [..., n x num_bytes]; beyond `largest` it saturates."""
        values = np.ascontiguousarray(np.clip(values, -self.largest, self.largest))
        if self.is_8bit:
            return self._encode_float8(values)
        if self.name == "bfloat16":
            bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
            return np.asarray(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)).view(np.uint8)
        return np.asarray(values.astype(self.name)).view(np.uint8)

    def rounded(self, values: np.ndarray) -> np.ndarray:
        """The values that the format can hold, nearest to `values`."""
        return self.decode(self.encode(values))

    def _encode_float8(self, values: np.ndarray) -> np.ndarray:
        magnitudes = self._table[: int(np.sum(np.isfinite(self._table[:128])))]  # ascending
        halves = (magnitudes[1:] + magnitudes[:-1]) / 2
        code = np.searchsorted(halves, np.abs(values), side="left")
        is_tie = halves[np.minimum(code, len(halves) - 1)] == np.abs(values)
        code = np.where(is_tie & (code % 2 == 1), code + 1, code)  # to even
        return np.asarray(code | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)

    @cached_property
    def _table(self) -> np.ndarray:
        """E4M3FN and E5M2 (OCP 8-bit floating point, 2023): sign, exponent, mantissa; E4M3FN has no infinity."""
        code = np.arange(256)
        size = code & 0x7F
        steps = 2**self.mantissa_bits
        exponent, mantissa = size // steps, size % steps
        normal = np.exp2(exponent + self.min_exponent - 1.0) * (1 + mantissa / steps)
        magnitude = np.where(exponent == 0, mantissa / steps * 2.0**self.min_exponent, normal)
        if self.name == "float8_e4m3fn":
            magnitude[size == 0x7F] = np.nan
        else:
            magnitude[size == 0x7C] = np.inf
            magnitude[size > 0x7C] = np.nan
        return np.where(code & 0x80, -magnitude, magnitude)


def widened(values: np.ndarray) -> np.ndarray:
    """Floats as float64; poison stays NaN, without a warning for it."""
    with np.errstate(invalid="ignore"):
        return np.asarray(values.astype(np.float64))


FLOAT64 = Format("float64", 8, 52, -1022, float(np.finfo(np.float64).max))
FLOAT32 = Format("float32", 4, 23, -126, float(np.finfo(np.float32).max))
FLOAT16 = Format("float16", 2, 10, -14, 65504.0)
BFLOAT16 = Format("bfloat16", 2, 7, -126, float(2.0**128 - 2.0**120))
FLOAT8 = Format("float8_e4m3fn", 1, 3, -6, 448.0)
FLOAT8_E5M2 = Format("float8_e5m2", 1, 2, -14, 57344.0)
FORMATS = (FLOAT64, FLOAT32, FLOAT16, BFLOAT16, FLOAT8, FLOAT8_E5M2)
