"""Conversion of 8-bit floats, and of types that the interpreter computes incorrectly.

Values of 8-bit types are stored as bytes, and read in pairs: a product needs 16-bit elements, which are loaded and
transposed 16 bytes at a time. The constant `FP8` selects type and conversion:

    NO_FP8      the page contains wider numbers
    NATIVE      instructions (sm_89 and later)
    PACKED      integer instructions on two pairs at a time (sm_80)
    INTEGER     integer arithmetic, in the interpreter, which runs no assembly

All conversions of a type have the results of PyTorch's.
"""

from __future__ import annotations

import triton
import triton.language as tl

NO_FP8 = tl.constexpr(0)
E4M3_NATIVE = tl.constexpr(1)
E4M3_PACKED = tl.constexpr(2)
E4M3_INTEGER = tl.constexpr(3)
E5M2_NATIVE = tl.constexpr(4)
E5M2_PACKED = tl.constexpr(5)
E5M2_INTEGER = tl.constexpr(6)

E4M3_MAX = tl.constexpr(448.0)
E5M2_MAX = tl.constexpr(57344.0)
LOG2_E = tl.constexpr(1.4426950408889634)

# $2 has two pairs of bytes, $0 receives the two low ones as float16, $1 the two high ones. Both may share a register
# with $2: they are written after $2 was read.
E4M3_INSTRUCTIONS = tl.constexpr(
    """{
    .reg .b16 x, y;
    .reg .b32 a, b;
    mov.b32 {x, y}, $2;
    cvt.rn.f16x2.e4m3x2 a, x;
    cvt.rn.f16x2.e4m3x2 b, y;
    prmt.b32 $0, a, b, 0x5410;
    prmt.b32 $1, a, b, 0x7632;
    }"""
)
# Exponent and mantissa move to those of float16, whose exponent bias is 8 larger: the result is value / 256, exactly.
# The carry of the largest of them, which is NaN, sets the exponent's first bit: NaN again.
E4M3_ARITHMETIC = tl.constexpr(
    """{
    .reg .b32 a, b, c, d;
    and.b32 a, $2, 0x80008000;
    and.b32 b, $2, 0x7F007F00;
    shl.b32 c, $2, 8;
    and.b32 d, c, 0x7F007F00;
    and.b32 c, c, 0x80008000;
    shr.b32 b, b, 1;
    or.b32 a, a, b;
    add.u32 b, b, 0x00800080;
    and.b32 b, b, 0x40004000;
    shr.b32 d, d, 1;
    or.b32 c, c, d;
    add.u32 d, d, 0x00800080;
    and.b32 d, d, 0x40004000;
    or.b32 $0, c, d;
    or.b32 $1, a, b;
    }"""
)
# The bytes are the first ones of float16.
E5M2_ARITHMETIC = tl.constexpr(
    """{
    .reg .b32 a, b;
    shl.b32 a, $2, 8;
    and.b32 b, $2, 0xFF00FF00;
    and.b32 $0, a, 0xFF00FF00;
    mov.b32 $1, b;
    }"""
)


@triton.jit
def by_assembly(pairs, ASSEMBLY: tl.constexpr):
    """Run an assembly from above on int16 pairs of bytes. Returns (low ones, high ones) as float16."""
    types: tl.constexpr = (tl.float16, tl.float16)
    return tl.inline_asm_elementwise(ASSEMBLY, "=r,=r,r", [pairs], dtype=types, is_pure=True, pack=2)


@triton.jit
def shifted_e4m3(high_byte):
    """Return float8_e4m3fn values / 256 as float16, from uint16 numbers whose high byte has the value."""
    size = (high_byte & 0x7F00) >> 1
    return ((high_byte & 0x8000) | size | ((size + 0x80) & 0x4000)).to(tl.float16, bitcast=True)


@triton.jit
def unpack_fp8(pairs, FP8: tl.constexpr):
    """Convert int16 pairs of bytes to (low ones, high ones) as float16, exactly; the results are values / `unit_of`."""
    if FP8 == E4M3_NATIVE:
        return by_assembly(pairs, E4M3_INSTRUCTIONS)
    elif FP8 == E4M3_PACKED:
        return by_assembly(pairs, E4M3_ARITHMETIC)
    elif FP8 == E4M3_INTEGER:
        bits = pairs.to(tl.uint16, bitcast=True)
        return shifted_e4m3(bits << 8), shifted_e4m3(bits & 0xFF00)
    elif FP8 == E5M2_INTEGER:
        bits = pairs.to(tl.uint16, bitcast=True)
        return (bits << 8).to(tl.float16, bitcast=True), (bits & 0xFF00).to(tl.float16, bitcast=True)
    else:
        return by_assembly(pairs, E5M2_ARITHMETIC)


@triton.jit
def unit_of(FP8: tl.constexpr):
    """Return the number by which the results of `unpack_fp8` are to be multiplied."""
    is_shifted: tl.constexpr = (FP8 == E4M3_PACKED) | (FP8 == E4M3_INTEGER)
    return 256.0 if is_shifted else 1.0


@triton.jit
def encode_fp8(value, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Round float32 values in the range of an 8-bit type with MANTISSA bits and an exponent bias to its bytes, to
    nearest even, by integer arithmetic. NaN becomes 0x7F with its sign.
    """
    bits = value.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    drop: tl.constexpr = 23 - MANTISSA
    # Below the normal numbers the byte counts the smallest one: adding 2^23 times that leaves the count, rounded, in
    # the last bits of the sum.
    smallest: tl.constexpr = 1 - BIAS - MANTISSA
    large: tl.constexpr = (smallest + 23 + 127) << 23
    summand = tl.full(value.shape, large, tl.uint32).to(tl.float32, bitcast=True)
    tiny = (size.to(tl.float32, bitcast=True) + summand).to(tl.uint32, bitcast=True) - large
    normal = (size + ((1 << (drop - 1)) - 1) + ((size >> drop) & 1) - ((127 - BIAS) << 23)) >> drop
    byte = tl.where(size < ((128 - BIAS) << 23), tiny, normal)
    byte = tl.where(size > 0x7F800000, 0x7F, byte)
    return (byte | sign).to(tl.uint8)


@triton.jit
def saturate_fp8(value, FP8: tl.constexpr):
    """Round float32 values to the nearest bytes of an 8-bit type; values beyond its range become its largest."""
    largest: tl.constexpr = E4M3_MAX if FP8 <= E4M3_INTEGER else E5M2_MAX
    value = tl.clamp(value, -largest, largest, propagate_nan=tl.PropagateNan.ALL)
    if FP8 == E4M3_NATIVE:
        return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    elif FP8 == E5M2_NATIVE:
        return value.to(tl.float8e5).to(tl.uint8, bitcast=True)
    elif FP8 <= E4M3_INTEGER:
        return encode_fp8(value, 3, 7)
    else:
        return encode_fp8(value, 2, 15)


@triton.jit
def widen(loaded, UPCAST: tl.constexpr):
    """Convert elements to the type in which they are multiplied."""
    return loaded.to(tl.float32) if UPCAST else loaded


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
