"""How attention divides its work: counts and places of units against a model in Python, and shares on a large chip."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from kvplane_kernels.interface import AttentionPages, AttentionRule, Batch
from kvplane_kernels.triton_ops import attention
from kvplane_kernels.triton_ops.kernels.arguments import Rows, Shape
from kvplane_kernels.triton_ops.kernels.work import count_units, find_row, span_start, worker_of
from kvplane_kernels.triton_ops.launch import Chip
from tests.kernels import interpreter

H200 = Chip(132, 227 << 10, native_fp8=True, can_overlap=True)
FULL = AttentionRule(0.1)


@triton.jit
def probe(lengths, num_rows, starts, found, workers, S: tl.constexpr):
    """Store the number of units; then for each worker its first unit, the row and the number of units before the
    row, and the workers that have the units at both ends of its span.
    """
    batch = Rows(lengths, 0, lengths, num_rows, starts, None)
    total = count_units(batch, S)
    tl.store(found, total)
    for worker in range(0, workers):
        unit = span_start(worker, total, workers)
        row, before = find_row(batch, unit, S)
        tl.store(found + 1 + worker * 5, unit)
        tl.store(found + 2 + worker * 5, row)
        tl.store(found + 3 + worker * 5, before)
        tl.store(found + 4 + worker * 5, worker_of(unit, total, workers))
        tl.store(found + 5 + worker * 5, worker_of(span_start(worker + 1, total, workers) - 1, total, workers))


def units_by_row(lengths: list[int], queries: list[int], shape: Shape) -> list[int]:
    """The number of units of each row, by a loop over its query tiles."""
    found = []
    for length, count in zip(lengths, queries, strict=True):
        units = 0
        for first in range(length - count, length, shape.queries):
            low = max(0, first - shape.window + 1) if shape.window else 0
            low = max(0, first) // shape.chunk * shape.chunk if shape.chunk else low
            end = max(0, min(first + shape.queries, length))
            units += max(1, -(-end // shape.tile) - low // shape.tile)
        found.append(units)
    return found


@pytest.mark.parametrize("extent", [{}, {"window": 70}, {"chunk": 150}], ids=str)
@pytest.mark.parametrize("queries", [1, 4])
def test_units_are_counted_and_found(extent, queries):
    shape = Shape(page=16, width_k=16, width_v=16, group=1, queries=queries, tile=64, scan=8, **extent)
    lengths = [0, 1, 64, 65, 300, 200, 0, 130, 7]
    counts = [1] * 9 if queries == 1 else [1, 1, 3, 5, 17, 0, 2, 20, 7]
    units = units_by_row(lengths, counts, shape)
    total, workers = sum(units), 9
    starts = None if queries == 1 else torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int()
    found = torch.full((1 + 5 * workers,), -1, dtype=torch.int32)
    interpreter.quicken()
    probe[(1,)](torch.tensor(lengths, dtype=torch.int32), 9, starts, found, workers, S=shape)
    assert found[0] == total
    places = [[row, sum(units[:row])] for row in range(9) for _ in range(units[row])]
    sizes = [total // workers + (worker < total % workers) for worker in range(workers)]
    first = [sum(sizes[:worker]) for worker in range(workers)]
    wanted = [[unit, *places[unit], worker, worker] for worker, unit in enumerate(first)]
    assert found[1:].view(-1, 5).tolist() == wanted


def call_of(kv_heads: int, lengths: list[int], queries: list[int]) -> attention.Call:
    """Eight query heads per key, of 128 elements. One query per row has no query starts."""
    room = torch.zeros((1, 2, 16, kv_heads, 128), dtype=torch.bfloat16)
    starts = torch.tensor([0, *queries]).cumsum(0).int() if max(queries) > 1 else None
    batch = Batch(torch.zeros((len(lengths), 1), dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32), starts)
    query = torch.zeros((sum(queries), 8 * kv_heads, 128), dtype=torch.bfloat16)
    return attention.keys_and_values(query, AttentionPages(room[:, 0], room[:, 1]), batch, FULL)


BATCHES = {
    "8 rows of 32k with 3 drafts each": (8, [32768] * 8, [4] * 8),
    "1 row of 128k with 4 drafts": (1, [131072], [5]),
    "a chunk of 512 tokens at 32k": (1, [32768], [512]),
    "4 rows of 32k next to a prompt's chunk of 2048": (8, [32768] * 4 + [2048], [1] * 4 + [2048]),
    "1 row of 128k": (1, [131072], [1]),
}


@pytest.mark.parametrize("batch", BATCHES)
def test_every_multiprocessor_has_an_equal_share(batch):
    kv_heads, lengths, queries = BATCHES[batch]
    spans, _ = attention.launches(call_of(kv_heads, lengths, queries), H200)
    total = sum(units_by_row(lengths, queries, spans.constants["S"]))
    heads, workers, _ = spans.grid
    shares = [total // workers + (worker < total % workers) for worker in range(workers)]
    assert heads == kv_heads
    assert heads * sum(share > 0 for share in shares) >= H200.multiprocessors
    assert max(shares) <= 1.2 * total / workers
