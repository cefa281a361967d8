"""The second launch of attention: it merges the partial results of items that several workers share."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from kvplane_kernels.triton_ops.kernels.softmax import store_results
from kvplane_kernels.triton_ops.kernels.work import NUMBERS_PER_WORKER, owners_of, results_of, stats_of, worker_of


@triton.jit
def merge_rows(rule, out, parts, owner, last, head, item, member, AT_ONCE: tl.constexpr, S: tl.constexpr):
    """Merge rows `member` of the products of an item, which workers owner .. last share, AT_ONCE workers at a time.

    item = (first query of the item, end of its row's queries).
    """
    workers, page_heads = tl.num_programs(0), tl.num_programs(1)
    stats, results = stats_of(parts, workers), results_of(parts, workers, page_heads, S)
    columns = tl.arange(0, S.padded_v)
    top = tl.full([member.shape[0]], float("-inf"), tl.float32)
    total = tl.full([member.shape[0]], 0.0, tl.float32)
    acc = tl.full([member.shape[0], S.padded_v], 0.0, tl.float32)
    for start in range(owner, last + 1, AT_ONCE):
        worker = start + tl.arange(0, AT_ONCE)
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
    store_results(out, rule, item[0], item[1], head, member, acc, top, total, S)


@triton.jit
def merge_parts(rule, out, parts, S: tl.constexpr):
    """Merge the item that begins in a worker's span and ends in another, if there is one. The grid is (workers, heads
    of pages, pieces of S.merged rows of the products).

    Of few workers the first program merges all rows, one worker at a time: without sums over threads. Of many, each
    program merges a piece, from S.parts workers at a time.
    """
    owner = tl.program_id(0)
    head = tl.program_id(1)
    piece = tl.program_id(2)
    owned = owners_of(parts) + owner * NUMBERS_PER_WORKER
    if S.overlaps:
        gdc_wait()  # for the results of the attention, whose launch may not have ended
    first_query = tl.load(owned)
    end_query = tl.load(owned + 1)
    last_unit = tl.load(owned + 2)
    total_units = tl.load(owned + 3)
    if first_query < 0:
        return
    last = worker_of(last_unit, total_units, tl.num_programs(0))
    item = (first_query, end_query)
    if last - owner < S.few:
        if piece == 0:
            merge_rows(rule, out, parts, owner, last, head, item, tl.arange(0, S.rows), 1, S)
        return
    member = piece * S.merged + tl.arange(0, S.merged)
    if first_query + tl.min(member) // S.lanes < end_query:
        merge_rows(rule, out, parts, owner, last, head, item, member, S.parts, S)
