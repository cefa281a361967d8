"""Moving whole pages, bracketed by stamps: what was read counts only if the page stayed the same meanwhile."""

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
    """What is done with pages. The value is the name used on the wire."""

    COPY = "copy"
    ZERO = "zero"
    GATHER = "gather"
    SCATTER = "scatter"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One order.

    Attributes:
        kind: what to do.
        group: KV cache group of the pages.
        blocks: pages to read; to write for ZERO and SCATTER.
        dst_blocks: COPY: pages to write.
        first_row: GATHER, SCATTER: of the staging buffer.
        expected_stamps: of blocks, or none; pages with another stamp are left alone.
        seq, part, load_after: kinds that write: of the admission whose pages they write, see `StampTable.check_load`.
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
        """Pages that it may write."""
        if self.kind is TransferKind.COPY:
            return self.dst_blocks
        return self.blocks if self.kind in (TransferKind.ZERO, TransferKind.SCATTER) else ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the pages.

    Attributes:
        stamps: of each block before.
        discarded: positions in blocks whose stamp was not the expected one, or changed meanwhile.
        checksums: of each block, when they were asked for.
    """

    stamps: tuple[int, ...]
    discarded: tuple[int, ...]
    checksums: tuple[int, ...] = ()


def transfer(holdings: Holdings, ops: PageOps, order: Transfer) -> Outcome:
    """Move pages. Raises InvalidArgument, before anything is moved, for an order that the pool cannot mean."""
    check_transfer(holdings, order)
    before = _stamps(holdings, order.blocks)
    chosen = [at for at, stamp in enumerate(before) if not order.expected_stamps or stamp == order.expected_stamps[at]]
    if holdings.buffers.group(order.group).layers and chosen:
        try:
            _move(holdings, ops, order, chosen)
        finally:
            _wait(holdings)  # also for what a failure left under way
    after = _stamps(holdings, order.blocks)
    kept = {at for at in chosen if before[at] == after[at]}
    return Outcome(before, tuple(at for at in range(len(before)) if at not in kept))


def checksum(holdings: Holdings, ops: PageOps, group: int, blocks: Sequence[int]) -> Outcome:
    """Checksums of pages. Raises InvalidArgument as `transfer`."""
    _check_pages(holdings, group, "blocks", blocks, lowest=0)
    pages = holdings.buffers.group(group)
    before = _stamps(holdings, blocks)
    sums = ops.checksum(pages, blocks).tolist() if pages.layers and blocks else [0] * len(blocks)
    after = _stamps(holdings, blocks)
    discarded = tuple(at for at in range(len(before)) if before[at] != after[at])
    return Outcome(before, discarded, tuple(sums))


def check_start(holdings: Holdings, order: Transfer, epoch: int) -> None:
    """Raise unless the pages may be moved now on behalf of this engine life.

    Raises:
        StaleEpoch: it does not own the pages.
        InvalidArgument: an order that writes does not say which admission gave it the pages, or see `check_transfer`.
        FailedPrecondition: the load may not start yet on this rank.
    """
    holdings.stamps.check_owner(epoch)
    check_transfer(holdings, order)
    if order.written and not order.seq:
        raise InvalidArgument(
            "pages are written for no step", field="seq", remedy="name the step whose answer gave them to the request"
        )
    if order.written:
        holdings.stamps.check_load(epoch, order.seq, order.part, order.load_after)


def check_transfer(holdings: Holdings, order: Transfer) -> None:
    """Raise InvalidArgument naming the field of an order that pool or staging buffer cannot mean."""
    writes = order.kind in (TransferKind.ZERO, TransferKind.SCATTER)
    _check_pages(holdings, order.group, "blocks", order.blocks, lowest=1 if writes else 0)
    if order.kind is TransferKind.SCATTER and len(set(order.blocks)) != len(order.blocks):
        raise InvalidArgument("a page is named twice", field="blocks", remedy="name each page to write once")
    copies = len(order.blocks) if order.kind is TransferKind.COPY else 0
    if len(order.dst_blocks) != copies:
        raise InvalidArgument(f"{len(order.dst_blocks)} targets", field="dst_blocks", remedy=f"give {copies}")
    _check_pages(holdings, order.group, "dst_blocks", order.dst_blocks, lowest=1)
    if len(order.expected_stamps) not in (0, len(order.blocks)):
        raise InvalidArgument(
            f"{len(order.expected_stamps)} stamps", field="expected_stamps", remedy="give one per block, or none"
        )
    staged = len(order.blocks) if order.kind in (TransferKind.GATHER, TransferKind.SCATTER) else 0
    rows = holdings.rows(order.group)
    if staged and order.first_row + staged > rows:
        raise InvalidArgument(
            f"rows {order.first_row} to {order.first_row + staged - 1} of {rows}",
            field="first_row",
            remedy="use rows that the staging buffer has, or start the worker with a larger one",
        )


def _check_pages(holdings: Holdings, group: int, field: str, blocks: Sequence[int], lowest: int) -> None:
    holdings.buffers.group(group)
    if len(blocks) > MAX_BLOCKS_PER_CALL:
        raise InvalidArgument(f"{len(blocks)} pages", field=field, remedy=f"give at most {MAX_BLOCKS_PER_CALL} a call")
    last = holdings.buffers.num_blocks - 1
    if blocks and not lowest <= min(blocks) <= max(blocks) <= last:
        raise InvalidArgument(
            f"pages {min(blocks)} to {max(blocks)}", field=field, remedy=f"the pool has {lowest} to {last}"
        )


def _move(holdings: Holdings, ops: PageOps, order: Transfer, chosen: list[int]) -> None:
    """The chosen positions; those that are not leave their rows and targets alone."""
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
    """Runs of positions that follow each other, as (first, behind the last)."""
    runs: list[tuple[int, int]] = []
    for at in chosen:
        start = runs.pop()[0] if runs and runs[-1][1] == at else at
        runs.append((start, at + 1))
    return runs


def _stamps(holdings: Holdings, blocks: Sequence[int]) -> tuple[int, ...]:
    return tuple(holdings.stamps.read(block) for block in blocks)


def _wait(holdings: Holdings) -> None:
    """Until the pages have been read or written: on a GPU the call returns before."""
    if holdings.buffers.memory.is_cuda:
        torch.cuda.synchronize(holdings.buffers.memory.device)
