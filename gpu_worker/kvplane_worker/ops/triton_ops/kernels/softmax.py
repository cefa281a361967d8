"""Functions that all attention kernels share: loads of tiles of pages, and the online softmax in base 2."""

from __future__ import annotations

import triton
import triton.language as tl

from kvplane_worker.ops.triton_ops.kernels.numbers import LOG2_E, NO_FP8, power_of_two_below, widen


@triton.jit
def load_blocks(batch, row, tile, low, high, S: tl.constexpr):
    """Return the block ids of a tile's tokens, [tile]; 0 for tokens outside low .. high."""
    token = tile * S.tile + tl.arange(0, S.tile)
    place = batch.table + row * batch.table_stride + token // S.page
    return tl.load(place, mask=(token >= low) & (token < high), other=0)


@triton.jit
def offsets(pages, head, block, tile, S: tl.constexpr):
    """Return the offsets of a tile's tokens for one head, [tile], in elements."""
    slot = (tile * S.tile + tl.arange(0, S.tile)) % S.page
    return block.to(tl.int64) * pages.strides[0] + slot * pages.strides[1] + head * pages.strides[2]


@triton.jit
def load_tokens(pages, offset, columns, block, WIDTH: tl.constexpr, S: tl.constexpr):
    """Load elements [tokens, columns] for products. Tokens of the null block are 0 and are not read from memory."""
    mask = (block != 0)[:, None] & (columns < WIDTH)[None, :]
    return widen(tl.load(pages.data + (offset[:, None] + columns[None, :]), mask=mask, other=0), S.fp8, S.upcast)


@triton.jit
def load_scale(pages, head, S: tl.constexpr):
    """Return the scale of stored values; 1 for pages that are not 8-bit."""
    factor = 1.0
    if S.fp8 != NO_FP8:
        factor = tl.load(pages.scale + head * pages.scale_stride)
    return factor


@triton.jit
def query_unit(query, S: tl.constexpr):
    """Return the number by which each query is divided before the products.

    Products with 8-bit pages are computed in float16. Division by a power of two keeps a large bfloat16 query in the
    range of float16, exactly.
    """
    if S.fp8 == NO_FP8 or S.upcast:
        return tl.full([query.shape[0]], 1.0, tl.float32)
    else:
        return power_of_two_below(tl.max(tl.abs(query.to(tl.float32)), axis=1))


@triton.jit
def scale_query(query, unit, S: tl.constexpr):
    """Convert the query to the type in which it is multiplied."""
    if S.upcast:
        return query.to(tl.float32)
    elif S.fp8 == NO_FP8:
        return query
    else:
        return (query.to(tl.float32) / unit[:, None]).to(tl.float16)


@triton.jit
def weigh(scores, top, total):
    """Compute one step of the online softmax. Returns (weights of this tile, new maximum, new sum, factor of the old
    result).
    """
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(top - base)
    return weights, new_top, total * fade + tl.sum(weights, axis=1), fade


@triton.jit
def add_sink(sinks, heads, present, top, total):
    """Add the sinks as the last term of the softmax. Returns (new sum, factor of the old result)."""
    sink = tl.load(sinks + heads, mask=present, other=0).to(tl.float32) * LOG2_E
    new_top = tl.maximum(top, sink)
    fade = tl.exp2(top - new_top)
    return total * fade + tl.exp2(sink - new_top), fade
