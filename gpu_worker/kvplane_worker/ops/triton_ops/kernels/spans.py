"""How decode divides its work: every worker, a program, gets the same number of tiles of tokens, whatever the rows'
lengths.

    rows        | row 0: 3 tiles | row 1: 1 | row 2: 5 tiles          |
    workers     | worker 0   | worker 1   | worker 2   |

A worker's span is contiguous in (row, tile) order. The worker writes the final result of a row that is inside its span.
For a row that it shares it writes a partial result, to be merged: to slot 1 if the row begins in its span, to slot 0 if
it begins before. All heads use the same spans and run concurrently, so that the bytes of a token are read together.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_attended(length, S: tl.constexpr):
    """Return the first token to which the last query of a row of `length` tokens attends (0 for an empty row)."""
    low = length * 0
    if S.window > 0:
        low = tl.maximum(length - S.window, 0)
    if S.chunk > 0:
        low = tl.maximum(length - 1, 0) // S.chunk * S.chunk
    return low


@triton.jit
def tiles_of(length, S: tl.constexpr):
    """Return the number of tiles with attended tokens of a row."""
    return tl.cdiv(length, S.tile) - first_attended(length, S) // S.tile


@triton.jit
def count_tiles(lengths, rows, S: tl.constexpr):
    """Return the number of tiles of the first `rows` rows."""
    total = 0
    for start in range(0, rows, S.scan):
        index = start + tl.arange(0, S.scan)
        total += tl.sum(tiles_of(tl.load(lengths + index, mask=index < rows, other=0), S))
    return total


@triton.jit
def find_row(lengths, rows, tile, S: tl.constexpr):
    """Return the row with tile number `tile`, and the number of tiles before that row."""
    row = 0
    before = 0
    total = 0
    for start in range(0, rows, S.scan):
        index = start + tl.arange(0, S.scan)
        length = tl.load(lengths + index, mask=index < rows, other=0)
        ends = total + tl.cumsum(tiles_of(length, S), axis=0)
        passed = (ends <= tile) & (index < rows)
        row += tl.sum(passed.to(tl.int32))
        before = tl.maximum(before, tl.max(tl.where(passed, ends, 0)))
        total = tl.max(ends)
    return row, before


@triton.jit
def span_start(worker, total, workers):
    """Return the first tile of a worker's span. Spans differ by at most one tile."""
    return worker * (total // workers) + tl.minimum(worker, total % workers)


@triton.jit
def worker_of(tile, total, workers):
    """Return the worker whose span contains the tile."""
    size = total // workers
    longer = total % workers
    edge = longer * (size + 1)
    return tl.where(tile < edge, tile // (size + 1), longer + (tile - edge) // tl.maximum(size, 1))
