"""The link of a device to the host: both routes, and the choice between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvplane.base.errors import FailedPrecondition
from kvplane_worker.ops.interface import GroupPages
from kvplane_worker.ops.triton_ops.link.buffers import BufferRoute, Stage
from kvplane_worker.ops.triton_ops.link.copies import Copies, copies_for
from kvplane_worker.ops.triton_ops.link.lanes import Lanes, lanes_of
from kvplane_worker.ops.triton_ops.link.routes import Route, RouteTable, Stopwatch, measured
from kvplane_worker.ops.triton_ops.link.runs import Runs, merged_runs

TO_HOST, TO_DEVICE = "to the host", "to the device"


class BatchRoute:
    """All runs in one call of the driver. Staging on the host is pinned."""

    def __init__(self, copies: Copies, lanes: Lanes) -> None:
        self._copies = copies
        self._lanes = lanes

    def save(self, group: GroupPages, blocks: Sequence[int], staging: Tensor) -> None:
        """See `routes.Route`."""
        self.copy(TO_HOST, merged_runs(group, blocks, staging), staging)

    def load(self, group: GroupPages, blocks: Sequence[int], staging: Tensor) -> None:
        """See `routes.Route`."""
        self.copy(TO_DEVICE, merged_runs(group, blocks, staging), staging)

    def copy(self, direction: str, runs: Runs, staging: Tensor) -> None:
        """Copy runs that are planned already."""
        ends = (runs.pages, runs.rows) if direction == TO_HOST else (runs.rows, runs.pages)
        with self._lanes.aside(staging) as stream:
            self._copies.copy_runs(*ends, runs.sizes, stream)


class HostLink:
    """Moves blocks of a device to and from rows on the host, in order with the current stream.

    Pinned rows are copied without waiting: saved ones are there, loaded ones may change, when the current stream has
    come so far. Other host memory is right too, only slower. The first use measures both routes, which waits for the
    device.

    Attributes:
        buffered, batched: the routes; `batched` is None where there are no batched copies, `why_not` says why.
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
        """Copy blocks into rows of host memory."""
        self._move(TO_HOST, group, blocks, staging)

    def load(self, group: GroupPages, blocks: Sequence[int], staging: Tensor) -> None:
        """The reverse of `save`."""
        self._move(TO_DEVICE, group, blocks, staging)

    @property
    def explained(self) -> tuple[str, ...]:
        """The choice in each direction that was used, with what was measured."""
        if self.batched is None:
            return (f"host link by buffers alone: {self.why_not}",)
        return tuple(
            f"host link {direction}: last {last}; measured, GB/s batched/buffered: {self._tables[direction].text}"
            for direction, last in self._last.items()
        )

    def _move(self, direction: str, group: GroupPages, blocks: Sequence[int], staging: Tensor) -> None:
        runs = self._batches(direction, group, blocks, staging)
        if runs is not None:
            assert self.batched is not None, "runs are of the batched route"
            self.batched.copy(direction, runs, staging)
        elif direction == TO_HOST:
            self.buffered.save(group, blocks, staging)
        else:
            self.buffered.load(group, blocks, staging)

    def _batches(self, direction: str, group: GroupPages, blocks: Sequence[int], staging: Tensor) -> Runs | None:
        """The runs, where they go as batched copies; None where buffers are faster, or all that there is."""
        if not blocks or not self._is_fast(staging) or not self._measured():
            return None
        runs = merged_runs(group, blocks, staging)
        is_batched = self._tables[direction].prefers_batches(runs.mean_bytes, len(runs.sizes))
        way = "batched" if is_batched else "by buffers"
        self._last[direction] = f"{way}, {len(runs.sizes)} runs of {runs.mean_bytes} bytes"
        return runs if is_batched else None

    def _is_fast(self, staging: Tensor) -> bool:
        """True when the driver copies to and from this memory without waiting."""
        return self._device.type != "cuda" or staging.is_pinned()

    def _measured(self) -> bool:
        """True when there are two routes and a table; measures when it is first asked. A driver that refuses batched
        copies, whatever its version says, leaves one route.
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
