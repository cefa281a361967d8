"""Conversion of 8-bit floats by integers equals PyTorch's."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from kvplane_worker.ops.triton_ops.kernels.numbers import INTEGER_FP8, decode_fp8, power_of_two_below, saturate_fp8

FP8 = torch.float8_e4m3fn


@triton.jit
def decode_all(source, target, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    tl.store(target + index, decode_fp8(tl.load(source + index)))


@triton.jit
def encode_all(source, target, COUNT: tl.constexpr):
    index = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(target + index, saturate_fp8(tl.load(source + index), INTEGER_FP8))


@triton.jit
def units(source, target, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    tl.store(target + index, power_of_two_below(tl.load(source + index)))


def encoded(values: torch.Tensor) -> torch.Tensor:
    """Encode float32 values; their number is a multiple of 65,536."""
    out = torch.full((len(values),), 0x55, dtype=torch.uint8)
    encode_all[(len(values) // 65536,)](values, out, COUNT=65536)
    return out


def wanted(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-448, 448).to(FP8).view(torch.uint8)


def assert_same_bytes(values: torch.Tensor) -> None:
    got, want = encoded(values), wanted(values)
    both_nan = values.isnan() & ((got & 0x7F) == 0x7F)
    different = (got != want) & ~both_nan
    assert not different.any(), [
        (float(v), int(g), int(w)) for v, g, w in zip(*(t[different][:5] for t in (values, got, want)), strict=True)
    ]


def test_decode_fp8_of_every_byte_equals_torch():
    source = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    out = torch.zeros(256, dtype=torch.float16)
    decode_all[(1,)](source, out, COUNT=256)
    torch.testing.assert_close(out, source.view(FP8).to(torch.float16), rtol=0, atol=0, equal_nan=True)


def test_encode_fp8_of_every_16_bit_float_equals_torch():
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        assert_same_bytes(bits.view(dtype).float())


def test_encode_fp8_of_ties_and_neighbours_equals_torch():
    finite = np.sort(torch.arange(127, dtype=torch.uint8).view(FP8).float().numpy())
    ties = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    near = np.concatenate(
        [finite, ties, *(np.nextafter(x, y) for x in (ties, finite) for y in (np.float32(0), np.float32(1e9)))]
    )
    values = torch.from_numpy(np.concatenate([near, -near]).astype(np.float32))
    assert_same_bytes(torch.cat([values, torch.zeros(65536 - len(values))]))


def test_encode_fp8_of_random_bits_equals_torch():
    bits = torch.from_numpy(np.random.default_rng(0).integers(0, 2**32, 1 << 20, dtype=np.uint32).view(np.int32))
    assert_same_bytes(bits.view(torch.float32))


def test_query_unit_is_a_power_of_two_that_leaves_the_query_below_2():
    source = torch.cat([torch.logspace(-30, 30, 61), torch.tensor([0.0, 1.0, 2.0])])
    out = torch.zeros_like(source)
    units[(1,)](source, out, COUNT=64)
    assert torch.equal(torch.frexp(out).mantissa, torch.full_like(out, 0.5))
    within = (source > 1e-28) & (source < 1e28)
    assert ((source / out)[within] < 2).all()
    assert ((source / out)[within] >= 1).all()
