"""The second launch of decode: it merges the partial results of shared rows, and sets the results of empty
rows to 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvplane_worker.ops.triton_ops.kernels.softmax import add_sink
from kvplane_worker.ops.triton_ops.kernels.spans import count_tiles, tiles_of, worker_of


@triton.jit
def merge_parts(batch, sinks, out, parts, PARTS: tl.constexpr, S: tl.constexpr):
    """Merge the partial results of one row and head, PARTS at a time. The grid is (rows, q_heads).

    A row that one worker computed alone is not changed.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    columns = tl.arange(0, S.padded_v)
    place = out.data + row.to(tl.int64) * out.strides[0] + head * out.strides[1] + columns
    tiles = tiles_of(tl.load(batch.lengths + row), S)
    if tiles == 0:
        tl.store(place, tl.full([S.padded_v], 0.0, tl.float32), mask=columns < S.width_v)
        return
    total_tiles = count_tiles(batch.lengths, batch.num_rows, S)
    before = count_tiles(batch.lengths, row, S)
    first = worker_of(before, total_tiles, parts.workers)
    last = worker_of(before + tiles - 1, total_tiles, parts.workers)
    if first == last:
        return
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.full([1], 0.0, tl.float32)
    acc = tl.full([S.padded_v], 0.0, tl.float32)
    for start in range(first, last + 1, PARTS):
        worker = start + tl.arange(0, PARTS)
        present = worker <= last
        slot = (worker * 2 + tl.where(worker == first, 1, 0)) * heads + head
        tops = tl.load(parts.stats + slot * 2, mask=present, other=float("-inf"))
        totals = tl.load(parts.stats + slot * 2 + 1, mask=present, other=0)
        mask = present[:, None] & (columns < S.width_v)[None, :]
        partial = tl.load(parts.acc + slot[:, None] * S.width_v + columns[None, :], mask=mask, other=0)
        new_top = tl.maximum(top, tl.max(tops, axis=0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        fade = tl.exp2(top - base)
        weights = tl.exp2(tops - base)
        total = total * fade + tl.sum(totals * weights, axis=0)
        acc = acc * fade + tl.sum(partial * weights[:, None], axis=0)
        top = new_top
    if sinks is not None:
        one = tl.arange(0, 1)
        total, fade = add_sink(sinks, head + one, one == 0, top, total)
        acc *= fade
    tl.store(place, acc / tl.where(total > 0, total, 1.0), mask=columns < S.width_v)
