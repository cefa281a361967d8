"""The link between a device and the host: its two routes, and the choice between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvplane.base.errors import FailedPrecondition
from kvplane_kernels.interface import GroupPages
from kvplane_kernels.triton_ops.link.buffers import BufferRoute, Stage
from kvplane_kernels.triton_ops.link.copies import Copies, copies_for
from kvplane_kernels.triton_ops.link.lanes import Lanes, lanes_of
from kvplane_kernels.triton_ops.link.routes import Route, RouteTable, Stopwatch, measured
from kvplane_kernels.triton_ops.link.runs import Runs, merged_runs

TO_HOST, TO_DEVICE = "to the host", "to the device"
# Blocks whose runs decide between the routes: the host needs longer to merge many small runs than the link to copy
# them.
SAMPLE = 256


class BatchRoute:
    """The batched route: it copies all runs (merged fragments) in one call of the driver. Staging on the host must be
    pinned.
    """

    def __init__(self, copies: Copies, lanes: Lanes) -> None:
        self._copies = copies
        self._lanes = lanes

    def save(self, group: GroupPages, blocks: Sequence[int], staging: Tensor) -> None:
        """Copy blocks into rows of host memory; see `routes.Route`."""
        self.copy(TO_HOST, merged_runs(group, blocks, staging), staging)

    def load(self, group: GroupPages, blocks: Sequence[int], staging: Tensor) -> None:
        """Copy rows of host memory into blocks; see `routes.Route`."""
        self.copy(TO_DEVICE, merged_runs(group, blocks, staging), staging)

    def copy(self, direction: str, runs: Runs, staging: Tensor) -> None:
        """Copy runs (merged fragments) in one direction."""
        ends = (runs.pages, runs.rows) if direction == TO_HOST else (runs.rows, runs.pages)
        with self._lanes.copy_stream(staging) as stream:
            self._copies.copy_runs(*ends, runs.sizes, stream)


class HostLink:
    """Copy blocks of a device to and from rows on the host, in order with the current stream.

    Copies of pinned rows are asynchronous: once the current stream has completed the work of a call, the rows of a
    `save` are complete and the rows of a `load` may change. Other host memory works too, but slower. The first call
    measures the speed of both routes and waits for the device.

    Attributes:
        buffered: the route over a buffer on the device.
        batched: the route of one driver call; None if batched copies are not supported.
        why_not: why `batched` is None.
    """

    def __init__(self, device: torch.device, stage: Stage, now: Callable[[], float] = time.perf_counter) -> None:
        lanes = lanes_of(device)
        copies, self.why_not = copies_for(device)
        self.buffered: Route = BufferRoute(device, stage, lanes)
        self.batched = BatchRoute(copies, lanes) if copies else None
        self._device = device
        self._watch = Stopwatch(now, lanes.wait)
        self._tables: dict[str, RouteTable] = {}
        self._last: dict[str, str] = {}

    def save(self, group: GroupPages, blocks: Sequence[int], staging: Tensor) -> None:
        """Copy blocks into rows on the host, uint8 [len(blocks), bytes per block]."""
        self._move(TO_HOST, group, blocks, staging)

    def load(self, group: GroupPages, blocks: Sequence[int], staging: Tensor) -> None:
        """Copy rows on the host, uint8 [len(blocks), bytes per block], into blocks."""
        self._move(TO_DEVICE, group, blocks, staging)

    @property
    def explained(self) -> tuple[str, ...]:
        """The lines that explain the last choice of a route in each direction, with the measured speeds."""
        if self.batched is None:
            return (f"host link, buffered route only: {self.why_not}",)
        return tuple(
            f"host link {direction}: last {last}; measured, GB/s batched/buffered: {self._tables[direction].text}"
            for direction, last in self._last.items()
        )

    def _move(self, direction: str, group: GroupPages, blocks: Sequence[int], staging: Tensor) -> None:
        runs = self._batches(direction, group, blocks, staging)
        if runs is not None:
            assert self.batched is not None, "only the batched route has runs"
            self.batched.copy(direction, runs, staging)
        elif direction == TO_HOST:
            self.buffered.save(group, blocks, staging)
        else:
            self.buffered.load(group, blocks, staging)

    def _batches(self, direction: str, group: GroupPages, blocks: Sequence[int], staging: Tensor) -> Runs | None:
        """Return the runs (merged fragments) for the batched route; None if the buffered route is faster or is the only
        route.
        """
        if not blocks or not self._is_fast(staging) or not self._measured():
            return None
        runs = merged_runs(group, blocks[:SAMPLE], staging[:SAMPLE])
        count = len(runs.sizes) * len(blocks) // len(blocks[:SAMPLE])
        is_batched = self._tables[direction].prefers_batches(runs.mean_bytes, count)
        way = "batched" if is_batched else "buffered"
        self._last[direction] = f"{way}, {count} runs of {runs.mean_bytes} bytes"
        if not is_batched:
            return None
        return runs if len(blocks) <= SAMPLE else merged_runs(group, blocks, staging)

    def _is_fast(self, staging: Tensor) -> bool:
        """Return whether the driver copies to and from this host memory asynchronously."""
        return self._device.type != "cuda" or staging.is_pinned()

    def _measured(self) -> bool:
        """Return whether there are two routes and a table of their speeds. The first call measures the table.

        A driver may refuse batched copies although its version supports batched copies; then only the buffered route is
        left.
        """
        if self.batched is None or self._tables:
            return self.batched is not None
        try:
            to_host, to_device = measured(self._device, self.batched, self.buffered, self._watch)
        except FailedPrecondition as refusal:
            self.batched, self.why_not = None, str(refusal)
            return False
        self._tables = {TO_HOST: to_host, TO_DEVICE: to_device}
        return True
