"""Decode attention over pages: one query per row, the work divided by tokens. Also for latent rows."""

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
from kvplane_worker.ops.triton_ops.kernels.spans import count_tiles, find_row, first_attended, span_start, tiles_of


@triton.jit
def load_query(query, row, head, columns, BEGIN: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr):
    """Load elements BEGIN .. BEGIN + WIDTH of the queries of a group: [padded group, columns], 0 outside the group."""
    member = tl.arange(0, S.padded_group)
    start = query.data + row.to(tl.int64) * query.strides[0] + (head * S.group + member) * query.strides[1] + BEGIN
    mask = (member < S.group)[:, None] & (columns < WIDTH)[None, :]
    return tl.load(start[:, None] + columns[None, :], mask=mask, other=0)


@triton.jit
def attend(query, keys, values, batch, row, head, scale, begin, end, length, S: tl.constexpr):
    """Compute attention of a group of query heads over tiles begin .. end of a row.

    Returns (result [padded group, padded_v], not normalized; maximum; sum), the last two [padded group], in base 2.
    """
    columns_k = tl.arange(0, S.padded_k)
    columns_v = tl.arange(0, S.padded_v)
    columns_rest = tl.arange(0, S.padded_rest)
    low = first_attended(length, S)
    q = load_query(query, row, head, columns_k, 0, S.width_k, S)
    unit = query_unit(q, S)
    if S.rest > 0:
        q_rest = load_query(query, row, head, columns_rest, S.width_k, S.rest, S)
        unit = tl.maximum(unit, query_unit(q_rest, S))
        q_rest = scale_query(q_rest, unit, S)
    q = scale_query(q, unit, S)
    factor = unit * (scale * LOG2_E * load_scale(keys, head, S))
    top = tl.full([S.padded_group], float("-inf"), tl.float32)
    total = tl.full([S.padded_group], 0.0, tl.float32)
    acc = tl.full([S.padded_group, S.padded_v], 0.0, tl.float32)
    # Block ids are loaded one step ahead, so that pipelined loads of pages do not wait for them.
    next_block = load_blocks(batch, row, begin, low, length, S)
    for n in tl.range(begin, end, num_stages=S.stages):
        block = next_block
        next_block = load_blocks(batch, row, n + 1, low, length, S)
        offset = offsets(keys, head, block, n, S)
        k = load_tokens(keys, offset, columns_k, block, S.width_k, S)
        scores = tl.dot(q, k.T, input_precision="ieee")
        if S.rest > 0:
            more = load_tokens(keys, offset, S.width_k + columns_rest, block, S.width_k + S.rest, S)
            scores = tl.dot(q_rest, more.T, scores, input_precision="ieee")
            v = k
        else:
            if not S.paired:
                offset = offsets(values, head, block, n, S)
            v = load_tokens(values, offset, columns_v, block, S.width_v, S)
        scores = tl.where((block != 0)[None, :], scores * factor[:, None], float("-inf"))
        weights, top, total, fade = weigh(scores, top, total)
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return acc * load_scale(values, head, S), top, total


@triton.jit
def store_whole(out, sinks, row, head, acc, top, total, S: tl.constexpr):
    """Store the result of a row that this program computed alone, [padded group, padded_v]."""
    member = tl.arange(0, S.padded_group)
    columns = tl.arange(0, S.padded_v)
    heads = head * S.group + member
    if sinks is not None:
        total, fade = add_sink(sinks, heads, member < S.group, top, total)
        acc *= fade[:, None]
    place = out.data + row.to(tl.int64) * out.strides[0] + heads * out.strides[1]
    mask = (member < S.group)[:, None] & (columns < S.width_v)[None, :]
    tl.store(place[:, None] + columns[None, :], acc / tl.where(total > 0, total, 1.0)[:, None], mask=mask)


@triton.jit
def store_part(parts, slot, q_heads, head, acc, top, total, S: tl.constexpr):
    """Store the partial result of a row that several programs share."""
    member = tl.arange(0, S.padded_group)
    columns = tl.arange(0, S.padded_v)
    place = slot * q_heads + head * S.group + member
    present = member < S.group
    mask = present[:, None] & (columns < S.width_v)[None, :]
    tl.store(parts.acc + place[:, None] * S.width_v + columns[None, :], acc, mask=mask)
    tl.store(parts.stats + place * 2, top, mask=present)
    tl.store(parts.stats + place * 2 + 1, total, mask=present)


@triton.jit
def decode_spans(query, keys, values, batch, sinks, out, parts, scale, S: tl.constexpr):
    """Compute attention over one worker's span of tiles, for one group of query heads. The grid is (kv heads,
    workers).
    """
    head = tl.program_id(0)
    worker = tl.program_id(1)
    workers = tl.num_programs(1)
    total_tiles = count_tiles(batch.lengths, batch.num_rows, S)
    tile = span_start(worker, total_tiles, workers)
    stop = span_start(worker + 1, total_tiles, workers)
    row, before = find_row(batch.lengths, batch.num_rows, tile, S)
    skipped = tile - before
    while tile < stop:
        length = tl.load(batch.lengths + row)
        tiles = tiles_of(length, S)
        run = tl.minimum(tiles - skipped, stop - tile)
        if run > 0:
            begin = first_attended(length, S) // S.tile + skipped
            acc, top, total = attend(query, keys, values, batch, row, head, scale, begin, begin + run, length, S)
            if run == tiles:
                store_whole(out, sinks, row, head, acc, top, total, S)
            else:
                slot = worker * 2 + tl.where(skipped == 0, 1, 0)
                store_part(parts, slot, tl.num_programs(0) * S.group, head, acc, top, total, S)
        tile += run
        row += 1
        skipped = tile * 0
