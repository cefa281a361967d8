"""How far a replay is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from kvplane_replay import Fleet
from kvplane_replay.cost import NS_PER_SECOND
from kvplane_replay.workloads import TraceFile

_LINE_INTERVAL_S = 5.0


@dataclass(frozen=True, slots=True)
class Extent:
    """How much there is to do: so many requests, or as many as the file holds when `limit` is None."""

    trace: TraceFile
    limit: int | None

    def share_done(self, fleet: Fleet) -> float:
        """0 to 1. A compressed file tells how much of it was read, not how many requests are in it."""
        progress = fleet.progress
        done = progress.completed + progress.refused
        if self.limit is not None:
            return done / self.limit
        share_read = self.trace.bytes_read / max(1, self.trace.size_bytes)
        return share_read * done / max(1, progress.read)


@contextmanager
def progress_of(console: Console, fleet: Fleet, extent: Extent) -> Iterator[Callable[[], None]]:
    """Yields what draws the progress as it is now; call it as often as you like."""
    if console.is_terminal:
        with _bar(console) as bar:
            task = bar.add_task("replay", total=1.0)
            yield lambda: bar.update(task, completed=extent.share_done(fleet), description=status_line(fleet))
    else:
        due_s = time.monotonic()

        def maybe_line() -> None:
            nonlocal due_s
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + _LINE_INTERVAL_S
                console.print(f"{extent.share_done(fleet):4.0%} {status_line(fleet)}", highlight=False, soft_wrap=True)

        yield maybe_line


def status_line(fleet: Fleet) -> str:
    """One line on where the requests are."""
    now = fleet.progress
    return (
        f"{now.completed:,} completed, {now.refused:,} refused, {now.running:,} running, {now.waiting:,} waiting, "
        f"{now.steps:,} steps, {now.clock_ns / NS_PER_SECOND:,.0f} s virtual"
    )


def _bar(console: Console) -> Progress:
    columns = (BarColumn(bar_width=24), TaskProgressColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, refresh_per_second=5)
