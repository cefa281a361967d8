"""Conversion of 8-bit floats, and of types that the interpreter computes incorrectly.

Values of float8_e4m3fn are stored as bytes. The constant `FP8` selects their conversion: none (the page contains wider
numbers), native instructions (sm_89 and later), or integer arithmetic with the same results as PyTorch.
"""

from __future__ import annotations

import triton
import triton.language as tl

NO_FP8 = tl.constexpr(0)
NATIVE_FP8 = tl.constexpr(1)
INTEGER_FP8 = tl.constexpr(2)

FP8_MAX = tl.constexpr(448.0)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def decode_fp8(byte):
    """Convert float8_e4m3fn bytes to float16, exactly, by integer arithmetic: the exponent biases differ by 8."""
    wide = byte.to(tl.uint16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    value = bits.to(tl.float16, bitcast=True) * 256.0
    nan = ((wide & 0x80) << 8) | 0x7E00
    return tl.where((wide & 0x7F) == 0x7F, nan.to(tl.float16, bitcast=True), value.to(tl.float16))


@triton.jit
def encode_fp8(value):
    """Round float32 values within ±448 to float8_e4m3fn bytes, to nearest even, by integer arithmetic.

    NaN becomes 0x7F with its sign.
    """
    bits = value.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    # Below 2^-6 the byte counts units of 2^-9: adding 2^14 leaves that count in the last bits of the sum, rounded.
    tiny = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    normal = (size + 0x7FFFF + ((size >> 20) & 1) - 0x3C000000) >> 20
    byte = tl.where(size < 0x3C800000, tiny, normal)
    byte = tl.where(size > 0x7F800000, 0x7F, byte)
    return (byte | sign).to(tl.uint8)


@triton.jit
def saturate_fp8(value, FP8: tl.constexpr):
    """Round float32 values to the nearest float8_e4m3fn bytes; values beyond ±448 become ±448."""
    value = tl.clamp(value, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    if FP8 == NATIVE_FP8:
        return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return encode_fp8(value)


@triton.jit
def widen(loaded, FP8: tl.constexpr, UPCAST: tl.constexpr):
    """Convert loaded elements of a page to the type in which they are multiplied."""
    if FP8 == NATIVE_FP8:
        loaded = loaded.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    if FP8 == INTEGER_FP8:
        loaded = decode_fp8(loaded)
    if UPCAST:
        loaded = loaded.to(tl.float32)
    return loaded


@triton.jit
def power_of_two_below(value):
    """Return the power of two in (value / 2, value] for a normal float32 above 0, otherwise a small one; never 0 or
    infinite.
    """
    exponent = value.to(tl.uint32, bitcast=True) & 0x7F800000
    exponent = tl.minimum(tl.maximum(exponent, 0x10000000), 0x6F800000)
    return exponent.to(tl.float32, bitcast=True)


@triton.jit
def mix_word(word):
    """Return the result of MurmurHash3's finalizer for uint32 words."""
    word = (word ^ (word >> 16)) * 0x85EBCA6B
    word = (word ^ (word >> 13)) * 0xC2B2AE35
    return word ^ (word >> 16)
