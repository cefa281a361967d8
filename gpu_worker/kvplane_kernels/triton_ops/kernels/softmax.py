"""Functions of the attention kernels: loads of tiles of pages, the online softmax in base 2, and stores of results."""

from __future__ import annotations

import triton
import triton.language as tl

from kvplane_kernels.triton_ops.kernels.numbers import (
    LOG2_E,
    NO_FP8,
    power_of_two_below,
    unit_of,
    unpack_fp8,
    widen,
)


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
    """Load elements [tokens, columns] for products, of 8-bit types pairs of elements: the even ones, and the odd ones.
    Of other types both results are the elements. Tokens of the null block are 0 and are not read from memory.
    """
    mask = (block != 0)[:, None] & (columns < WIDTH)[None, :]
    loaded = tl.load(pages.data + (offset[:, None] + columns[None, :]), mask=mask, other=0)
    if S.fp8 == NO_FP8:
        loaded = widen(loaded, S.upcast)
        return loaded, loaded
    else:
        even, odd = unpack_fp8(loaded, S.fp8)
        return widen(even, S.upcast), widen(odd, S.upcast)


@triton.jit
def multiply(even, odd, keys, odd_keys, scores, S: tl.constexpr):
    """Return `scores` (None = 0) plus the products of queries and keys, [queries, tokens], in parts as `load_tokens`
    returns.
    """
    if scores is None:
        scores = tl.dot(even, keys.T, input_precision="ieee")
    else:
        scores = tl.dot(even, keys.T, scores, input_precision="ieee")
    if S.fp8 != NO_FP8:
        scores = tl.dot(odd, odd_keys.T, scores, input_precision="ieee")
    return scores


@triton.jit
def load_scale(pages, head, S: tl.constexpr):
    """Return the number by which loaded values are to be multiplied; 1 for pages that are not 8-bit."""
    factor = 1.0
    if S.fp8 != NO_FP8:
        factor = tl.load(pages.scale + head * pages.scale_stride) * unit_of(S.fp8)
    return factor


@triton.jit
def load_query(query, index, heads, present, BEGIN: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, STEP):
    """Load every STEP-th element, PADDED of them, of BEGIN .. WIDTH of queries: [queries x heads, PADDED], 0 where not
    `present`.
    """
    columns = BEGIN + tl.arange(0, PADDED) * STEP
    start = query.data + index.to(tl.int64) * query.strides[0] + heads * query.strides[1]
    mask = present[:, None] & (columns < WIDTH)[None, :]
    return tl.load(start[:, None] + columns[None, :], mask=mask, other=0)


@triton.jit
def load_queries(query, index, heads, present, S: tl.constexpr):
    """Return the queries as `load_tokens` returns keys, the part for the rest of latent rows likewise (unused without a
    rest), and the number by which queries were divided.
    """
    step: tl.constexpr = S.step
    size: tl.constexpr = S.padded_k // step
    even = load_query(query, index, heads, present, 0, S.width_k, size, step)
    unit = query_unit(even, S)
    odd = even
    if S.fp8 != NO_FP8:
        odd = load_query(query, index, heads, present, 1, S.width_k, size, step)
        unit = tl.maximum(unit, query_unit(odd, S))
    more = even
    more_odd = odd
    if S.rest > 0:
        end: tl.constexpr = S.width_k + S.rest
        rest: tl.constexpr = S.padded_rest // step
        more = load_query(query, index, heads, present, S.width_k, end, rest, step)
        unit = tl.maximum(unit, query_unit(more, S))
        more_odd = more
        if S.fp8 != NO_FP8:
            more_odd = load_query(query, index, heads, present, S.width_k + 1, end, rest, step)
            unit = tl.maximum(unit, query_unit(more_odd, S))
    even = scale_query(even, unit, S)
    odd = scale_query(odd, unit, S)
    return even, odd, scale_query(more, unit, S), scale_query(more_odd, unit, S), unit


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
