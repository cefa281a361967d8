"""Which of two routes between device and host is faster for a given size and number of runs (contiguous copies): a
small table per direction, measured once per device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from kvplane_kernels.interface import GroupPages

RUN_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10)
COUNTS = (16, 64, 256)
# Keeps the measurement short: at 40 GB/s one copy of this size takes 0.4 ms.
MAX_CELL_BYTES = 16 << 20
# Of each route in each cell.
RUNS = 4
# The measurement ends after this time; on a slow link a few cells are enough.
BUDGET_S = 0.1
# Batched copies use no multiprocessors, so they are preferred up to this ratio of speed.
NEARLY = 0.95


class Route(Protocol):
    """The interface that copies blocks to and from rows on the host, in order with the current stream."""

    def save(self, group: GroupPages, blocks: Sequence[int], staging: Tensor) -> None:
        """Copy blocks into rows, uint8 [len(blocks), bytes per block]."""

    def load(self, group: GroupPages, blocks: Sequence[int], staging: Tensor) -> None:
        """Copy rows, uint8 [len(blocks), bytes per block], into blocks."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: the seconds that each of the two routes takes for `count` runs (contiguous copies) of
    `run_bytes` bytes each.
    """

    run_bytes: int
    count: int
    batched_s: float
    buffered_s: float

    @property
    def text(self) -> str:
        """Number of runs, KiB per run, and GB/s by a batched copy and by buffers."""
        moved = self.count * self.run_bytes / 1e9
        rates = f"{moved / self.batched_s:.1f}/{moved / self.buffered_s:.1f}"
        return f"{self.count} x {self.run_bytes >> 10} KiB {rates}"

    def distance(self, run_bytes: int, count: int) -> float:
        """Return the distance of this cell to `count` runs of `run_bytes` bytes, as a number of doublings of size and
        of count.
        """
        return abs(math.log2(max(1, run_bytes) / self.run_bytes)) + abs(math.log2(max(1, count) / self.count))


@dataclass(frozen=True, slots=True)
class RouteTable:
    """The measured cells of one direction, at least one."""

    cells: tuple[Cell, ...]

    def prefers_batches(self, run_bytes: int, count: int) -> bool:
        """Return whether the batched route was about as fast as the buffered route, or faster, in the cell nearest to
        these runs.
        """
        nearest = min(self.cells, key=lambda cell: cell.distance(run_bytes, count))
        return nearest.batched_s * NEARLY <= nearest.buffered_s

    @property
    def text(self) -> str:
        """All cells of the table, as text."""
        return ", ".join(cell.text for cell in self.cells)


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """A measurement of work on host and device.

    Attributes:
        now: clock, in seconds.
        wait: waits until the device has finished its work.
    """

    now: Callable[[], float]
    wait: Callable[[], None]

    def seconds(self, work: Callable[[], None]) -> float:
        """Run the work `RUNS` times and return the seconds of the fastest run: the first one includes one-time
        initialization, and a run that something else delayed would decide for the wrong route.
        """
        spent = []
        for _ in range(RUNS):
            begun = self.now()
            work()
            self.wait()
            spent.append(self.now() - begun)
        return max(min(spent), 1e-9)


def shapes() -> list[tuple[int, int]]:
    """Return (bytes of a run, number of runs) of all cells, by ascending total size."""
    pairs = [(size, count) for size in RUN_BYTES for count in COUNTS if size * count <= MAX_CELL_BYTES]
    return sorted(pairs, key=lambda pair: pair[0] * pair[1])


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory for the measurement: rows, and pages with gaps between them, so that runs do not merge."""

    pages: Tensor
    rows: Tensor

    @classmethod
    def on(cls, device: torch.device) -> Scratch:
        """Allocate enough memory for every cell."""
        room = 2 * (MAX_CELL_BYTES + max(RUN_BYTES))
        pages = torch.zeros(room, dtype=torch.uint8, device=device)
        return cls(pages, torch.zeros(MAX_CELL_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda"))

    def moved(self, run_bytes: int, count: int) -> tuple[GroupPages, list[int], Tensor]:
        """Return pages, blocks and staging for copies of `count` runs of `run_bytes` bytes each."""
        layer = self.pages.as_strided((count + 1, run_bytes), (2 * run_bytes, 1))
        return GroupPages((layer,)), list(range(1, count + 1)), self.rows[: run_bytes * count].view(count, run_bytes)


def measured(device: torch.device, batched: Route, buffered: Route, watch: Stopwatch) -> tuple[RouteTable, RouteTable]:
    """Measure the speed of both routes and return the tables for copies to the host and to the device. Waits for the
    device.
    """
    scratch, begun = Scratch.on(device), watch.now()
    saves: list[Cell] = []
    loads: list[Cell] = []
    for shape in shapes():
        moved = scratch.moved(*shape)
        saves.append(Cell(*shape, *(watch.seconds(partial(route.save, *moved)) for route in (batched, buffered))))
        loads.append(Cell(*shape, *(watch.seconds(partial(route.load, *moved)) for route in (batched, buffered))))
        if watch.now() - begun > BUDGET_S:
            break
    return RouteTable(tuple(saves)), RouteTable(tuple(loads))
