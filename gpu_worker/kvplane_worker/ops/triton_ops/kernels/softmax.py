"""Functions of the attention kernels: loads of tiles of pages, the online softmax in base 2, and stores of results."""

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
def cap(scores, S: tl.constexpr):
    """Limit logits in base 2 to the soft cap: cap x tanh(logit / cap). tanh(x) = 1 - 2 / (exp(2 x) + 1)."""
    if S.soft_cap > 0:
        limit = S.soft_cap * LOG2_E
        return limit - 2 * limit / (tl.exp2(scores * (2 * LOG2_E / limit)) + 1)
    else:
        return scores


@triton.jit
def store_results(out, rule, first_query, end_query, head, member, acc, top, total, S: tl.constexpr):
    """Store final results, [members, padded_v], of the query tile that begins at `first_query`, and their log-sum-exps.

    A sink is one more term of the softmax, without a value.
    """
    index = first_query + member // S.lanes
    heads = head * S.group + member % S.lanes
    present = (index < end_query) & (member < S.queries * S.lanes) & (member % S.lanes < S.group)
    if rule.sinks is not None:
        sink = tl.load(rule.sinks + heads, mask=present, other=0).to(tl.float32) * LOG2_E
        new_top = tl.maximum(top, sink)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        fade = tl.exp2(top - base)
        total = total * fade + tl.exp2(sink - base)
        acc *= fade[:, None]
        top = new_top
    columns = tl.arange(0, S.padded_v)
    start = out.data + first_query.to(tl.int64) * out.strides[0]
    place = start + member // S.lanes * out.strides[0] + heads * out.strides[1]
    mask = present[:, None] & (columns < S.width_v)[None, :]
    tl.store(place[:, None] + columns[None, :], acc / tl.where(total > 0, total, 1.0)[:, None], mask=mask)
    if out.lse is not None:
        lse = tl.where(total > 0, (top + tl.log2(tl.where(total > 0, total, 1.0))) / LOG2_E, float("-inf"))
        place = out.lse + first_query.to(tl.int64) * out.q_heads
        tl.store(place + member // S.lanes * out.q_heads + heads, lse, mask=present)
