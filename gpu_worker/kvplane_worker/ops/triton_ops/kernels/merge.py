"""The second launch of attention: it merges the partial results of items that several workers share."""

from __future__ import annotations

import triton
import triton.language as tl

from kvplane_worker.ops.triton_ops.kernels.softmax import store_results
from kvplane_worker.ops.triton_ops.kernels.work import NUMBERS_PER_WORKER, owners_of, results_of, stats_of, worker_of


@triton.jit
def merge_parts(rule, out, parts, S: tl.constexpr):
    """Merge the item that begins in a worker's span and ends in another, if there is one: S.merged rows of its
    products, from S.parts workers at a time. The grid is (workers, heads of pages, pieces of S.merged rows).
    """
    owner = tl.program_id(0)
    head = tl.program_id(1)
    workers, page_heads = tl.num_programs(0), tl.num_programs(1)
    owned = owners_of(parts) + owner * NUMBERS_PER_WORKER
    first_query = tl.load(owned)
    if first_query < 0:
        return
    end_query = tl.load(owned + 1)
    last = worker_of(tl.load(owned + 2), tl.load(owned + 3), workers)
    stats, results = stats_of(parts, workers), results_of(parts, workers, page_heads, S)
    member = tl.program_id(2) * S.merged + tl.arange(0, S.merged)
    if first_query + tl.min(member) // S.lanes >= end_query:
        return
    columns = tl.arange(0, S.padded_v)
    top = tl.full([S.merged], float("-inf"), tl.float32)
    total = tl.full([S.merged], 0.0, tl.float32)
    acc = tl.full([S.merged, S.padded_v], 0.0, tl.float32)
    for start in range(owner, last + 1, S.parts):
        worker = start + tl.arange(0, S.parts)
        slot = (worker * 2 + tl.where(worker == owner, 1, 0)) * page_heads + head
        place = slot[:, None] * S.rows + member[None, :]
        mask = (worker <= last)[:, None] & (member < S.queries * S.lanes)[None, :]
        tops = tl.load(stats + place * 2, mask=mask, other=float("-inf"))
        totals = tl.load(stats + place * 2 + 1, mask=mask, other=0)
        whole = mask[:, :, None] & (columns < S.width_v)[None, None, :]
        partial = tl.load(results + place[:, :, None] * S.width_v + columns[None, None, :], mask=whole, other=0)
        new_top = tl.maximum(top, tl.max(tops, axis=0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        fade = tl.exp2(top - base)
        weights = tl.exp2(tops - base[None, :])
        total = total * fade + tl.sum(totals * weights, axis=0)
        acc = acc * fade[:, None] + tl.sum(partial * weights[:, :, None], axis=0)
        top = new_top
    store_results(out, rule, first_query, end_query, head, member, acc, top, total, S)
