"""Copying, zeroing and checksums of whole pages, verified by stamps, the version numbers of the pages' contents.

The outcome of an order has the stamp of each page before the operation. It lists as discarded the pages whose stamp was
not the expected one or changed during the operation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from kvplane.base.errors import InvalidArgument
from kvplane_kernels.columns import column, numbers
from kvplane_kernels.interface import PageOps
from kvplane_worker.lending.holdings import Holdings

MAX_BLOCKS_PER_CALL = 65536
MAX_NAMED = 16  # pages in a message


class TransferKind(Enum):
    """What a transfer does with pages. The value is the name of the kind in the proto file."""

    COPY = "copy"
    ZERO = "zero"
    GATHER = "gather"
    SCATTER = "scatter"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One request to a worker to copy or zero pages of its rank.

    Attributes:
        kind: what to do: COPY (page to page), GATHER (pages to staging buffer), SCATTER (staging buffer to pages) or
            ZERO.
        group: index of the KV cache group of the pages.
        blocks: blocks whose pages are read; with ZERO and SCATTER, blocks whose pages are written.
        dst_blocks: blocks whose pages are written, with COPY.
        first_row: first row of the staging buffer, with GATHER and SCATTER.
        expected_stamps: for each block the expected stamp, the version number of its page's content, or empty; a page
            with another stamp is left out.
        seq, part: the step and the part whose answer admitted the request that owns the written pages. Kinds that write
            need them, since the worker must have carried out that part's orders first.
        load_after: from the same answer: number of the step that must have finished before these pages may be written;
            0 = none. See `StampTable.check_load`.
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
        """The blocks whose pages the transfer may write."""
        if self.kind is TransferKind.COPY:
            return self.dst_blocks
        return self.blocks if self.kind in (TransferKind.ZERO, TransferKind.SCATTER) else ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a transfer or of a checksum.

    Attributes:
        stamps: stamp of each block before the operation.
        discarded: positions in `blocks` whose result is not valid: the stamp was not the expected one, or changed
            during the operation.
        checksums: checksum of each block; empty for transfers.
    """

    stamps: tuple[int, ...]
    discarded: tuple[int, ...]
    checksums: tuple[int, ...] = ()


def transfer(holdings: Holdings, ops: PageOps, order: Transfer) -> Outcome:
    """Carry out a transfer. Raises the errors of `check_transfer`, before any page is copied or zeroed."""
    check_transfer(holdings, order)
    blocks = column(order.blocks)
    before = _stamps(holdings, blocks)
    is_kept = before == (column(order.expected_stamps, torch.uint64) if order.expected_stamps else before)
    if holdings.buffers.group(order.group).layers and is_kept.any():
        try:
            _move(holdings, ops, order, _positions(is_kept))
        finally:
            _wait(holdings)  # also after a failure: part of the move may still run on the device
    is_kept &= before == _stamps(holdings, blocks)
    return Outcome(numbers(before), numbers(_positions(~is_kept)))


def checksum(holdings: Holdings, ops: PageOps, group: int, blocks: Sequence[int]) -> Outcome:
    """Return checksums of pages. Raises InvalidArgument if the group or a page does not exist."""
    _check_pages(holdings, group, "blocks", blocks, lowest=0)
    pages = holdings.buffers.group(group)
    ids = column(blocks)
    before = _stamps(holdings, ids)
    sums = ops.checksum(pages, blocks).tolist() if pages.layers and blocks else [0] * len(blocks)
    return Outcome(numbers(before), numbers(_positions(before != _stamps(holdings, ids))), tuple(sums))


def check_start(holdings: Holdings, order: Transfer, epoch: int) -> None:
    """Raise an error unless the engine life `epoch` may start this transfer now.

    Raises:
        StaleEpoch: this engine life does not own the pages.
        InvalidArgument: a transfer that writes has no `seq` (step that admitted its request), or an error of
            `check_transfer`.
        FailedPrecondition: the pages may still be in use on this rank; see `StampTable.check_load`.
    """
    holdings.stamps.check_owner(epoch)
    check_transfer(holdings, order)
    if order.written and not order.seq:
        raise InvalidArgument(
            "the transfer writes pages, but names no step that granted them",
            field="seq",
            remedy="give the step whose result granted the pages",
        )
    if order.written:
        holdings.stamps.check_load(epoch, order.seq, order.part, order.load_after)


def check_transfer(holdings: Holdings, order: Transfer) -> None:
    """Raise InvalidArgument if the transfer names blocks or staging rows that do not exist, or its lists differ in
    length.
    """
    writes = order.kind in (TransferKind.ZERO, TransferKind.SCATTER)
    _check_pages(holdings, order.group, "blocks", order.blocks, lowest=1 if writes else 0)
    if order.kind is TransferKind.SCATTER and len(set(order.blocks)) != len(order.blocks):
        twice = sorted(block for block, count in Counter(order.blocks).items() if count > 1)[:MAX_NAMED]
        raise InvalidArgument(f"the pages {twice} are listed twice", field="blocks", remedy="list each page once")
    copies = len(order.blocks) if order.kind is TransferKind.COPY else 0
    if len(order.dst_blocks) != copies:
        raise InvalidArgument(
            f"there are {len(order.dst_blocks)} target pages for {copies} copies",
            field="dst_blocks",
            remedy=f"give {copies} target pages",
        )
    _check_pages(holdings, order.group, "dst_blocks", order.dst_blocks, lowest=1)
    if len(order.expected_stamps) not in (0, len(order.blocks)):
        raise InvalidArgument(
            f"there are {len(order.expected_stamps)} stamps for {len(order.blocks)} blocks",
            field="expected_stamps",
            remedy="give one stamp per block, or none",
        )
    staged = len(order.blocks) if order.kind in (TransferKind.GATHER, TransferKind.SCATTER) else 0
    rows = holdings.rows(order.group)
    if staged and order.first_row + staged > rows:
        raise InvalidArgument(
            f"rows {order.first_row} to {order.first_row + staged - 1} are needed, the staging buffer has {rows} rows",
            field="first_row",
            remedy="use existing rows, or start the worker with a larger --staging-size",
        )


def _check_pages(holdings: Holdings, group: int, field: str, blocks: Sequence[int], lowest: int) -> None:
    holdings.buffers.group(group)
    if len(blocks) > MAX_BLOCKS_PER_CALL:
        raise InvalidArgument(
            f"there are {len(blocks)} pages in one call, the maximum is {MAX_BLOCKS_PER_CALL}",
            field=field,
            remedy="use several calls",
        )
    last = holdings.buffers.num_blocks - 1
    if blocks and not lowest <= min(blocks) <= max(blocks) <= last:
        raise InvalidArgument(
            f"pages {min(blocks)} to {max(blocks)} are listed, but only {lowest} to {last} are allowed",
            field=field,
            remedy=f"give pages from {lowest} to {last}; page 0 is the null block's, which is not written",
        )


def _move(holdings: Holdings, ops: PageOps, order: Transfer, chosen: Tensor) -> None:
    """Copy or zero only the pages at the given positions of the transfer's lists. Staging rows and pages at other
    positions do not change.
    """
    pages = holdings.buffers.group(order.group)
    if order.kind is TransferKind.ZERO:
        ops.zero_pages(pages, _at(order.blocks, chosen))
    elif order.kind is TransferKind.COPY:
        ops.copy_pages(pages, _at(order.blocks, chosen), _at(order.dst_blocks, chosen))
    else:
        rows = holdings.staging_rows(order.group, order.first_row, len(order.blocks))
        act = ops.gather if order.kind is TransferKind.GATHER else ops.scatter
        for start, end in _runs(chosen):
            act(pages, order.blocks[start:end], rows[start:end])


def _runs(chosen: Tensor) -> list[tuple[int, int]]:
    """Return the runs of consecutive positions, as (first, last + 1)."""
    is_last = torch.diff(chosen, append=chosen.new_tensor([-1])) != 1
    last, first = chosen[is_last], chosen[is_last.roll(1)]
    return list(zip(first.tolist(), (last + 1).tolist(), strict=True))


def _at(values: Sequence[int], chosen: Tensor) -> Sequence[int]:
    return values if len(chosen) == len(values) else column(values)[chosen].tolist()


def _positions(is_listed: Tensor) -> Tensor:
    return is_listed.nonzero().flatten()


def _stamps(holdings: Holdings, blocks: Tensor) -> Tensor:
    """Return a copy of the stamps of blocks, uint64 [blocks]. Each is read whole, as one aligned word."""
    return torch.frombuffer(holdings.stamps.words, dtype=torch.int64).index_select(0, blocks).view(torch.uint64)


def _wait(holdings: Holdings) -> None:
    """Wait until the device has read or written the pages: on a GPU, operations are asynchronous."""
    if holdings.buffers.memory.is_cuda:
        torch.cuda.synchronize(holdings.buffers.memory.device)
