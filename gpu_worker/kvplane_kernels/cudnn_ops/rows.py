"""Which rows of a batch cuDNN computes: those with many queries. A row's tokens are computed in spans that fit into the
workspace; the batch of the other rows goes to the other backend.

    tokens      | span 2: 0 .. 4096, all queries attend to all | span 1: 4096 .. 9000, causal |
    queries                                                                   | 8488 .. 9000 |
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvplane_kernels.cudnn_ops.calls import Shape
from kvplane_kernels.interface import Batch, HostTables


@dataclass(frozen=True, slots=True)
class Limits:
    """From which size on rows are computed by cuDNN, and how much memory it may use.

    Chosen by speed on an H100; docs/kernels.md has the figures.

    Attributes:
        products: fewest queries x query heads of a row. A program computes 128 of them, so fewer leave multiprocessors
            idle, while Triton's kernel also divides a row's tokens.
        pairs: fewest pairs of a query and an attended token x query heads: short rows are computed one after the other.
        shared: fewest queries x query heads that share a key: with few, gathering keys and values takes longer than
            multiplying them.
        room_bytes: of the workspace for gathered keys and values; longer rows are computed in several spans.
        queries: most queries of a row.
    """

    products: int = 1 << 14
    pairs: int = 1 << 24
    shared: int = 1 << 11
    room_bytes: int = 128 << 20
    queries: int = 1 << 14


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of a row that are computed at once.

    Attributes:
        blocks: int32: their blocks, a view of the batch's table.
        numbers: what cuDNN reads on the device, see `calls.Shape.numbers`.
    """

    blocks: Tensor
    numbers: Tensor


@dataclass(frozen=True, slots=True)
class LongRow:
    """A row that cuDNN computes.

    Attributes:
        row: its index in the batch.
        queries: its queries.
        spans: its tokens, the last ones first: these contain all queries, and are causal.
    """

    row: int
    queries: slice
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """A batch, divided between the backends.

    Attributes:
        long: the rows that cuDNN computes.
        rest: the batch of the other rows; None if there are none.
        index: int64 on the device: their queries.
    """

    long: tuple[LongRow, ...]
    rest: Batch | None = None
    index: Tensor | None = None


def split(batch: Batch, shape: Shape, block_size: int, limits: Limits) -> Split:
    """Divide a batch. `shape.tokens` is the number of tokens that the workspace holds, a multiple of the block size.

    Waits for the device unless the batch has host tables.
    """
    host = batch.on_host()
    counts, lengths = host.query_start.diff(), host.seq_lens
    oldest = (lengths - counts - shape.window + 1).clamp(min=0) if shape.window else torch.zeros_like(lengths)
    first = oldest // block_size
    many = (counts * shape.q_heads >= limits.products) & (counts * shape.q_heads >= limits.shared * shape.kv_heads)
    attended = lengths.clamp(max=shape.window) if shape.window else lengths - counts // 2
    many &= attended * counts * shape.q_heads >= limits.pairs
    many &= (counts > 0) & (counts <= min(limits.queries, shape.tokens - block_size)) & (counts <= lengths)
    if shape.window:  # the queries of a row attend to different tokens before its last span
        many &= lengths - first * block_size <= shape.tokens
    column = torch.arange(host.block_table.shape[1])
    ends = -(-lengths // block_size)
    for row in many.nonzero().flatten().tolist():
        used = (column >= first[row]) & (column < ends[row])
        many[row] = bool(host.block_table[row][used].all())  # nothing is attended to in a null block
    if not many.any():
        return Split(())
    planned = [
        (row, spans_of(int(first[row]) * block_size, int(lengths[row]), shape.tokens, block_size))
        for row in many.nonzero().flatten().tolist()
    ]
    numbers = [shape.numbers(int(counts[row]), end - begin) for row, spans in planned for begin, end in spans]
    on_device = iter(sent(torch.tensor(numbers, dtype=torch.int32), batch.block_table.device))
    starts = host.query_start.tolist()
    long = tuple(
        LongRow(
            row,
            slice(starts[row], starts[row + 1]),
            tuple(
                Span(batch.block_table[row, begin // block_size : -(-end // block_size)], next(on_device))
                for begin, end in spans
            ),
        )
        for row, spans in planned
    )
    return Split(long, *rest_of(batch, host, ~many))


def spans_of(first: int, end: int, most: int, block_size: int) -> list[tuple[int, int]]:
    """Return the spans (begin, end) of the tokens first .. end, the last ones first, of at most `most` tokens each;
    spans begin at blocks.
    """
    spans = []
    while end > first:
        begin = max(first, -(-(end - most) // block_size) * block_size)
        spans.append((begin, end))
        end = begin
    return spans


def rest_of(batch: Batch, host: HostTables, others: Tensor) -> tuple[Batch | None, Tensor | None]:
    """Return the batch of the other rows, and their queries; (None, None) if they have no query."""
    counts, device = host.query_start.diff(), batch.block_table.device
    others = others & (counts > 0)
    if not others.any():
        return None, None
    rows, kept = others.nonzero().flatten(), counts[others]
    index = sent(others.repeat_interleave(counts).nonzero().flatten(), device)
    starts = torch.cat([kept.new_zeros(1), kept.cumsum(0)])
    chosen = sent(rows, device)
    rest = Batch(
        batch.block_table.index_select(0, chosen),
        batch.seq_lens.index_select(0, chosen),
        sent(starts.int(), device),
        None if batch.tree is None else batch.tree.index_select(0, index),
        HostTables(host.block_table[rows], host.seq_lens[rows], starts),
    )
    if batch.tree is None and bool((kept == 1).all()):
        rest = replace(rest, query_start=None)
    return rest, index


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to the device, without waiting for it."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
