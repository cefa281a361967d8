"""Which route was faster for runs of a size and a count: a small table for each direction, measured once per device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from kvplane_worker.ops.interface import GroupPages

RUN_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10)
COUNTS = (16, 64, 256)
# So that all of it takes milliseconds: at 40 GB/s this much takes 0.4.
MAX_CELL_BYTES = 16 << 20
# Measuring ends when it has taken so long, whatever is left: a link that slow shows in few cells.
BUDGET_S = 0.05
# Batched copies leave the multiprocessors alone: for that they may be a little slower.
NEARLY = 0.95


class Route(Protocol):
    """One way to move blocks to and from rows of the host, in order with the current stream."""

    def save(self, group: GroupPages, blocks: Sequence[int], staging: Tensor) -> None:
        """Copy blocks into rows."""

    def load(self, group: GroupPages, blocks: Sequence[int], staging: Tensor) -> None:
        """Copy rows into blocks."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What both routes took for `count` runs of `run_bytes` each."""

    run_bytes: int
    count: int
    batched_s: float
    buffered_s: float

    @property
    def text(self) -> str:
        """Count, size, and GB/s of both."""
        moved = self.count * self.run_bytes / 1e9
        rates = f"{moved / self.batched_s:.1f}/{moved / self.buffered_s:.1f}"
        return f"{self.count} x {self.run_bytes >> 10} KiB {rates}"

    def distance(self, run_bytes: int, count: int) -> float:
        """How unlike other runs these are: doublings of size and of count."""
        return abs(math.log2(max(1, run_bytes) / self.run_bytes)) + abs(math.log2(max(1, count) / self.count))


@dataclass(frozen=True, slots=True)
class RouteTable:
    """What was measured in one direction; never empty."""

    cells: tuple[Cell, ...]

    def prefers_batches(self, run_bytes: int, count: int) -> bool:
        """True when batched copies were as good as buffers for the runs most like these."""
        nearest = min(self.cells, key=lambda cell: cell.distance(run_bytes, count))
        return nearest.batched_s * NEARLY <= nearest.buffered_s

    @property
    def text(self) -> str:
        """All cells."""
        return ", ".join(cell.text for cell in self.cells)


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Seconds of work, host and device.

    Attributes:
        now: seconds since any time.
        wait: returns when the device has done what it was given.
    """

    now: Callable[[], float]
    wait: Callable[[], None]

    def seconds(self, work: Callable[[], None]) -> float:
        """Of a second run: the first one makes what is made once."""
        work()
        self.wait()
        begun = self.now()
        work()
        self.wait()
        return max(self.now() - begun, 1e-9)


def shapes() -> list[tuple[int, int]]:
    """(bytes of a run, count) of all cells, the small ones first."""
    pairs = [(size, count) for size in RUN_BYTES for count in COUNTS if size * count <= MAX_CELL_BYTES]
    return sorted(pairs, key=lambda pair: pair[0] * pair[1])


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory to measure with: pages that lie apart, so that no two runs merge, and rows."""

    pages: Tensor
    rows: Tensor

    @classmethod
    def on(cls, device: torch.device) -> Scratch:
        """Enough for every cell."""
        room = 2 * (MAX_CELL_BYTES + max(RUN_BYTES))
        pages = torch.zeros(room, dtype=torch.uint8, device=device)
        return cls(pages, torch.zeros(MAX_CELL_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda"))

    def moved(self, run_bytes: int, count: int) -> tuple[GroupPages, list[int], Tensor]:
        """Pages, blocks and staging of `count` runs."""
        layer = self.pages.as_strided((count + 1, run_bytes), (2 * run_bytes, 1))
        return GroupPages((layer,)), list(range(1, count + 1)), self.rows[: run_bytes * count].view(count, run_bytes)


def measured(device: torch.device, batched: Route, buffered: Route, watch: Stopwatch) -> tuple[RouteTable, RouteTable]:
    """The tables to the host and to the device. Waits for the device."""
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
