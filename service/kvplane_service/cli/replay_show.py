"""Replays a trace, shows how far it is, and prints what it comes to."""

from __future__ import annotations

import json
import secrets
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rich.console import Console

from kvplane.access import PLAIN
from kvplane.unary import connect
from kvplane_replay.run import ReplayRun, RunPlan
from kvplane_replay.summary import Summary
from kvplane_replay.workloads import TraceFile
from kvplane_service.cli import FAILED, INTERRUPTED, report
from kvplane_service.cli.access import given_access
from kvplane_service.cli.child import ServiceChild
from kvplane_service.cli.engines import running
from kvplane_service.cli.pace import Pace
from kvplane_service.cli.progress import Extent, progress_of

_VIEW_INTERVAL_S = 0.2


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """A replay as it was asked for. `limit` None = the whole file; `address` "" = a service of its own."""

    file: Path
    plan: RunPlan
    limit: int | None = None
    address: str = ""
    speed: float = 0.0


def show_replay(options: ReplayOptions, as_json: bool) -> int:
    """Run, print the outcome, return the exit code: 0, 1 for a fault or disagreeing counts, 130 after Ctrl-C.

    Raises KvplaneError when the replay cannot begin or go on.
    """
    try:
        summary = run_replay(options, Console(stderr=True))
    except KeyboardInterrupt:
        print("kvplane replay: interrupted", file=sys.stderr)
        return INTERRUPTED
    if as_json:
        print(json.dumps(summary.as_json(), indent=2))
    else:
        print_outcome(summary)
    faults = [fault for fault in (summary.fault, *summary.disagreements()) if fault]
    for fault in faults:
        print(f"kvplane replay: {fault}", file=sys.stderr)
    return FAILED if faults else 0


def run_replay(options: ReplayOptions, console: Console) -> Summary:
    """Replay the file; progress goes to `console`. Raises KvplaneError when it cannot begin or go on."""
    with ExitStack() as stack:
        trace = stack.enter_context(TraceFile(options.file))
        address = options.address or stack.enter_context(ServiceChild()).address
        access = given_access() if options.address else PLAIN
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
    """The table, and who was refused."""
    console = Console()
    console.print(report.table(summary))
    for line in report.refusal_lines(summary):
        print(line)
