"""The demo: a service in a child process, an engine per model in a thread of its own, and the view of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

from rich.console import Console
from rich.live import Live

from kvplane.unary import connect
from kvplane_replay import CostModel, EngineConfig
from kvplane_replay.run import ReplayRun, RunPlan
from kvplane_replay.summary import Summary
from kvplane_replay.workloads import ChatShape, TraceRequest, chat_workload
from kvplane_service.cli import FAILED, INTERRUPTED
from kvplane_service.cli.child import ServiceChild
from kvplane_service.cli.engines import Engines, running
from kvplane_service.cli.live import View, line, picture
from kvplane_service.cli.pace import Pace
from kvplane_service.cli.watch import Look, Watcher

MAX_MODEL_LEN = 4096
NUM_REQUESTS = 300
_VIEW_INTERVAL_S = 0.25
_VIEW_SPEED = 4.0  # virtual seconds per second, for who watches; without a terminal it goes as fast as it can
_LINE_INTERVAL_S = 2.0
_PICTURE_AT = 0.6  # of the requests

_ENGINE = EngineConfig(max_running=64, token_budget=2048)
_COST = CostModel(prefill_tokens_per_second=20_000, decode_step_us=40_000)
_SHAPE = ChatShape(max_model_len=MAX_MODEL_LEN, num_sessions=80, sessions_per_s=5.0)


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A model and a pool that is a little too small for its traffic, so that everything happens."""

    name: str
    pool_blocks: int
    tensor_parallel: int = 1

    def plan(self) -> RunPlan:
        """Cache events are on: the engines count evictions too."""
        return RunPlan(
            model=self.name,
            tensor_parallel=self.tensor_parallel,
            pool_blocks=self.pool_blocks,
            max_model_len=MAX_MODEL_LEN,
            engine=_ENGINE,
            cost=_COST,
            with_events=True,
        )


MODELS = (
    DemoModel("llama-3.1-70b", 1400, tensor_parallel=4),
    DemoModel("gpt-oss-120b", 1300),
    DemoModel("gemma-3-27b", 6000),
    DemoModel("jamba-v0.1", 800),
)


def workload(seed: int) -> Iterator[TraceRequest]:
    """The same traffic for every model."""
    return islice(chat_workload(Random(seed), _SHAPE), NUM_REQUESTS)


def show_demo(seed: int, plain: bool, svg: Path | None) -> int:
    """Run it; returns the exit code: 0, 1 when a count disagrees or nothing was shown, 130 after Ctrl-C."""
    console = Console()
    try:
        summaries = run_demo(seed, console, plain or not console.is_terminal, svg)
    except KeyboardInterrupt:
        print("kvplane demo: interrupted", file=sys.stderr)
        return INTERRUPTED
    faults = [f"{summary.model}: {fault}" for summary in summaries for fault in complaints(summary)]
    for fault in faults:
        print(f"kvplane demo: {fault}", file=sys.stderr)
    print(summary_line(summaries))
    return FAILED if faults else 0


def run_demo(seed: int, console: Console, plain: bool, svg: Path | None) -> list[Summary]:
    """Start a service, run all models, end the service. Raises what went wrong in an engine."""
    with ExitStack() as stack:
        console.print("starting the service", highlight=False)
        client = stack.enter_context(connect(stack.enter_context(ServiceChild()).address))
        runs = [stack.enter_context(ReplayRun(client, model.plan(), model.name, workload(seed))) for model in MODELS]
        watchers = [Watcher(model.name, run) for model, run in zip(MODELS, runs, strict=True)]
        pace = Pace(0.0 if plain else _VIEW_SPEED)
        with (
            running(runs, lambda run: pace.hold(run.fleet.clock_ns)) as engines,
            _lines(console) if plain else _live(console) as show,
        ):
            _watch(engines, watchers, show, svg)
        return [run.summary("demo") for run in runs]


Show = Callable[[list[Look], bool], None]  # what was seen, and whether it is the last time


def _watch(engines: Engines, watchers: Sequence[Watcher], show: Show, svg: Path | None) -> None:
    """Look and show until the engines are done, and once more."""
    is_over = False
    while not is_over:
        is_over = engines.wait(_VIEW_INTERVAL_S)
        looks = [watcher.look(time.monotonic()) for watcher in watchers]
        show(looks, is_over)
        if svg is not None and sum(look.completed for look in looks) >= _PICTURE_AT * NUM_REQUESTS * len(MODELS):
            svg.write_text(picture(looks, "kvplane demo"), encoding="utf-8")
            svg = None


@contextmanager
def _live(console: Console) -> Iterator[Show]:
    """The panels, redrawn in place."""
    with Live(console=console, auto_refresh=False) as live:
        yield lambda looks, _: live.update(View(looks), refresh=True)


@contextmanager
def _lines(console: Console) -> Iterator[Show]:
    """A line per model now and then."""
    due_s = 0.0

    def show(looks: list[Look], is_last: bool) -> None:
        nonlocal due_s
        if time.monotonic() >= due_s or is_last:
            due_s = time.monotonic() + _LINE_INTERVAL_S
            for look in looks:
                print(line(look), flush=True)

    yield show


def complaints(summary: Summary) -> list[str]:
    """What is wrong with the outcome for one model: counts that disagree, or a thing to be seen that was not."""
    counts = summary.counts
    seen = {
        "hit": counts.hit_tokens,
        "eviction": summary.evicted,
        "preemption": counts.preempted,
        "completed request": summary.completed,
    }
    return summary.disagreements() + [f"no {what} was seen" for what, number in seen.items() if not number]


def summary_line(summaries: Sequence[Summary]) -> str:
    """All models in one line; the service's numbers."""
    parts = []
    for summary in summaries:
        counts = summary.counts
        parts.append(
            f"{summary.model}: {summary.completed:,} requests, {counts.hit_tokens:,} hit tokens "
            f"({summary.hit_share:.0%}), {summary.evicted:,} evictions, {counts.preempted:,} preemptions, "
            f"{counts.steps:,} steps"
        )
    return " | ".join(parts)
