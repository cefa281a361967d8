"""The results as values: limits of the machine, and figures relative to them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limit:
    """What the machine can do, in bytes per second (launch floor: seconds)."""

    name: str
    value: float


@dataclass(frozen=True)
class Figure:
    """One line of the table.

    Attributes:
        value: in `unit` if it is a rate, or a ratio of two measurements.
        limit: name of the limit that `ratio` is a part of; of the other measurement where the value is a ratio.
        goal: what `ratio` should reach (with `at_most`: not pass); None for a peer, which is only compared with.
    """

    name: str
    value: float
    limit: str
    ratio: float
    goal: float | None = None
    at_most: bool = False
    unit: str = "B/s"

    @property
    def verdict(self) -> str:
        if self.goal is None:
            return ""
        reached = self.ratio <= self.goal if self.at_most else self.ratio >= self.goal
        return "reached" if reached else "missed"

    @property
    def row(self) -> str:
        rate = f"{self.value / 1e12:.1f} TFLOP/s" if self.unit == "FLOP/s" else f"{self.value / 1e9:.1f} GB/s"
        value = rate if self.value > 1e4 else f"{self.value:.3f}" if self.value > 1e-2 else f"{self.value * 1e6:.1f} µs"
        goal = "" if self.goal is None else f"{'≤' if self.at_most else '≥'} {self.goal:.2f}"
        return f"| {self.name} | {value} | {self.ratio:.3f} of {self.limit} | {goal} | {self.verdict} |"


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        pool_bytes: of the pages that moves choose from, several times a cache; moved_bytes: of those moved at once.
        kv_heads: of pages to decode; rows, context: of a batch; long_context: of the one long row of a skewed batch.
        tokens: written at once.
        page_bytes: of the moves.
        link_bytes: carried over the host link at once.
        seeds: of the contract per operation and backend.
    """

    pool_bytes: int
    moved_bytes: int
    kv_heads: int
    rows: int
    context: int
    long_context: int
    tokens: int
    page_bytes: tuple[int, ...]
    link_bytes: int
    seeds: int


FULL = Sizes(4 << 30, 1 << 30, 8, 32, 8192, 131072, 16384, (4 << 10, 16 << 10, 64 << 10), 256 << 20, 40)
TINY = Sizes(1 << 20, 1 << 18, 1, 2, 64, 128, 32, (4 << 10, 16 << 10), 1 << 16, 1)
