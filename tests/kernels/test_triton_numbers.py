"""Conversion of 8-bit floats by integers equals PyTorch's."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kvplane_kernels.triton_ops.kernels import numbers
from kvplane_kernels.triton_ops.kernels.numbers import power_of_two_below, saturate_fp8, unpack_fp8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INTEGER = {E4M3: int(numbers.E4M3_INTEGER.value), E5M2: int(numbers.E5M2_INTEGER.value)}
# The assembly of a type, and the number by which its results are to be multiplied.
ASSEMBLY = {
    "native": (E4M3, numbers.E4M3_INSTRUCTIONS.value, 1.0),
    "e4m3": (E4M3, numbers.E4M3_ARITHMETIC.value, 256.0),
    "e5m2": (E5M2, numbers.E5M2_ARITHMETIC.value, 1.0),
}
TYPES = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)


@triton.jit
def unpack_all(source, even, odd, COUNT: tl.constexpr, FP8: tl.constexpr):
    index = tl.arange(0, COUNT)
    low, high = unpack_fp8(tl.load(source + index), FP8)
    tl.store(even + index, low * numbers.unit_of(FP8))
    tl.store(odd + index, high * numbers.unit_of(FP8))


@triton.jit
def encode_all(source, target, COUNT: tl.constexpr, FP8: tl.constexpr):
    index = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(target + index, saturate_fp8(tl.load(source + index), FP8))


@triton.jit
def units(source, target, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    tl.store(target + index, power_of_two_below(tl.load(source + index)))


def encoded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Encode float32 values; their number is a multiple of 65,536."""
    out = torch.full((len(values),), 0x55, dtype=torch.uint8)
    encode_all[(len(values) // 65536,)](values, out, COUNT=65536, FP8=INTEGER[dtype])
    return out


def wanted(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype).view(torch.uint8)


def assert_same_bytes(values: torch.Tensor, dtype: torch.dtype) -> None:
    got, want = encoded(values, dtype), wanted(values, dtype)
    both_nan = values.isnan() & got.view(dtype).float().isnan()
    different = (got != want) & ~both_nan
    assert not different.any(), [
        (float(v), int(g), int(w)) for v, g, w in zip(*(t[different][:5] for t in (values, got, want)), strict=True)
    ]


def all_pairs() -> torch.Tensor:
    """All pairs of bytes, int16."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16)


def halves(pairs: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The even and the odd values of pairs by PyTorch, float16."""
    both = pairs.view(dtype).to(torch.float16).reshape(-1, 2)
    return both[:, 0], both[:, 1]


@TYPES
def test_unpacked_pairs_of_every_byte_equal_torch(dtype):
    even, odd = torch.zeros(65536, dtype=torch.float16), torch.zeros(65536, dtype=torch.float16)
    unpack_all[(1,)](all_pairs(), even, odd, COUNT=65536, FP8=INTEGER[dtype])
    for got, want in zip((even, odd), halves(all_pairs(), dtype), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def pick(a: np.ndarray, b: np.ndarray, order: int) -> np.ndarray:
    """prmt.b32: a byte of a, b for each digit of `order`, lowest first."""
    parts = [(x >> np.uint64(8 * i)) & np.uint64(0xFF) for x in (a, b) for i in range(4)]
    return sum(parts[order >> 4 * i & 7] << np.uint64(8 * i) for i in range(4))  # type: ignore[return-value]


def converted(pairs: np.ndarray) -> np.ndarray:
    """cvt.rn.f16x2.e4m3x2: the low byte becomes the low half."""
    even, odd = halves(torch.from_numpy(pairs.astype(np.uint16).view(np.int16)), E4M3)
    low, high = (half.view(torch.int16).numpy().view(np.uint16).astype(np.uint64) for half in (even, odd))
    return low | high << np.uint64(16)


RUNS: dict[str, Callable[..., np.ndarray]] = {
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, b: a << b,
    "shr.b32": lambda a, b: a >> b,
    "add.u32": lambda a, b: a + b,
    "prmt.b32": lambda a, b, order: pick(a, b, int(order)),
    "cvt.rn.f16x2.e4m3x2": converted,
    "mov.b32": lambda a: a,
}


def run_assembly(text: str, word: np.ndarray, shared: str) -> tuple[np.ndarray, np.ndarray]:
    """Run instructions of PTX on 32-bit words. Register `shared`, $0 or $1, is $2 too, as a compiler may choose."""
    held: dict[str, np.ndarray] = {}

    def name(register: str) -> str:
        return "$2" if register == shared else register

    held["$2"] = word.astype(np.uint64)
    for op, given in re.findall(r"([a-z][\w.]+) ([^;]+);", text):
        if op.startswith("reg") or given.startswith("."):
            continue
        if "{" in given:  # mov.b32 {x, y}, source
            low, high, source = re.findall(r"[$\w]+", given)
            held[low], held[high] = held[name(source)] & np.uint64(0xFFFF), held[name(source)] >> np.uint64(16)
            continue
        target, *sources = (part.strip() for part in given.split(","))
        values = [held[name(one)] if name(one) in held else np.uint64(int(one, 0)) for one in sources]
        held[name(target)] = RUNS[op](*values) & np.uint64(0xFFFFFFFF)
    return held[name("$0")], held[name("$1")]


@pytest.mark.parametrize("shared", ["", "$0", "$1"])
@pytest.mark.parametrize("way", ASSEMBLY)
def test_assembly_unpacks_every_byte_as_torch_does(way, shared):
    """The instructions that a GPU would run, run here: every pair next to a shuffled one."""
    dtype, text, unit = ASSEMBLY[way]
    first = np.arange(65536, dtype=np.uint64)
    second = np.random.default_rng(0).permutation(first)
    found = run_assembly(text, first | second << np.uint64(16), shared)
    for results, part in zip(found, (0, 1), strict=True):
        for got, pairs in ((results & np.uint64(0xFFFF), first), (results >> np.uint64(16), second)):
            value = torch.from_numpy(got.astype(np.uint16).view(np.int16)).view(torch.float16).float() * unit
            want = halves(torch.from_numpy(pairs.astype(np.uint16).view(np.int16)), dtype)[part].float()
            torch.testing.assert_close(value, want, rtol=0, atol=0, equal_nan=True)


@TYPES
def test_encode_fp8_of_every_16_bit_float_equals_torch(dtype):
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    for wide in (torch.bfloat16, torch.float16):
        assert_same_bytes(bits.view(wide).float(), dtype)


@TYPES
def test_encode_fp8_of_ties_and_neighbours_equals_torch(dtype):
    magnitudes = torch.arange(128, dtype=torch.uint8).view(dtype).float()
    finite = np.sort(magnitudes[magnitudes.isfinite()].numpy())
    ties = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    near = np.concatenate(
        [finite, ties, *(np.nextafter(x, y) for x in (ties, finite) for y in (np.float32(0), np.float32(1e9)))]
    )
    values = torch.from_numpy(np.concatenate([near, -near]).astype(np.float32))
    assert_same_bytes(torch.cat([values, torch.zeros(65536 - len(values))]), dtype)


@TYPES
def test_encode_fp8_of_random_bits_equals_torch(dtype):
    bits = torch.from_numpy(np.random.default_rng(0).integers(0, 2**32, 1 << 20, dtype=np.uint32).view(np.int32))
    assert_same_bytes(bits.view(torch.float32), dtype)


def test_query_unit_is_a_power_of_two_that_leaves_the_query_below_2():
    source = torch.cat([torch.logspace(-30, 30, 61), torch.tensor([0.0, 1.0, 2.0])])
    out = torch.zeros_like(source)
    units[(1,)](source, out, COUNT=64)
    assert torch.equal(torch.frexp(out).mantissa, torch.full_like(out, 0.5))
    within = (source > 1e-28) & (source < 1e28)
    assert ((source / out)[within] < 2).all()
    assert ((source / out)[within] >= 1).all()
