"""CPU time of steps of a replica whose tiers save, move and load all the time, next to one without tiers.

    python -m tests.bench.tier_steps        prints the tables and writes tests/bench/results/tier_steps.md

The pool, the host tier and the logs of the service are full, so what a step takes is evicted, saved and moved, and
what it records replaces an older record; each job ends three steps after it was ordered. The ways of a ratio
alternate in one process, or in one service. `apply` is timed as in `tests.bench.cores`; the service is a process,
whose CPU time in all threads is read: that of the round that took least, since others disturb it, and the median of
the ratios of the rounds. Of the engine, the table has what its thread does for a step: the orders of a rank
(`Rank.carry_out`), and the jobs (`TierJobs.order`, `report`), whose ends come as two movers write them; both together
are compared with a rank without tiers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import kvplane
from kvplane.base.groups import GroupSpec, ReplicaSpec, TierKind, TierSpec
from kvplane.base.job_table import JobTable, job_table_bytes
from kvplane.base.stamp_table import StampTable, table_bytes
from kvplane.base.step import Admit, AdmitStatus, Cache, End, Facts, OnRefusal, Part, PartResult, RowFlag, Step
from kvplane.blocking.session import Session
from kvplane.rank import CallersMoves, Rank
from kvplane.tier_jobs import TierJobs
from kvplane_service.cli.child import ServiceChild
from kvplane_service.config import Config
from kvplane_service.core.interface import ReplicaCore
from kvplane_service.core.native import NativeReplica
from kvplane_service.process import gc_policy
from kvplane_service.replicas import cores
from tests.bench.cores import BLOCK, ONE, REQUESTS, SEVEN, TOKENS, begun, cpu_us, decode, news, spec
from tests.bench.machine import machine_line
from tests.bench.neighbour import cpu_ms

RESULTS = Path(__file__).parent / "results" / "tier_steps.md"
SHAPES = {"1 full": (ONE, 20_000), "1 full, 6 windows": (SEVEN, 80_000)}
WARM, STEPS = 256, 64  # steps until the demand of the admissions is forgotten, and those that are measured
FILL = Config().decision_log_steps  # steps until the logs of a service are full, and it takes no new memory
AT_ONCE = 4  # requests that are admitted in a step, so that not much is saved ahead
LATE = 3  # steps until a job ends
PROMPT, PROMPTS = 4096, 100  # tokens; prompts that return, more than the device holds
ROUNDS = 8  # of STEPS steps, of each replica of a service
DECODES, BETWEEN, MISSES, LOADS = (
    "256 decode, 16 fill a block",
    f"the same, between prompts of {PROMPT:,} tokens",
    f"a prompt of {PROMPT:,} tokens",
    f"256 decode, a prompt of {PROMPT:,} tokens returns",
)
KINDS = (DECODES, BETWEEN, MISSES, LOADS)
EVERY = 16  # steps from one of these prompts to the next
Apply = Callable[[Part], PartResult]


class Engine:
    """Drives one replica, whose movers end every job.

    Attributes:
        answer: to the last step.
        jobs: number of jobs that it ordered.
    """

    def __init__(self, num_blocks: int, has_tiers: bool, apply: Apply) -> None:
        self._apply, self._flags = apply, [int(RowFlag.LOAD)] if has_tiers else []
        self._jobs = deque[list[int]]([[] for _ in range(LATE)])
        self._admitted = deque[int]()
        self.answer, self.jobs, self.number, self.steps, self.lengths = PartResult(), 0, 0, 0, list[int]()
        slots = list(range(1000, 1000 + AT_ONCE))
        for number in range(2 * num_blocks // (len(slots) * TOKENS // BLOCK)):  # all blocks and slots of the host
            asked = news(slots, [TOKENS] * len(slots), name=number + 1)
            self.step(Part(news=asked, admit=Admit(slots, on_refusal=OnRefusal.SKIP)))
            self.step(Part(facts=Facts(slots, end=[End.FREE] * len(slots))))

    def step(self, part: Part) -> None:
        """Apply a step of one part."""
        if done := self._jobs.popleft():
            part.cache = Cache(jobs_done=array("Q", done))  # as a service reads it
        self.answer = self._apply(part)
        orders = self.answer.orders
        self._jobs.append([*orders.save_job, *orders.move_job, *dict.fromkeys(orders.load_job)])
        self.jobs = len(self._jobs[-1])

    def begin(self, kind: str) -> None:
        """Admit what decodes."""
        if kind == MISSES:
            return
        self.lengths = [TOKENS + slot % BLOCK for slot in range(REQUESTS)]
        for first in range(0, REQUESTS, AT_ONCE):
            slots = list(range(first, first + AT_ONCE))
            self.step(Part(news=news(slots, [self.lengths[slot] for slot in slots]), admit=Admit(slots)))
            assert set(self.answer.admit_status) == {AdmitStatus.GRANTED}

    def end(self) -> None:
        """End all requests, and all jobs."""
        slots = [*range(len(self.lengths)), *self._admitted]
        self.step(Part(facts=Facts(slots, end=[End.FREE] * len(slots))))
        for _ in range(2 * LATE):
            self.step(Part())
        self.lengths, self._admitted = [], deque()

    def next(self, kind: str) -> Part:
        """The part of the next step of this kind."""
        self.lengths = [length + 1 for length in self.lengths]
        self.steps += 1
        part = decode(self.lengths) if self.lengths else Part()
        if kind in (MISSES, LOADS) or (kind == BETWEEN and self.steps % EVERY == 0):
            slot, name = REQUESTS + self.number % 8, 5000 + (self.number if kind == MISSES else self.number % PROMPTS)
            part.news, part.admit = news([slot], [PROMPT + 1], name=name), Admit([slot], flags=self._flags[:])
            if len(self._admitted) > LATE:
                ended = self._admitted.popleft()
                part.facts = replace(
                    part.facts,
                    slot=array("I", [*part.facts.slot, ended]),
                    appended=array("I", [*part.facts.appended, 0]),
                    end=[*[End.NONE] * len(part.facts.slot), End.FREE],
                    num_hashes=array("I", [*part.facts.num_hashes, 0]) if part.facts.num_hashes else [],
                )
            self._admitted.append(slot)
            self.number += 1
        return part


class Timed:
    """Applies parts to a core, and notes the time of each."""

    def __init__(self, core: ReplicaCore) -> None:
        self.core, self.spent_us, self._seq = begun(core), 0.0, 0

    def __call__(self, part: Part) -> PartResult:
        self._seq += 1
        step, results = Step(1, self._seq, [part], executed_through=self._seq - 1), []
        self.spent_us = cpu_us(lambda: results.append(self.core.apply(step)))
        result: PartResult = results[0].parts[0]
        return result


def with_tiers(bare: ReplicaSpec) -> ReplicaSpec:
    """The same replica with a host tier of half its blocks, and a disk tier."""
    blocks = bare.num_blocks
    return replace(bare, tiers=(TierSpec(TierKind.HOST, blocks // 2), TierSpec(TierKind.DISK, 4 * blocks)))


def apply_times(groups: tuple[GroupSpec, ...], num_blocks: int) -> Iterator[list[list[float]]]:
    """For each kind, per step, the times of a compiled core without tiers and of one with them, and the jobs."""
    bare = spec(groups, num_blocks)
    cores = [Timed(NativeReplica(bare)), Timed(NativeReplica(with_tiers(bare)))]
    engines = [Engine(num_blocks, number > 0, core) for number, core in enumerate(cores)]
    for kind in KINDS:
        times = list[list[float]]()
        for engine in engines:
            engine.begin(kind)
        for at in range(WARM + STEPS):
            for engine in engines:
                engine.step(engine.next(kind))
            if at >= WARM:
                times.append([*(core.spent_us for core in cores), float(engines[1].jobs)])
        for engine in engines:
            engine.end()
        yield times
    counters = cores[1].core.tiers.counters
    assert min(counters.saved, counters.moved, counters.loads) > STEPS, counters


def service_times(groups: tuple[GroupSpec, ...], num_blocks: int) -> Iterator[list[tuple[float, float]]]:
    """For each kind, CPU time of a service per step, in us: without tiers and with them, per round."""
    bare = spec(groups, num_blocks)
    with ServiceChild() as service, kvplane.connect(service.address) as client:
        client.register_replica("bare", bare)
        client.register_replica("tiers", with_tiers(bare), namespace_digest=b"w" * 32)
        with client.session("bare") as one, client.session("tiers") as other:
            engines = [Engine(num_blocks, session is other, partial(answered, session)) for session in (one, other)]
            for engine in engines:
                for _ in range(FILL):
                    engine.step(engine.next(MISSES))
                engine.end()
            for kind in KINDS:
                for engine in engines:
                    engine.begin(kind)
                    for _ in range(WARM):
                        engine.step(engine.next(kind))
                rounds = list[tuple[float, float]]()
                for _ in range(ROUNDS):
                    spent = []
                    for engine in engines:
                        began = cpu_ms(service.pid)
                        for _ in range(STEPS):
                            engine.step(engine.next(kind))
                        spent.append((cpu_ms(service.pid) - began) / STEPS * 1000)
                    rounds.append((spent[0], spent[1]))
                for engine in engines:
                    engine.end()
                yield rounds


def answered(session: Session, part: Part) -> PartResult:
    """The answer to a step of one part."""
    return session.apply(part).parts[0]


def rank_times(groups: tuple[GroupSpec, ...], num_blocks: int) -> Iterator[list[tuple[float, float, float]]]:
    """For each kind, per step, what an engine's thread does, in us: the orders of a rank without tiers, with tiers, and
    the jobs.
    """
    bare = spec(groups, num_blocks)
    tiered = with_tiers(bare)
    engines = [Engine(num_blocks, one is tiered, Timed(NativeReplica(one))) for one in (bare, tiered)]
    size = tiered.num_stamps
    ranks, seq = list[Rank](), 0
    for _ in engines:
        stamps = StampTable.create(bytearray(table_bytes(size)), size, incarnation=1)
        ranks.append(Rank(stamps, CallersMoves(len(groups))))
        ranks[-1].claim(1)
    table = JobTable.create(bytearray(job_table_bytes(1 << 16)), 1 << 16)
    jobs = TierJobs([table])
    table.begin_life(1)
    jobs.begin(1, ())
    for kind in KINDS:
        times = list[tuple[float, float, float]]()
        for engine in engines:
            engine.begin(kind)
        for at in range(WARM + STEPS):
            row, seq = [], seq + 1
            for engine, rank in zip(engines, ranks, strict=True):
                engine.step(engine.next(kind))
                orders = engine.answer.orders
                row.append(cpu_us(lambda: rank.carry_out(1, seq, 0, orders)))  # noqa: B023
                rank.executed(seq)
            began = time.process_time_ns()
            jobs.order(seq, 0, engines[1].answer)
            jobs.report(Cache(), seq)
            row.append((time.process_time_ns() - began) / 1000)
            for some in table.take():  # in two portions, as of two threads
                numbers = list(dict.fromkeys(one.job for one in some))
                half = len(numbers) // 2
                for part in filter(None, (numbers[:half], numbers[half:])):
                    table.end(part[0], True, len(part))
            if at >= WARM:
                times.append((row[0], row[1], row[2]))
        for engine in engines:
            engine.end()
        yield times


def rows() -> Iterator[str]:
    """The tables."""
    yield "| groups | step | jobs | apply, no tiers, us | apply, us | tiers / no tiers |"
    yield "|---|---|---|---|---|---|"
    for name, (groups, num_blocks) in SHAPES.items():
        for kind, times in zip(KINDS, apply_times(groups, num_blocks), strict=True):
            bare, tiers, jobs = (statistics.median(column) for column in zip(*times, strict=True))
            ratio = statistics.median(tiers / bare for bare, tiers, _ in times)
            yield f"| {name} | {kind} | {jobs:,.0f} | {bare:,.0f} | {tiers:,.0f} | {ratio:.2f} |"
    yield "\n| groups | step | service, no tiers, us | service, us | tiers / no tiers (goal 1.1) | median of rounds |"
    yield "|---|---|---|---|---|---|"
    for name, (groups, num_blocks) in SHAPES.items():
        for kind, rounds in zip(KINDS, service_times(groups, num_blocks), strict=True):
            bare, tiers = (min(column) for column in zip(*rounds, strict=True))
            ratio = statistics.median(tiers / bare for bare, tiers in rounds)
            yield f"| {name} | {kind} | {bare:,.0f} | {tiers:,.0f} | {tiers / bare:.2f} | {ratio:.2f} |"
    yield "\n| groups | step | rank, no tiers, us | rank, us | jobs, us | rank and jobs / rank, no tiers (goal 1.1) |"
    yield "|---|---|---|---|---|---|"
    for name, (groups, num_blocks) in SHAPES.items():
        for kind, of_engine in zip(KINDS, rank_times(groups, num_blocks), strict=True):
            bare, tiers, jobs = (statistics.median(column) for column in zip(*of_engine, strict=True))
            ratio = statistics.median((tiers + jobs) / bare for bare, tiers, jobs in of_engine)
            yield f"| {name} | {kind} | {bare:,.1f} | {tiers:,.1f} | {jobs:,.1f} | {ratio:.2f} |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    if (core := cores.describe()) != "native":
        parser.error(f"the service would use another core than `apply` is timed of: {core}")
    gc_policy.apply()
    lines = ["# Steps of a replica with tiers", "", machine_line(), ""]
    for line in rows():
        print(line, flush=True)
        lines.append(line)
    if not arguments.no_write:
        RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
