"""What split pages gain: requests that run at the same time, and prompt tokens that hit, with the planners reference
and split on equal memory; and their slack, the free blocks that have no key and that no state can use.

    python -m tests.bench.split             prints a table and writes tests/bench/results/split.md
    python -m tests.bench.split --requests 300 --no-write

Both come from the replay engine in process. *Running*: a backlog of prompts that share nothing, of 1,024 to 3,072
tokens with their output, so that the pool is always full; mean number of requests that run, after a third of all steps.
*CPU*: the median time of the core for a step of it, divided by the running requests, split / reference.
*Hits*: the multi-turn chat of `tests.bench.fine_hits`, where the reference plan has its `prefix_match_unit`.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

from kvplane.base.groups import MambaMode, Planner, ReplicaSpec
from kvplane.base.layers import Layer
from kvplane.base.sources import LayerSource
from kvplane.base.step import Part
from kvplane.v1 import allocation_pb2 as pb
from kvplane.wire.unary import encode_layer_source
from kvplane_core.face import loader
from kvplane_plan.models.catalogue import model_named
from kvplane_plan.models.shapes import ModelOptions
from kvplane_service.rpc.sources import plan_source
from kvplane_tools.replay.engine import Engine
from kvplane_tools.replay.plan import CostModel, EngineConfig
from kvplane_tools.replay.workloads import Span, TokenSource, TraceRequest
from tests.bench import fine_hits
from tests.bench.machine import machine_line
from tests.bench.policies import CoreSession

RESULTS = Path(__file__).parent / "results" / "split.md"
LENGTHS, OUTPUTS = (1024, 3072), (16, 128)
MEMORY_GIB = 20


def models() -> dict[str, tuple[tuple[Layer, ...], int]]:
    """Return the layers of each model, and the `prefix_match_unit` of its reference plan."""
    qwen = model_named("qwen3-next-80b").layers(ModelOptions(mamba_mode=MambaMode.ALIGN))
    layers = {"Qwen3-Next": (tuple(layer for layer in qwen if isinstance(layer, Layer)), 16)}
    return layers | {name: (one.layers(), one.prefix_match_unit) for name, one in fine_hits.MODELS.items()}


def spec_of(layers: tuple[Layer, ...], planner: Planner, memory_gib: int, unit: int) -> ReplicaSpec:
    """Return the spec that a service plans for these layers."""
    source = LayerSource(
        layers=layers,
        memory_bytes=memory_gib << 30,
        max_model_len=fine_hits.MOST_TOKENS + 2000,
        planner=planner,
        prefix_match_unit=0 if planner is Planner.SPLIT else unit,
    )
    request = pb.RegisterReplicaRequest(replica="bench", layers=encode_layer_source(source))
    return replace(plan_source(request).spec, events=False)


def backlog(count: int, seed: int) -> Iterator[TraceRequest]:
    """Yield prompts that share nothing."""
    rng = random.Random(seed)
    for number in range(count):
        total, output = rng.randint(*LENGTHS), rng.randint(*OUTPUTS)
        prompt = TokenSource((Span(number, 0, total - output),))
        answer = TokenSource((Span(number, 0, output, generated=True),))
        yield TraceRequest(f"request-{number}", 0.0, "", prompt, answer)


class Run:
    """A replay, with what was running and free of use for attention alone after each step."""

    def __init__(self, spec: ReplicaSpec, most_running: int) -> None:
        self.session = CoreSession(spec)
        self.engine = Engine(self.session, EngineConfig(max_running=most_running), CostModel())
        self.running: list[int] = []
        self.slack: list[float] = []
        self.cpu_us: list[float] = []  # of a step, by running request
        self.session.submit, self._submit = self._timed, self.session.submit  # type: ignore[method-assign]

    def _timed(self, *parts: Part) -> int:
        began = time.process_time_ns()
        seq = self._submit(*parts)
        self.cpu_us.append((time.process_time_ns() - began) / 1000 / max(1, self.engine.num_running))
        return seq

    def play(self, trace: Iterator[TraceRequest], most_queued: int) -> None:
        """Serve all requests of the trace."""
        engine, replica = self.engine, self.session.replica
        for request in trace:
            while engine.num_waiting + engine.num_running >= most_queued:
                engine.step()
                self.running.append(engine.num_running)
                self.slack.append(replica.block_counts.slack / replica.spec.num_blocks)
            engine.submit(request)
        assert not engine.refusals, engine.refusals[0]

    @property
    def preempted(self) -> int:
        """How many times a request was preempted."""
        return self.session.replica.counters.preempted


def running_requests(spec: ReplicaSpec, count: int, seed: int) -> Run:
    """Replay a backlog that is never empty."""
    run = Run(spec, most_running=4096)
    run.play(backlog(count, seed), most_queued=4096 if count > 4096 else count // 2)
    start = len(run.running) // 3
    run.running, run.slack, run.cpu_us = run.running[start:], run.slack[start:], run.cpu_us[start:]
    return run


def hits(spec: ReplicaSpec, turns: int, seed: int) -> Run:
    """Replay a multi-turn chat."""
    run = Run(spec, fine_hits.RUNNING)
    run.play(fine_hits.turns(turns, 0.3, seed), fine_hits.RUNNING)
    return run


def share(run: Run) -> float:
    """Return the percentage of the prompts' tokens that hit."""
    return 100 * run.engine.tally.hit_tokens / run.engine.tally.queried_tokens


def slack_of(run: Run) -> str:
    """Return the mean and the highest slack in percent of the pool."""
    return f"{100 * mean(run.slack):.1f} / {100 * max(run.slack):.1f}"


def main() -> None:
    """Measure every model and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--memory-gib", type=int, default=MEMORY_GIB)
    parser.add_argument("--models", nargs="*", default=[])
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    lines = [
        "| model | blocks per state | running: reference | split | gain | preempted | slack, mean / most % | CPU "
        "| hits: reference | split | slack, mean / most % |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, (layers, unit) in models().items():
        if options.models and name not in options.models:
            continue
        specs = [spec_of(layers, planner, options.memory_gib, unit) for planner in (Planner.REFERENCE, Planner.SPLIT)]
        full = [running_requests(spec, options.requests, options.seed) for spec in specs]
        chats = [hits(spec, options.turns, options.seed) for spec in specs]
        reference, split = (mean(run.running) for run in full)
        cells = [
            name,
            str(specs[1].blocks_per_state),
            f"{reference:.1f}",
            f"{split:.1f}",
            f"{split / reference - 1:+.1%}",
        ]
        cells += [f"{full[0].preempted} / {full[1].preempted}", slack_of(full[1])]
        cells.append(f"{median(full[1].cpu_us) / median(full[0].cpu_us):.2f}")
        cells += [f"{share(chats[0]):.1f}", f"{share(chats[1]):.1f}", slack_of(chats[1])]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    print("\n".join(lines))
    if not options.no_write:
        core = f"core {loader.describe()}"
        RESULTS.write_text("\n".join([__doc__.strip(), "", *lines, "", f"{machine_line()}, {core}", ""]))


if __name__ == "__main__":
    main()
