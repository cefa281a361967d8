"""Run `kvplane demo`: a service in a child process, one engine thread per model, a live view, and a comparison."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

from rich.console import Console
from rich.live import Live

from kvplane.blocking.client import connect
from kvplane_tools.cli.child import ServiceChild
from kvplane_tools.cli.options import FAILED, INTERRUPTED
from kvplane_tools.cli.replay.compare import compare, comparison, conclusion, question
from kvplane_tools.cli.replay.engines import Engines, Pace, running
from kvplane_tools.cli.replay.report import summary_lines
from kvplane_tools.cli.views.panels import View, line, picture
from kvplane_tools.cli.views.samples import Sample, Sampler
from kvplane_tools.replay.plan import CostModel, EngineConfig, RunPlan
from kvplane_tools.replay.run import ReplayRun
from kvplane_tools.replay.summary import Summary
from kvplane_tools.replay.workloads import ChatShape, TraceRequest, chat_workload

MAX_MODEL_LEN = 4096
NUM_REQUESTS = 200
_VIEW_INTERVAL_S = 0.25
_VIEW_SPEED = 1.5  # virtual seconds per second of the live view, so that it lasts half a minute; elsewhere: full speed
_LINE_INTERVAL_S = 2.0
_PICTURE_AT = 0.6  # share of the requests that are completed in the picture

_ENGINE = EngineConfig(max_running=64, token_budget=2048)
_COST = CostModel(prefill_tokens_per_second=20_000, decode_step_us=40_000)
_SHAPE = ChatShape(max_model_len=MAX_MODEL_LEN, num_sessions=80, sessions_per_s=5.0)


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A model of the demo, with a block pool slightly too small for its traffic, so that evictions and preemptions
    occur.
    """

    name: str
    pool_blocks: int
    tensor_parallel: int = 1

    def plan(self) -> RunPlan:
        """Return the plan of the model's run. Cache events are on, so that the engine counts evictions too."""
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
    """Yield the requests of the demo, which are equal for every model."""
    return islice(chat_workload(Random(seed), _SHAPE), NUM_REQUESTS)


def show_demo(seed: int, plain: bool, svg: Path | None, stays: bool) -> int:
    """Run the demo and return the exit code: 0; 1 if the counts of engine and service disagree, or if no hit, no
    eviction, no preemption or no completed request occurred; 130 after Ctrl-C before the last table.

    `stays`: serve until Ctrl-C after it.
    """
    console = Console()
    try:
        summaries = run_demo(seed, console, plain or not console.is_terminal, svg, stays)
    except KeyboardInterrupt:
        print("kvplane demo: interrupted", file=sys.stderr)
        return INTERRUPTED
    faults = [f"{summary.model}: {fault}" for summary in summaries for fault in complaints(summary)]
    for fault in faults:
        print(f"kvplane demo: {fault}", file=sys.stderr)
    return FAILED if faults else 0


def run_demo(seed: int, console: Console, plain: bool, svg: Path | None, stays: bool) -> list[Summary]:
    """Start a service, run all models, print what they did, compare kinds of caches, stop the service, and return the
    summaries of the first runs. Raises the error of a failed engine. The replicas are there until the end.
    """
    with ExitStack() as stack:
        print(f"starting a service and {len(MODELS)} engines, {NUM_REQUESTS} requests each", flush=True)
        service = stack.enter_context(ServiceChild(with_page=True))
        client = stack.enter_context(connect(service.address))
        invitation = _invitation(service, seed)
        print(f"the service listens on {service.address}; in another terminal, while this runs:", *invitation, sep="\n")
        sys.stdout.flush()
        runs = [stack.enter_context(ReplayRun(client, one.plan(), one.name, workload(seed))) for one in MODELS]
        samplers = [Sampler(model.name, run) for model, run in zip(MODELS, runs, strict=True)]
        pace = Pace(0.0 if plain else _VIEW_SPEED)
        with (
            running(runs, lambda run: pace.hold(run.fleet.clock_ns)) as engines,
            _lines(console) if plain else _live(console) as show,
        ):
            _watch(engines, samplers, show, svg)
        summaries = [run.summary("demo") for run in runs]
        print("", *summary_lines(summaries), "", sep="\n")
        print(question(), flush=True)
        outcomes = compare(client, seed)
        print("", comparison(outcomes), "", *conclusion(outcomes), sep="\n", flush=True)
        if stays:
            print("", "the service runs until Ctrl-C; in another terminal:", *invitation, sep="\n", flush=True)
            with suppress(KeyboardInterrupt):
                while True:
                    time.sleep(_VIEW_INTERVAL_S)
        return summaries


def _invitation(service: ServiceChild, seed: int) -> list[str]:
    """Return what to try in another terminal while the demo runs, and its status page."""
    typed = sys.argv[0]  # a path, if the command was not found on PATH
    command = typed if Path(typed).name == "kvplane" and typed != shutil.which("kvplane") else "kvplane"
    request = next(one for one in workload(seed) if one.name.endswith("/1"))  # its first turn is in the cache
    model = MODELS[2].name
    tried = ("top", f"describe {model}", f"explain {model} --request {request.name}")
    lines = [f"    {command} {words} --service {service.address}" for words in tried]
    return [*lines, f"    or open the status page: {service.page}"]


Show = Callable[[list[Sample], bool], None]  # draws samples; the second argument is True for the last samples


def _watch(engines: Engines, samplers: Sequence[Sampler], show: Show, svg: Path | None) -> None:
    """Sample the counters and draw them until the engines have ended, then once more."""
    is_over = False
    while not is_over:
        is_over = engines.wait(_VIEW_INTERVAL_S)
        samples = [sampler.sample(time.monotonic()) for sampler in samplers]
        show(samples, is_over)
        completed = sum(one.progress.completed for one in samples)
        if svg is not None and completed >= _PICTURE_AT * NUM_REQUESTS * len(MODELS):
            svg.write_text(picture(samples, "kvplane demo"), encoding="utf-8")
            svg = None


@contextmanager
def _live(console: Console) -> Iterator[Show]:
    """Yield a function that draws panels, always in the same place of the terminal."""
    with Live(console=console, auto_refresh=False) as live:
        yield lambda samples, _: live.update(View(samples), refresh=True)


@contextmanager
def _lines(console: Console) -> Iterator[Show]:
    """Yield a function that prints one line per model, every `_LINE_INTERVAL_S` seconds and at the end."""
    due_s = 0.0

    def show(samples: list[Sample], is_last: bool) -> None:
        nonlocal due_s
        if time.monotonic() >= due_s or is_last:
            due_s = time.monotonic() + _LINE_INTERVAL_S
            for sample in samples:
                print(line(sample), flush=True)

    yield show


def complaints(summary: Summary) -> list[str]:
    """Return the faults of one model's run: counts on which engine and service disagree, and each of hits, evictions,
    preemptions and completed requests that did not occur.
    """
    counts = summary.counts
    seen = {
        "hit": counts.hit_tokens,
        "eviction": counts.evicted,
        "preemption": counts.preempted,
        "completed request": summary.completed,
    }
    return summary.disagreements() + [f"no {what} occurred" for what, number in seen.items() if not number]
