"""How attention divides its work. All rows of a batch form one queue, whatever their numbers of queries and tokens.

A *unit* is a tile of queries of one row times a tile of tokens. Units are ordered by row, query tile and token tile:

    rows        | row 0: decode | row 1: a prefill chunk, 3 query tiles | row 2: decode      |
    items       | 4 units       | 1 | 2    | 2                           | 9 units            |
    workers     | worker 0   | worker 1          | worker 2   | worker 3   | worker 4         |

A worker, a program, gets a contiguous span of units; spans differ by at most one unit. An *item* is all units of one
query tile. A worker writes the final result of an item inside its span. Of an item that it shares it writes a partial
result: to slot 1 if the item begins in its span, to slot 0 if it begins before. All heads use the same spans and run
concurrently, so that the bytes of a token are read together.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_at(batch, row, inside):
    """Return (first query, number of queries, length) of rows. The number is 1 where each row has one query, otherwise
    0 where `inside` is False.
    """
    length = tl.load(batch.lengths + row, mask=inside, other=0)
    if batch.starts is None:
        return row, 1, length
    else:
        begin = tl.load(batch.starts + row, mask=inside, other=0)
        return begin, tl.load(batch.starts + row + 1, mask=inside, other=0) - begin, length


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
def last_needed(position, length, S: tl.constexpr):
    """Return the end of the tokens to which the query tile that begins at `position` attends."""
    return tl.maximum(tl.minimum(position + S.queries, length), 0)


@triton.jit
def units_of_item(position, length, S: tl.constexpr):
    """Return the number of units of the query tile that begins at `position`; at least 1, so that some worker writes
    its result.
    """
    tiles = tl.cdiv(last_needed(position, length, S), S.tile) - first_needed(position, S) // S.tile
    return tl.maximum(tiles, 1)


@triton.jit
def units_of_rows(batch, row, S: tl.constexpr):
    """Return the numbers of units of rows; 0 for rows after the last."""
    inside = row < batch.num_rows
    _, count, length = row_at(batch, row, inside)
    if batch.starts is None:
        return tl.where(inside, units_of_item(length - 1, length, S), 0)
    else:
        units = count * 0
        for query in range(0, tl.max(count), S.queries):
            units += tl.where(query < count, units_of_item(length - count + query, length, S), 0)
        return units


@triton.jit
def count_units(batch, S: tl.constexpr):
    """Return the number of units of all rows."""
    total = 0
    for start in range(0, batch.num_rows, S.scan):
        total += tl.sum(units_of_rows(batch, start + tl.arange(0, S.scan), S))
    return total


@triton.jit
def find_row(batch, unit, S: tl.constexpr):
    """Return the row with unit number `unit`, and the number of units before that row."""
    row = 0
    before = 0
    total = 0
    for start in range(0, batch.num_rows, S.scan):
        index = start + tl.arange(0, S.scan)
        ends = total + tl.cumsum(units_of_rows(batch, index, S), axis=0)
        passed = (ends <= unit) & (index < batch.num_rows)
        row += tl.sum(passed.to(tl.int32))
        before = tl.maximum(before, tl.max(tl.where(passed, ends, 0)))
        total = tl.max(ends)
    return row, before


@triton.jit
def span_start(worker, total, workers):
    """Return the first unit of a worker's span. Spans differ by at most one unit."""
    return worker * (total // workers) + tl.minimum(worker, total % workers)


@triton.jit
def worker_of(unit, total, workers):
    """Return the worker whose span contains the unit."""
    size = total // workers
    longer = total % workers
    edge = longer * (size + 1)
    return tl.where(unit < edge, unit // (size + 1), longer + (unit - edge) // tl.maximum(size, 1))


# Memory for the partial results of items that several workers share is one tensor of float32, in three parts:
# - int32 [workers, 4]: first query of the item to merge that begins in the worker's span (-1 = there is none), end of
#   the row's queries, last unit of the item, and number of all units;
# - maximum and sum of the softmax, [workers, 2, heads of pages, rows, 2];
# - results that are not normalized, [workers, 2, heads of pages, rows, width].
# In this order: with the results first, decode with sinks and a window takes 193 registers on sm_80, not 152.
NUMBERS_PER_WORKER = tl.constexpr(4)


@triton.jit
def owners_of(parts):
    """Return the address of the numbers of workers."""
    return parts.to(tl.pointer_type(tl.int32))


@triton.jit
def stats_of(parts, workers):
    """Return the address of the maxima and sums."""
    return parts + workers * NUMBERS_PER_WORKER


@triton.jit
def results_of(parts, workers, page_heads, S: tl.constexpr):
    """Return the address of the results that are not normalized."""
    return stats_of(parts, workers) + workers * page_heads * (4 * S.rows)
