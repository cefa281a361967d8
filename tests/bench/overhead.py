"""Cost of observability: CPU time of decode steps of 256 requests with and without decision log, metrics and traces.

    python -m tests.bench.overhead              prints a table and writes tests/bench/results/overhead.{md,json}
    python -m tests.bench.overhead --pairs 4 --steps 50 --no-write

On and off alternate in one process, a few identical steps each, in alternating order, so that a machine of varying
speed affects both equally. The turns of `--steps` steps per side are a pair. Time is the CPU time of the whole process,
including the threads that deliver spans; the OTLP collector is another process. Python's garbage collector is
configured as in a service, and decisions are packed between turns, outside the measured time. The interval is a
bootstrap of the mean over pairs. gRPC is excluded; it would only reduce the shares.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from kvplane.base.groups import GroupKind, GroupSpec, ReplicaSpec
from kvplane.base.session import OpenRequest
from kvplane.base.step import Admit, End, Facts, News, Part, Run, Step
from kvplane_core.face.state import digest
from kvplane_service.config import Config
from kvplane_service.decisions.log import Entry
from kvplane_service.decisions.packed_log import LogBudget
from kvplane_service.replicas.host import ReplicaHost, new_replica
from kvplane_service.runtime import interpreter
from kvplane_service.telemetry.tracing import Tracing
from tests.bench.machine import machine_line

RESULTS = Path(__file__).parent / "results"
REQUESTS, PROMPT, PAIRS, STEPS = 256, 16, 100, 200  # 20,000 steps per side
TURN = 5  # steps per turn; odd, because blocks fill every sixteenth step
RESAMPLES, CONFIDENCE = 4000, 0.95
COLLECTOR = """
import sys
from tests.service.collector import collecting
with collecting() as (_, address):
    print(address, flush=True)
    sys.stdin.read()
"""


def forget(entry: Entry, packed: bytes | None = None) -> None:
    """Drop the entry."""
    del entry, packed


class Side:
    """A replica with one kind of observability."""

    def __init__(self, steps: int, watch: Callable[[ReplicaHost], None]) -> None:
        spec = ReplicaSpec(
            groups=(GroupSpec(GroupKind.FULL_ATTENTION, 16),),
            num_blocks=REQUESTS * (2 + (PROMPT + steps) // 16) + 1,
            max_model_len=PROMPT + steps + 1,
            hash_block_size=16,
            scheduler_block_size=16,
            max_in_flight_tokens=8192,
        )
        config = Config(max_rows_per_step=1 << 20)
        self._logs = LogBudget(config.log_bytes)
        self.host = ReplicaHost("r", new_replica(spec), config, time.monotonic_ns, logs=self._logs)
        self.num_packed = self.packing_ns = 0
        watch(self.host)
        self._opened = self.host.open(OpenRequest("r", nonce=1))
        self._seq = 0

    def begin(self) -> None:
        """Admit all requests."""
        slots = list(range(REQUESTS))
        self._step(Part(news=News(slots, [PROMPT] * REQUESTS), admit=Admit(slots)))

    def decode(self, steps: int) -> int:
        """Run `steps` decode steps, each with new lists as if decoded from the wire; returns CPU nanoseconds."""
        slots = range(REQUESTS)
        parts = [Part(facts=Facts([*slots], appended=[1] * REQUESTS), run=Run([*slots])) for _ in range(steps)]
        started = time.process_time_ns()
        while parts:
            self._step(parts.pop())
        took_ns = time.process_time_ns() - started
        self._pack()
        return took_ns

    def _pack(self) -> None:
        """Pack decisions, as a service does between its steps."""
        started = time.process_time_ns()
        self.num_packed += sum(1 for _ in self._logs.pack())
        self.packing_ns += time.process_time_ns() - started

    def end(self) -> None:
        """Free all requests."""
        self._step(Part(facts=Facts(list(range(REQUESTS)), end=[int(End.FREE)] * REQUESTS)))

    def _step(self, part: Part) -> None:
        self._seq += 1
        step = Step(self._opened.epoch, self._seq, [part], executed_through=self._seq - 1)
        self.host.step(1, step, b"")


def unwatched(host: ReplicaHost) -> None:
    """No decision log, and no reader of it."""
    host.decisions.append = forget  # type: ignore[method-assign]


def log_only(host: ReplicaHost) -> None:
    """Only the decision log."""
    host.decisions.unfollow(host.tally.add)


def always_on(host: ReplicaHost) -> None:
    """As in a service: decision log and metrics."""


@dataclass(frozen=True)
class Overhead:
    """Mean extra CPU time in percent, with the bounds of its interval. Packing between the steps is not included."""

    what: str
    percent: float
    low: float
    high: float
    off_us_per_step: float
    pairs: int
    steps: int
    packing_us: float = 0.0  # per decision


def measure(
    what: str, on: Callable[[ReplicaHost], None], off: Callable[[ReplicaHost], None], pairs: int, steps: int
) -> Overhead:
    """Measure alternating pairs; checks that both sides have equal states at the end."""
    sides = Side(steps, off), Side(steps, on)
    pair_of(sides, min(steps, 50))  # warm
    extra, off_ns = [], []
    for _ in range(pairs):
        off_took, on_took = pair_of(sides, steps)
        extra.append((on_took - off_took) / off_took * 100)
        off_ns.append(off_took / steps)
    assert digest(sides[0].host.replica) == digest(sides[1].host.replica)
    low, high = bootstrap(extra, random.Random(1))
    packing_us = sides[1].packing_ns / max(1, sides[1].num_packed) / 1000
    return Overhead(what, statistics.mean(extra), low, high, statistics.mean(off_ns) / 1000, pairs, steps, packing_us)


def pair_of(sides: tuple[Side, Side], steps: int) -> tuple[int, int]:
    """Let both sides decode `steps` steps in turns; returns the CPU nanoseconds of each."""
    took = [0, 0]
    for side in sides:
        side.begin()
    for turn, done in enumerate(range(0, steps, TURN)):
        for number in (0, 1) if turn % 2 else (1, 0):
            took[number] += sides[number].decode(min(TURN, steps - done))
    for side in sides:
        side.end()
    return took[0], took[1]


def bootstrap(values: list[float], source: random.Random) -> tuple[float, float]:
    """Confidence interval of the mean by bootstrap."""
    means = sorted(statistics.fmean(source.choices(values, k=len(values))) for _ in range(RESAMPLES))
    edge = int(RESAMPLES * (1 - CONFIDENCE) / 2)
    return means[edge], means[-edge - 1]


@contextmanager
def collector() -> Iterator[str]:
    """An OTLP collector in its own process; yields its address."""
    process = subprocess.Popen(
        [sys.executable, "-c", COLLECTOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def measure_all(pairs: int, steps: int) -> list[Overhead]:
    """Measure each part against the configuration to which it is added."""
    results = [
        measure("decision log", log_only, unwatched, pairs, steps),
        measure("metrics", always_on, log_only, pairs, steps),
    ]
    with collector() as address:
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://{address}"
        tracing = Tracing({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"})

        def traced(host: ReplicaHost) -> None:
            host.decisions.follow(tracing.follower(host.name))

        results.append(measure("traces at 1 %", traced, always_on, pairs, steps))
        tracing.shutdown()
    return results


def table(results: list[Overhead]) -> str:
    """The results as Markdown."""
    lines = [
        "# Cost of observability",
        "",
        machine_line(),
        "",
        f"CPU time of decode steps of {REQUESTS} requests in process, {results[0].pairs} pairs of "
        f"{results[0].steps} steps per side, in turns of {TURN}",
        "",
        "| added | extra CPU | 95 % interval | µs per step without it |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {one.what} | {one.percent:+.2f} % | {one.low:+.2f} to {one.high:+.2f} % | {one.off_us_per_step:.0f} |"
        for one in results
    ]
    lines += ["", "Decision log and metrics are always on; without a collector nothing is traced."]
    lines += [f"Packing a decision, between the steps, takes {results[-1].packing_us:.0f} µs."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of observability.")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    interpreter.tune()
    results = measure_all(arguments.pairs, arguments.steps)
    text = table(results)
    sys.stdout.write(text)
    if not arguments.no_write:
        (RESULTS / "overhead.md").write_text(text)
        (RESULTS / "overhead.json").write_text(json.dumps([asdict(one) for one in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
