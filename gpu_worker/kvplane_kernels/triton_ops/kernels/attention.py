"""Attention over pages, for any number of queries per row: decode, drafts and prefill chunks. Also for latent rows.

A program multiplies a tile of queries of one row, with all heads of a group, with tiles of tokens.

rows of its matrix products, group of 3:   q0 h0 | q0 h1 | q0 h2 | - | q1 h0 | q1 h1 | ...
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from kvplane_kernels.triton_ops.kernels.arguments import Rows
from kvplane_kernels.triton_ops.kernels.numbers import LOG2_E, NO_FP8
from kvplane_kernels.triton_ops.kernels.softmax import (
    cap,
    load_blocks,
    load_queries,
    load_scale,
    load_tokens,
    multiply,
    offsets,
    store_results,
    weigh,
)
from kvplane_kernels.triton_ops.kernels.work import (
    NUMBERS_PER_WORKER,
    count_units,
    find_row,
    first_needed,
    last_needed,
    owners_of,
    results_of,
    row_at,
    span_start,
    stats_of,
    units_of_item,
)


@triton.jit
def attended(token, position, tree, first, S: tl.constexpr):
    """Return the mask [queries, tokens] of the tokens to which the queries at `position` attend.

    `first` is the position of the row's first query; `tree` has the masks of the queries, or is None.
    """
    inside = token[None, :] <= position[:, None]
    if S.window > 0:
        inside &= token[None, :] > position[:, None] - S.window
    if S.chunk > 0:
        inside &= token[None, :] >= (position // S.chunk * S.chunk)[:, None]
    if tree is not None:
        shift = tl.minimum(tl.maximum(token - first, 0), 63).to(tl.int64)
        inside &= (token < first)[None, :] | (((tree[:, None] >> shift[None, :]) & 1) != 0)
    return inside


@triton.jit
def score(queries, keys, values, head, block, n, factor, S: tl.constexpr):
    """Return the logits of a tile in base 2, [queries x heads, tokens], and its values as `load_tokens` returns."""
    step: tl.constexpr = S.step
    offset = offsets(keys, head, block, n, S)
    k, k_odd = load_tokens(keys, offset, tl.arange(0, S.padded_k // step), block, S.width_k // step, S)
    scores = multiply(queries[0], queries[1], k, k_odd, None, S)
    if S.rest > 0:
        columns = S.width_k // step + tl.arange(0, S.padded_rest // step)
        more, more_odd = load_tokens(keys, offset, columns, block, (S.width_k + S.rest) // step, S)
        scores = multiply(queries[2], queries[3], more, more_odd, scores, S)
        v, v_odd = k, k_odd
    else:
        if not S.paired:
            offset = offsets(values, head, block, n, S)
        v, v_odd = load_tokens(values, offset, tl.arange(0, S.padded_v // step), block, S.width_v // step, S)
    return cap(scores * factor[:, None], S), v, v_odd


@triton.jit
def take(softmax, scores, v, v_odd, S: tl.constexpr):
    """Return the state of the online softmax after a tile: maximum, sum, result, and result of odd elements."""
    top, total, acc, odd = softmax
    weights, top, total, fade = weigh(scores, top, total)
    weights = weights.to(v.dtype)
    acc = tl.dot(weights, v, acc * fade[:, None], input_precision="ieee")
    if S.fp8 != NO_FP8:
        odd = tl.dot(weights, v_odd, odd * fade[:, None], input_precision="ieee")
    return top, total, acc, odd


@triton.jit
def attend(query, keys, values, batch, rule, row, head, begin, end, tile, S: tl.constexpr):
    """Compute attention of the query tile that begins with query `tile` of a row over token tiles begin .. end.

    Returns (result [queries x heads, padded_v], not normalized; maximum; sum), the last two [queries x heads], in base
    2.
    """
    first_query, count, length = row_at(batch, row, row >= 0)
    member = tl.arange(0, S.rows)
    index = first_query + tile + member // S.lanes
    heads = head * S.group + member % S.lanes
    present = (index < first_query + count) & (member < S.queries * S.lanes) & (member % S.lanes < S.group)
    position = length - count + tile + member // S.lanes
    low = first_needed(length - count + tile, S)
    high = last_needed(length - count + tile, length, S)
    step: tl.constexpr = S.step
    q, q_odd, q_rest, rest_odd, unit = load_queries(query, index, heads, present, S)
    queries = (q, q_odd, q_rest, rest_odd)
    factor = unit * (rule.scale * LOG2_E * load_scale(keys, head, S))
    if rule.slopes is not None:
        slope = tl.load(rule.slopes + heads, mask=present, other=0) * LOG2_E
    branches = None
    if batch.tree is not None:
        branches = tl.load(batch.tree + index, mask=present, other=-1)
    top = tl.full([S.rows], float("-inf"), tl.float32)
    total = tl.full([S.rows], 0.0, tl.float32)
    acc = tl.full([S.rows, S.padded_v // step], 0.0, tl.float32)
    odd = acc
    # Every query attends to the whole of tiles before `masked`, apart from null blocks.
    masked = begin
    if S.queries == 1:
        masked = end
    elif S.window == 0 and S.chunk == 0:
        whole = length - count
        if batch.tree is None:
            whole += tile + 1
        masked = tl.minimum(tl.maximum(whole // S.tile, begin), end)
    softmax = (top, total, acc, odd)
    # Block ids are loaded one step ahead, so that pipelined loads of pages do not wait for them.
    next_block = load_blocks(batch, row, begin, low, high, S)
    if S.queries == 1 or (S.window == 0 and S.chunk == 0):
        for n in tl.range(begin, masked, num_stages=S.stages):
            block = next_block
            next_block = load_blocks(batch, row, n + 1, low, high, S)
            scores, v, v_odd = score(queries, keys, values, head, block, n, factor, S)
            if rule.slopes is not None:
                token = n * S.tile + tl.arange(0, S.tile)
                scores += slope[:, None] * (token[None, :] - position[:, None]).to(tl.float32)
            softmax = take(softmax, scores + tl.where(block != 0, 0.0, float("-inf"))[None, :], v, v_odd, S)
    if S.queries > 1:
        for n in tl.range(masked, end, num_stages=S.masked_stages):
            block = next_block
            next_block = load_blocks(batch, row, n + 1, low, high, S)
            scores, v, v_odd = score(queries, keys, values, head, block, n, factor, S)
            token = n * S.tile + tl.arange(0, S.tile)
            if rule.slopes is not None:
                scores += slope[:, None] * (token[None, :] - position[:, None]).to(tl.float32)
            inside = (block != 0)[None, :] & attended(token, position, branches, length - count, S)
            softmax = take(softmax, tl.where(inside, scores, float("-inf")), v, v_odd, S)
    top, total, acc, odd = softmax
    if S.fp8 != NO_FP8:
        acc = tl.join(acc, odd).reshape(S.rows, S.padded_v)
    return acc * load_scale(values, head, S), top, total


@triton.jit
def store_part(results, stats, slot, acc, top, total, S: tl.constexpr):
    """Store the partial result of an item that several programs share."""
    member = tl.arange(0, S.rows)
    columns = tl.arange(0, S.padded_v)
    place = slot * S.rows + member
    mask = (member < S.queries * S.lanes)[:, None] & (columns < S.width_v)[None, :]
    tl.store(results + place[:, None] * S.width_v + columns[None, :], acc, mask=mask)
    tl.store(stats + place * 2, top)
    tl.store(stats + place * 2 + 1, total)


# The rows are separate parameters: Triton would compile another kernel for some numbers of rows, widths of the table
# and addresses, and does so for numbers and addresses within a tuple.
@triton.jit(do_not_specialize=["table", "table_stride", "lengths", "num_rows", "starts", "tree"])
def attention_spans(
    query,
    keys,
    values,
    table,
    table_stride,
    lengths,
    num_rows,
    starts,
    tree,
    rule,
    out,
    parts,
    S: tl.constexpr,
):
    """Compute attention over one worker's span of units, for one group of query heads. The grid is (heads of pages,
    workers).
    """
    batch = Rows(table, table_stride, lengths, num_rows, starts, tree)
    if S.overlaps:
        gdc_launch_dependents()  # the merge begins when all programs run, and waits for their end
    head = tl.program_id(0)
    page_heads = tl.num_programs(0)
    worker = tl.program_id(1)
    workers = tl.num_programs(1)
    total_units = count_units(batch, S)
    owned = owners_of(parts) + worker * NUMBERS_PER_WORKER
    if head == 0:
        tl.store(owned, -1)
        tl.store(owned + 3, total_units)
    unit = span_start(worker, total_units, workers)
    stop = span_start(worker + 1, total_units, workers)
    row, before = find_row(batch, unit, S)
    skipped = unit - before
    tile = unit * 0
    while unit < stop:
        first_query, count, length = row_at(batch, row, row >= 0)
        first = length - count + tile
        units = tl.where(tile < count, units_of_item(first, length, S), 0)
        run = tl.minimum(units - skipped, stop - unit)
        if run > 0:
            begin = first_needed(first, S) // S.tile + skipped
            acc, top, total = attend(query, keys, values, batch, rule, row, head, begin, begin + run, tile, S)
            if run == units:
                member = tl.arange(0, S.rows)
                store_results(out, rule, first_query + tile, first_query + count, head, member, acc, top, total, S)
            else:
                begins = tl.where(skipped == 0, 1, 0)
                stats, results = stats_of(parts, workers), results_of(parts, workers, page_heads, S)
                store_part(results, stats, (worker * 2 + begins) * page_heads + head, acc, top, total, S)
                if (begins == 1) & (head == 0):
                    tl.store(owned, first_query + tile)
                    tl.store(owned + 1, first_query + count)
                    tl.store(owned + 2, unit + units - 1)
        unit += tl.maximum(run, 0)
        skipped = tl.maximum(skipped - units, 0)
        if batch.starts is None:
            row += 1
        else:
            is_last = tile + S.queries >= count
            tile = tl.where(is_last, 0, tile + S.queries)
            row += is_last.to(tl.int32)
