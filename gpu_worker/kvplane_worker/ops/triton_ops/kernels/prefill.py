"""Prefill attention over pages. A program computes a tile of queries of one row, for all heads of a group.

rows of a program's matrix products, group of 3:   q0 h0 | q0 h1 | q0 h2 | q1 h0 | q1 h1 | ...
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvplane_worker.ops.triton_ops.kernels.numbers import LOG2_E
from kvplane_worker.ops.triton_ops.kernels.softmax import (
    add_sink,
    load_blocks,
    load_scale,
    load_tokens,
    offsets,
    query_unit,
    scale_query,
    weigh,
)


@triton.jit
def find_query_tile(starts, rows, tile, QUERIES: tl.constexpr, S: tl.constexpr):
    """Return the row with query tile number `tile` (`rows` if there is none), and the number of the tile within the
    row.
    """
    row = 0
    before = 0
    total = 0
    for start in range(0, rows, S.scan):
        index = start + tl.arange(0, S.scan)
        inside = index < rows
        begin = tl.load(starts + index, mask=inside, other=0)
        end = tl.load(starts + index + 1, mask=inside, other=0)
        ends = total + tl.cumsum(tl.cdiv(end - begin, QUERIES), axis=0)
        passed = (ends <= tile) & inside
        row += tl.sum(passed.to(tl.int32))
        before = tl.maximum(before, tl.max(tl.where(passed, ends, 0)))
        total = tl.max(ends)
    return row, tile - before


@triton.jit
def attended(token, position, S: tl.constexpr):
    """Return the mask [queries, tokens] of the tokens to which the queries at `position` attend."""
    inside = token[None, :] <= position[:, None]
    if S.window > 0:
        inside &= token[None, :] > position[:, None] - S.window
    if S.chunk > 0:
        inside &= token[None, :] >= (position // S.chunk * S.chunk)[:, None]
    return inside


@triton.jit
def first_needed(position, S: tl.constexpr):
    """Return the first token to which a query at `position`, or a later one, attends."""
    low = position * 0
    if S.window > 0:
        low = tl.maximum(position - S.window + 1, 0)
    if S.chunk > 0:
        low = tl.maximum(position, 0) // S.chunk * S.chunk
    return low


@triton.jit
def attend_tile(q, keys, values, batch, row, head, position, low, high, factor, S: tl.constexpr):
    """Compute attention of the queries at `position` over tokens low .. high.

    Returns (result [queries x heads, padded_v], not normalized; maximum; sum), the last two [queries x heads], in base
    2.
    """
    columns_k = tl.arange(0, S.padded_k)
    columns_v = tl.arange(0, S.padded_v)
    top = tl.full([q.shape[0]], float("-inf"), tl.float32)
    total = tl.full([q.shape[0]], 0.0, tl.float32)
    acc = tl.full([q.shape[0], S.padded_v], 0.0, tl.float32)
    next_block = load_blocks(batch, row, low // S.tile, low, high, S)
    for n in tl.range(low // S.tile, tl.cdiv(high, S.tile), num_stages=S.stages):
        block = next_block
        next_block = load_blocks(batch, row, n + 1, low, high, S)
        offset = offsets(keys, head, block, n, S)
        k = load_tokens(keys, offset, columns_k, block, S.width_k, S)
        scores = tl.dot(q, k.T, input_precision="ieee") * factor[:, None]
        if not S.paired:
            offset = offsets(values, head, block, n, S)
        v = load_tokens(values, offset, columns_v, block, S.width_v, S)
        token = n * S.tile + tl.arange(0, S.tile)
        scores = tl.where(attended(token, position, S) & (block != 0)[None, :], scores, float("-inf"))
        weights, top, total, fade = weigh(scores, top, total)
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return acc * load_scale(values, head, S), top, total


@triton.jit
def prefill_tiles(query, keys, values, batch, sinks, out, scale, QUERIES: tl.constexpr, S: tl.constexpr):
    """Compute a tile of QUERIES queries of one row for one kv head. The grid is (most possible tiles, kv_heads)."""
    head = tl.program_id(1)
    row, tile = find_query_tile(batch.starts, batch.num_rows, tl.program_id(0), QUERIES, S)
    if row >= batch.num_rows:
        return
    begin = tl.load(batch.starts + row)
    end = tl.load(batch.starts + row + 1)
    length = tl.load(batch.lengths + row)
    member = tl.arange(0, QUERIES * S.lanes)
    index = begin + tile * QUERIES + member // S.lanes
    heads = head * S.group + member % S.lanes
    present = (index < end) & (member % S.lanes < S.group)
    position = length - end + index

    columns_k = tl.arange(0, S.padded_k)
    start = query.data + index.to(tl.int64) * query.strides[0] + heads * query.strides[1]
    mask = present[:, None] & (columns_k < S.width_k)[None, :]
    q = tl.load(start[:, None] + columns_k[None, :], mask=mask, other=0)
    unit = query_unit(q, S)
    first = length - end + begin + tile * QUERIES
    high = tl.minimum(first + QUERIES, length)
    factor = unit * (scale * LOG2_E * load_scale(keys, head, S))
    q = scale_query(q, unit, S)
    low = first_needed(first, S)
    acc, top, total = attend_tile(q, keys, values, batch, row, head, position, low, high, factor, S)
    if sinks is not None:
        total, fade = add_sink(sinks, heads, present & (total > 0), tl.where(total > 0, top, 0.0), total)
        acc *= fade[:, None]
    columns_v = tl.arange(0, S.padded_v)
    place = out.data + index.to(tl.int64) * out.strides[0] + heads * out.strides[1]
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(place[:, None] + columns_v[None, :], result, mask=present[:, None] & (columns_v < S.width_v)[None, :])
