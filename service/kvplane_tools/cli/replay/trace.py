"""Replay a trace for `kvplane replay`: run the engines, draw their progress, print the outcome."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from kvplane.blocking.client import connect
from kvplane.rpc.access import PLAIN
from kvplane_tools.cli.child import ServiceChild
from kvplane_tools.cli.options import FAILED, INTERRUPTED, Format, Shape, given
from kvplane_tools.cli.output import text_of
from kvplane_tools.cli.replay import report
from kvplane_tools.cli.replay.engines import Pace, running
from kvplane_tools.replay.fleet import Fleet
from kvplane_tools.replay.plan import NS_PER_SECOND, RunPlan
from kvplane_tools.replay.run import ReplayRun
from kvplane_tools.replay.summary import Summary
from kvplane_tools.replay.workloads import TraceFile

_VIEW_INTERVAL_S = 0.2
_LINE_INTERVAL_S = 5.0


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What to replay.

    Attributes:
        limit: number of requests, None = the whole file.
        service: address of a service, "" = start a service for the replay.
        speed: virtual seconds per real second, 0 = as fast as possible.
    """

    file: Path
    plan: RunPlan
    limit: int | None = None
    service: str = ""
    speed: float = 0.0


def show_replay(options: ReplayOptions, output: Shape) -> int:
    """Replay the trace, print the outcome, and return the exit code: 0; 1 if an engine failed or counts disagree; 130
    after Ctrl-C.

    Raises KvplaneError if the replay cannot start or continue.
    """
    try:
        summary = run_replay(options, Console(stderr=True))
    except KeyboardInterrupt:
        print("kvplane replay: interrupted", file=sys.stderr)
        return INTERRUPTED
    if output.format in (Format.TABLE, Format.WIDE):
        print_outcome(summary)
    else:
        print(text_of(summary.as_json, output))
    faults = [fault for fault in (summary.fault, *summary.disagreements()) if fault]
    for fault in faults:
        print(f"kvplane replay: {fault}", file=sys.stderr)
    return FAILED if faults else 0


def run_replay(options: ReplayOptions, console: Console) -> Summary:
    """Replay the trace and return the summary; progress is drawn on `console`. Raises KvplaneError if the replay cannot
    start or continue.
    """
    with ExitStack() as stack:
        trace = stack.enter_context(TraceFile(options.file))
        address = options.service or stack.enter_context(ServiceChild()).address
        access = given().access() if options.service else PLAIN
        client = stack.enter_context(connect(address, tls=access.tls, token=access.token))
        name = f"replay-{secrets.token_hex(4)}"
        run = stack.enter_context(ReplayRun(client, options.plan, name, islice(trace, options.limit)))
        pace = Pace(options.speed)
        with (
            progress_of(console, run.fleet, Extent(trace, options.limit)) as show,
            running([run], lambda run: pace.hold(run.fleet.clock_ns)) as engines,
        ):
            while not engines.wait(_VIEW_INTERVAL_S):
                show()
        return run.summary(options.file.name)


def print_outcome(summary: Summary) -> None:
    """Print the outcome as a table, and the requests that were refused."""
    console = Console()
    console.print(report.table(summary))
    for line in report.refusal_lines(summary):
        print(line)


@dataclass(frozen=True, slots=True)
class Extent:
    """Total work of a replay: `limit` requests, or all requests of the trace if `limit` is None."""

    trace: TraceFile
    limit: int | None

    def share_done(self, fleet: Fleet) -> float:
        """Return the completed share of the work, 0 to 1. Without a limit it is estimated from the bytes read, because
        the number of requests in the file is unknown.
        """
        progress = fleet.progress
        done = progress.completed + progress.refused
        if self.limit is not None:
            return done / self.limit
        share_read = self.trace.bytes_read / max(1, self.trace.size_bytes)
        return share_read * done / max(1, progress.read)


@contextmanager
def progress_of(console: Console, fleet: Fleet, extent: Extent) -> Iterator[Callable[[], None]]:
    """Yield a function that draws the current progress: a bar on a terminal, otherwise a line every few seconds."""
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
    """Return the number of requests in each state, in one line."""
    now = fleet.progress
    return (
        f"{now.completed:,} completed, {now.refused:,} refused, {now.running:,} running, {now.waiting:,} waiting, "
        f"{now.steps:,} steps, {now.clock_ns / NS_PER_SECOND:,.0f} s virtual"
    )


def _bar(console: Console) -> Progress:
    columns = (BarColumn(bar_width=24), TaskProgressColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, refresh_per_second=5)
