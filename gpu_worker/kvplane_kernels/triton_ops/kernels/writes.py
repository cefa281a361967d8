"""The kernel that writes keys, values or latent rows of new tokens into the slots of pages."""

from __future__ import annotations

import triton
import triton.language as tl

from kvplane_kernels.triton_ops.kernels.numbers import NO_FP8, saturate_fp8


@triton.jit
def store_rows(source, pages, token, slot, columns, S: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Store elements [tokens, columns] of tokens with WIDTH elements, in heads of SIZE, into slots.

    8-bit pages store value / scale.
    """
    mask = (slot >= 0)[:, None] & (columns < WIDTH)[None, :]
    start = source.data + token.to(tl.int64) * source.strides[0]
    value = tl.load(start[:, None] + columns[None, :], mask=mask)
    if S.fp8 != NO_FP8:
        factor = tl.load(pages.scale + columns // SIZE * pages.scale_stride, mask=columns < WIDTH, other=1.0)
        value = saturate_fp8(tl.div_rn(value.to(tl.float32), tl.broadcast_to(factor[None, :], value.shape)), S.fp8)
    place = pages.data + (slot // S.page) * pages.strides[0] + (slot % S.page) * pages.strides[1]
    tl.store(place[:, None] + columns[None, :], value, mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def write_tokens(key, value, k_pages, v_pages, slots, tokens, S: tl.constexpr):
    """Write a tile of S.tokens tokens by S.columns elements of keys and values. The grid is (token tiles, column
    tiles).
    """
    token = tl.program_id(0) * S.tokens + tl.arange(0, S.tokens)
    slot = tl.load(slots + token, mask=token < tokens, other=-1)
    columns = tl.program_id(1) * S.columns + tl.arange(0, S.columns)
    store_rows(key, k_pages, token, slot, columns, S, S.size_k, S.width_k)
    if S.width_v > 0:
        store_rows(value, v_pages, token, slot, columns, S, S.size_v, S.width_v)
