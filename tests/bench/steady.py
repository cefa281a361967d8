"""The steady state: a pool full of cached blocks, events on, steps in flight. CPU time of steps in process.

    python -m tests.bench.steady                 prints the tables and writes tests/bench/results/steady.{md,json}
    python -m tests.bench.steady --rounds 3 --models Llama-3.1-70B --no-write

Several ways to run the same steps alternate in one process, the steps of one block each, so that a machine of varying
speed affects all equally. A step is `ReplicaHost.step`: validation, core, decision log, metrics, publication. A plain
Python loop is measured as a reference. In a full pool every new block evicts a cached one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kvplane.base.groups import ReplicaSpec
from kvplane.base.session import OpenRequest
from kvplane.base.step import Admit, Budget, End, Facts, News, Part, Run, Step
from kvplane_service.config import Config
from kvplane_service.decisions.packed_log import LogBudget
from kvplane_service.replicas.host import ReplicaHost, new_replica
from kvplane_service.runtime import interpreter
from tests.bench.machine import machine, machine_line
from tests.bench.peer.models import MODELS, Model
from tests.core.specification import specification_of

RESULTS = Path(__file__).parent / "results"
ROUNDS, REQUESTS, PROMPT, LONG, CHUNK = 9, 256, 1100, 32_768, 8192
DECODE, PHASE, PREFILL = "decode 256", "decode 256, rows in phase", "prefill 8192"
LOADS = (DECODE, PHASE, PREFILL)
LOOP = 20_000  # iterations of the reference loop


@dataclass(frozen=True)
class Way:
    """How steps run: in a full pool or one that never fills, events on or off, number of steps in flight."""

    full: bool
    events: bool
    in_flight: int

    def __str__(self) -> str:
        pool, events = "full" if self.full else "empty", "on" if self.events else "off"
        return f"{pool} pool, events {events}, {self.in_flight} in flight"


WAYS = (
    Way(False, False, 0),
    Way(True, False, 0),
    Way(True, False, 1),
    Way(True, False, 3),
    Way(True, True, 0),
    Way(True, True, 1),
    Way(True, True, 3),
)


class Side:
    """A replica that runs one load in one way."""

    def __init__(self, model: Model, load: str, way: Way, rounds: int) -> None:
        shape = model.shape
        self.unit, self._load, self._way = shape.unit, load, way
        self._chunk = CHUNK // self.unit * self.unit
        self._long = LONG // self._chunk * self._chunk
        held, grown = self._blocks(shape.num_groups, rounds)
        num_blocks = held + grown
        spec: ReplicaSpec = replace(model.spec(num_blocks), events=way.events, max_in_flight_tokens=1 << 17)
        self._size = spec.hash_block_size
        config = Config(max_rows_per_step=1 << 20)
        self._logs = LogBudget(config.log_bytes)
        self.host = ReplicaHost("r", new_replica(spec), config, time.monotonic_ns, logs=self._logs)
        self._epoch = self.host.open(OpenRequest("r", nonce=1)).epoch
        self._seq = self._done = self._computed = 0
        if way.full:
            self._fill()
        if load != PREFILL:
            self._admit()
            self.turn()  # releases blocks behind windows
        if way.full:  # blocks without a key would be allocated first
            state = specification_of(self.host.replica)
            state.coordinator.pool.reserve(self.host.replica.block_counts.empty)
            state.coordinator.pool.stamped.clear()  # no process holds these pages
            self.host.replica.adopt(state)

    def _blocks(self, num_groups: int, rounds: int) -> tuple[int, int]:
        """Blocks that the requests hold concurrently, and blocks that they allocate over all rounds, with a margin."""
        if self._load == PREFILL:
            prompt = num_groups * (self._long // self.unit + 2)
            return 64 + 2 * prompt, prompt * (1 if self._way.full else rounds + 3)
        held = 64 + REQUESTS * num_groups * (-(-PROMPT // self.unit) + 2)
        return held, 3 * REQUESTS * num_groups * (rounds + 3)

    def _fill(self) -> None:
        """Serve prompts until every free block that can have a key has one."""
        counts, before, tokens = self.host.replica.block_counts, -1, self._chunk
        while counts.cached != before or counts.cached < counts.empty:
            before = counts.cached
            for _ in range((counts.cached + counts.empty) // (tokens // self.unit) + 1):
                self._send(Part(news=self._news([0], [tokens]), admit=Admit([0])))
                self._send(Part(facts=Facts([0], end=[int(End.FREE)])))
            counts = self.host.replica.block_counts

    def _admit(self) -> None:
        spread = self.unit if self._load == DECODE else 1
        self._tokens = [PROMPT // self.unit * self.unit + slot % spread for slot in range(REQUESTS)]
        self._slots = list(range(REQUESTS))
        for slot in self._slots:
            self._send(Part(news=self._news([slot], [self._tokens[slot]]), admit=Admit([slot])))

    @property
    def evicted(self) -> int:
        """Number of keys evicted by new blocks."""
        return sum(group.evicted_blocks for group in self.host.replica.group_counters())

    def turn(self) -> list[int]:
        """CPU nanoseconds of each step of a turn, in which every decoding request fills one block."""
        parts = self._prefill() if self._load == PREFILL else self._decode()
        return [self._send(part) for part in parts]

    def _decode(self) -> Iterator[Part]:
        for _ in range(self.unit):
            self._tokens = [tokens + 1 for tokens in self._tokens]
            counts = [int(tokens % self._size == 0) for tokens in self._tokens]
            facts = Facts(self._slots[:], appended=[1] * REQUESTS, num_hashes=counts, hashes=_digests(sum(counts)))
            yield Part(facts=facts, run=Run(slot=self._slots[:]))

    def _prefill(self) -> Iterator[Part]:
        """A prompt in chunks; the previous one ends."""
        facts = Facts([0], end=[int(End.FREE)]) if self._computed else Facts()
        self._computed = self._long
        budget, cap = Budget(tokens=self._chunk), [self._chunk]
        yield Part(facts=facts, news=self._news([0], [self._long]), admit=Admit([0], cap=cap), budget=budget)
        for _ in range(self._long // self._chunk - 1):
            yield Part(run=Run([0], cap=cap), budget=budget)

    def _news(self, slots: list[int], num_tokens: list[int]) -> News:
        counts = [tokens // self._size for tokens in num_tokens]
        return News(slots, num_tokens, num_hashes=counts, hashes=_digests(sum(counts)))

    def _send(self, part: Part) -> int:
        self._seq += 1
        self._done = max(self._done, self._seq - 1 - self._way.in_flight)
        step = Step(self._epoch, self._seq, [part], executed_through=self._done)
        started = time.thread_time_ns()
        result = self.host.step(1, step, b"")
        took = time.thread_time_ns() - started
        for _ in self._logs.pack():  # as a service does between its steps
            pass
        granted = sum(result.parts[0].granted) + sum(result.parts[0].admit_granted)
        assert granted or part.facts.end, f"{self._load}, {self._way}: step {self._seq} was granted nothing"
        return took


def _digests(count: int) -> bytes:
    return os.urandom(32 * count)


def _loop() -> int:
    started, total = time.thread_time_ns(), 0
    for number in range(LOOP):
        total += number
    return time.thread_time_ns() - started


@dataclass(frozen=True)
class Cell:
    """Results of one way, µs over the rounds: median and minimum of a turn's mean step, median of its longest step."""

    model: str
    groups: int
    load: str
    way: str
    median: float
    least: float
    longest: float


def measure(model: Model, load: str, rounds: int) -> tuple[list[Cell], list[int]]:
    """All ways in turns; also the times of the reference loop."""
    sides = [(way, Side(model, load, way, rounds)) for way in WAYS]
    means: dict[Way, list[float]] = {way: [] for way in WAYS}
    longest: dict[Way, list[float]] = {way: [] for way in WAYS}
    loops, before = list[int](), [side.evicted for _, side in sides]
    for number in range(rounds + 1):
        first = number % len(sides)
        for way, side in sides[first:] + sides[:first]:
            took = side.turn()
            if number:  # the first is a warm-up
                means[way].append(statistics.fmean(took) / 1000)
                longest[way].append(max(took) / 1000)
        loops.append(_loop())
    evicted = [side.evicted - before for (_, side), before in zip(sides, before, strict=True)]
    assert [count > 0 for count in evicted] == [way.full for way in WAYS], f"{model.name}, {load}: {evicted} evictions"
    same = {(way.full, way.in_flight): count for way, count in zip(WAYS, evicted, strict=True) if way.events}
    assert all(same.get((way.full, way.in_flight), count) == count for way, count in zip(WAYS, evicted, strict=True))
    groups = model.num_groups
    return [
        Cell(model.name, groups, load, str(way), statistics.median(means[way]), min(means[way]),
             statistics.median(longest[way]))
        for way in WAYS
    ], loops  # fmt: skip


RATIOS = {
    "three in flight / none": (Way(True, True, 3), Way(True, True, 0), 1.3),
    "events on / off, none in flight": (Way(True, True, 0), Way(True, False, 0), 2.0),
    "events on / off, three in flight": (Way(True, True, 3), Way(True, False, 3), 2.0),
    "full / empty pool, events off": (Way(True, False, 0), Way(False, False, 0), 2.0),
}


def report(cells: list[Cell], loops: list[int], command: str) -> str:
    """The results as Markdown."""
    lines = ["# The steady state", "", machine_line(), "", f"`{command}`; CPU time per step in µs, by the minimum (and"]
    lines[-1] += f" median) of the rounds. A loop of {LOOP} additions for reference: {min(loops) / 1000:.0f}"
    lines[-1] += f" ({statistics.median(loops) / 1000:.0f}) µs."
    by = {(cell.model, cell.load, cell.way): cell for cell in cells}
    cases = list(dict.fromkeys((cell.model, cell.groups, cell.load) for cell in cells))
    for title, row in (("Steps", _step_row), ("Ratios of the minima, and what they may be", _ratio_row)):
        names = [str(way) for way in WAYS] if row is _step_row else [f"{n} (≤ {r[2]})" for n, r in RATIOS.items()]
        lines += [
            "",
            f"## {title}",
            "",
            f"| model | groups | load | {' | '.join(names)} |",
            "|---" * (len(names) + 3) + "|",
        ]
        for model, groups, load in cases:
            lines.append(f"| {model} | {groups} | {load} | {' | '.join(row(by, model, load))} |")
    lines += [
        "",
        "## The longest step of a turn, median of the rounds",
        "",
        f"| model | load | {' | '.join(map(str, WAYS))} |",
    ]
    lines.append("|---" * (len(WAYS) + 2) + "|")
    for model, _, load in cases:
        lines.append(f"| {model} | {load} | {' | '.join(f'{by[model, load, str(way)].longest:.0f}' for way in WAYS)} |")
    return "\n".join(lines) + "\n"


def _step_row(by: dict[tuple[str, str, str], Cell], model: str, load: str) -> list[str]:
    found = (by[model, load, str(way)] for way in WAYS)
    return [f"{cell.least:.0f} ({cell.median:.0f})" for cell in found]


def _ratio_row(by: dict[tuple[str, str, str], Cell], model: str, load: str) -> list[str]:
    cells = []
    for one, other, most in RATIOS.values():
        ratio = by[model, load, str(one)].least / by[model, load, str(other)].least
        cells.append(f"{ratio:.2f}" if ratio <= most else f"**{ratio:.2f}**")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps in the steady state.")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--models", nargs="*", default=[model.name for model in MODELS])
    parser.add_argument("--loads", nargs="*", default=list(LOADS))
    parser.add_argument("--no-write", action="store_true")
    given = parser.parse_args()
    interpreter.tune()
    cells, loops = list[Cell](), list[int]()
    for model in (model for model in MODELS if model.name in given.models):
        for load in given.loads:
            new_cells, new_loops = measure(model, load, given.rounds)
            cells, loops = cells + new_cells, loops + new_loops
            print(f"{model.name}, {load}: measured", file=sys.stderr, flush=True)
    command = f"python -m tests.bench.steady --rounds {given.rounds}"
    text = report(cells, loops, command)
    sys.stdout.write(text)
    if not given.no_write:
        data = {"machine": machine(), "command": command, "loop_ns": loops, "cells": [vars(cell) for cell in cells]}
        (RESULTS / "steady.md").write_text(text, encoding="utf-8")
        (RESULTS / "steady.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
