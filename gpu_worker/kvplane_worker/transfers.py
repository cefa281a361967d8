"""Moves and checksums of whole pages, verified by stamps.

An order comes in; its outcome goes out: the stamp of each page before the move, and which pages do not count because
their stamp was not the expected one, or changed while the page was read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from kvplane.base.errors import InvalidArgument
from kvplane_worker.lending.holdings import Holdings
from kvplane_worker.ops.interface import PageOps

MAX_BLOCKS_PER_CALL = 65536


class TransferKind(Enum):
    """What a transfer does with pages. The value is the name on the wire."""

    COPY = "copy"
    ZERO = "zero"
    GATHER = "gather"
    SCATTER = "scatter"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One order to move pages.

    Attributes:
        kind: what to do.
        group: KV cache group of the pages.
        blocks: pages to read; with ZERO and SCATTER, pages to write.
        dst_blocks: pages to write, with COPY.
        first_row: first row of the staging buffer, with GATHER and SCATTER.
        expected_stamps: one stamp per block, or none; a page with another stamp is not moved.
        seq, part, load_after: the admission that granted the pages, for kinds that write; see `StampTable.check_load`.
    """

    kind: TransferKind
    group: int
    blocks: tuple[int, ...]
    dst_blocks: tuple[int, ...] = ()
    first_row: int = 0
    expected_stamps: tuple[int, ...] = ()
    seq: int = 0
    part: int = 0
    load_after: int = 0

    @property
    def written(self) -> tuple[int, ...]:
        """Pages that the order may write."""
        if self.kind is TransferKind.COPY:
            return self.dst_blocks
        return self.blocks if self.kind in (TransferKind.ZERO, TransferKind.SCATTER) else ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a transfer.

    Attributes:
        stamps: stamp of each block before the move.
        discarded: positions in `blocks` that do not count: the stamp was not the expected one, or changed during the
            move.
        checksums: checksum of each block; empty for moves.
    """

    stamps: tuple[int, ...]
    discarded: tuple[int, ...]
    checksums: tuple[int, ...] = ()


def transfer(holdings: Holdings, ops: PageOps, order: Transfer) -> Outcome:
    """Move pages. Raises InvalidArgument as `check_transfer`, before any page is moved."""
    check_transfer(holdings, order)
    before = _stamps(holdings, order.blocks)
    chosen = [at for at, stamp in enumerate(before) if not order.expected_stamps or stamp == order.expected_stamps[at]]
    if holdings.buffers.group(order.group).layers and chosen:
        try:
            _move(holdings, ops, order, chosen)
        finally:
            _wait(holdings)  # also after a failure: part of the move may still run on the device
    after = _stamps(holdings, order.blocks)
    kept = {at for at in chosen if before[at] == after[at]}
    return Outcome(before, tuple(at for at in range(len(before)) if at not in kept))


def checksum(holdings: Holdings, ops: PageOps, group: int, blocks: Sequence[int]) -> Outcome:
    """Compute checksums of pages. Raises InvalidArgument as `transfer`."""
    _check_pages(holdings, group, "blocks", blocks, lowest=0)
    pages = holdings.buffers.group(group)
    before = _stamps(holdings, blocks)
    sums = ops.checksum(pages, blocks).tolist() if pages.layers and blocks else [0] * len(blocks)
    after = _stamps(holdings, blocks)
    discarded = tuple(at for at in range(len(before)) if before[at] != after[at])
    return Outcome(before, discarded, tuple(sums))


def check_start(holdings: Holdings, order: Transfer, epoch: int) -> None:
    """Raise unless the order may start now, on behalf of the engine life `epoch`.

    Raises:
        StaleEpoch: this engine life does not own the pages.
        InvalidArgument: an order that writes names no admission; also as `check_transfer`.
        FailedPrecondition: the load may not start yet on this rank.
    """
    holdings.stamps.check_owner(epoch)
    check_transfer(holdings, order)
    if order.written and not order.seq:
        raise InvalidArgument(
            "an order that writes names no step", field="seq", remedy="give the step whose result granted the pages"
        )
    if order.written:
        holdings.stamps.check_load(epoch, order.seq, order.part, order.load_after)


def check_transfer(holdings: Holdings, order: Transfer) -> None:
    """Raise InvalidArgument when the order names pages or rows that do not exist, or its columns differ in length."""
    writes = order.kind in (TransferKind.ZERO, TransferKind.SCATTER)
    _check_pages(holdings, order.group, "blocks", order.blocks, lowest=1 if writes else 0)
    if order.kind is TransferKind.SCATTER and len(set(order.blocks)) != len(order.blocks):
        raise InvalidArgument("a page is named twice", field="blocks", remedy="name each page once")
    copies = len(order.blocks) if order.kind is TransferKind.COPY else 0
    if len(order.dst_blocks) != copies:
        raise InvalidArgument(
            f"{len(order.dst_blocks)} targets for {copies} copies", field="dst_blocks", remedy=f"give {copies}"
        )
    _check_pages(holdings, order.group, "dst_blocks", order.dst_blocks, lowest=1)
    if len(order.expected_stamps) not in (0, len(order.blocks)):
        raise InvalidArgument(
            f"{len(order.expected_stamps)} stamps for {len(order.blocks)} blocks",
            field="expected_stamps",
            remedy="give one per block, or none",
        )
    staged = len(order.blocks) if order.kind in (TransferKind.GATHER, TransferKind.SCATTER) else 0
    rows = holdings.rows(order.group)
    if staged and order.first_row + staged > rows:
        raise InvalidArgument(
            f"rows {order.first_row} to {order.first_row + staged - 1}; the staging buffer has {rows}",
            field="first_row",
            remedy="use existing rows, or start the worker with a larger --staging-mib",
        )


def _check_pages(holdings: Holdings, group: int, field: str, blocks: Sequence[int], lowest: int) -> None:
    holdings.buffers.group(group)
    if len(blocks) > MAX_BLOCKS_PER_CALL:
        raise InvalidArgument(
            f"{len(blocks)} pages in one call", field=field, remedy=f"give at most {MAX_BLOCKS_PER_CALL} a call"
        )
    last = holdings.buffers.num_blocks - 1
    if blocks and not lowest <= min(blocks) <= max(blocks) <= last:
        raise InvalidArgument(
            f"pages {min(blocks)} to {max(blocks)}", field=field, remedy=f"give pages {lowest} to {last}"
        )


def _move(holdings: Holdings, ops: PageOps, order: Transfer, chosen: list[int]) -> None:
    """Move the chosen positions only; rows and targets of the others stay unchanged."""
    pages = holdings.buffers.group(order.group)
    blocks = [order.blocks[at] for at in chosen]
    if order.kind is TransferKind.ZERO:
        ops.zero_pages(pages, blocks)
    elif order.kind is TransferKind.COPY:
        ops.copy_pages(pages, blocks, [order.dst_blocks[at] for at in chosen])
    else:
        rows = holdings.staging_rows(order.group, order.first_row, len(order.blocks))
        act = ops.gather if order.kind is TransferKind.GATHER else ops.scatter
        for start, end in _runs(chosen):
            act(pages, order.blocks[start:end], rows[start:end])


def _runs(chosen: list[int]) -> list[tuple[int, int]]:
    """Runs of consecutive positions, as (first, last + 1)."""
    runs: list[tuple[int, int]] = []
    for at in chosen:
        start = runs.pop()[0] if runs and runs[-1][1] == at else at
        runs.append((start, at + 1))
    return runs


def _stamps(holdings: Holdings, blocks: Sequence[int]) -> tuple[int, ...]:
    return tuple(holdings.stamps.read(block) for block in blocks)


def _wait(holdings: Holdings) -> None:
    """Wait until the pages have been read or written: on a GPU, operations are asynchronous."""
    if holdings.buffers.memory.is_cuda:
        torch.cuda.synchronize(holdings.buffers.memory.device)
