"""Figures in process: nanoseconds per block operation, microseconds per decode step of 256 requests.

    python -m tests.bench            prints a table and writes tests/bench/results/in_process.{md,json}

The pool of the decode steps is not full and nothing is in flight; `tests.bench.steady` has the normal case.

Ours and an object-per-block pool take turns in one run, so that a noisy machine hits both; medians over the rounds. No
time is a promise, the ratios are what can be compared.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from kvplane.base.groups import GroupKind, GroupSpec, MambaMode, ReplicaSpec
from kvplane.base.step import Admit, Facts, News, Part, Run, Step
from kvplane_core.face.cache_events import CacheEvents
from kvplane_core.spec.pool import BlockPool
from kvplane_core.spec.replica import Replica
from tests.bench.machine import machine, machine_line
from tests.bench.objects import ObjectDecoder, ObjectPool

RESULTS = Path(__file__).parent / "results"
ROUNDS, BATCH, REQUESTS, STEPS, PROMPT = 15, 2048, 256, 48, 1100
FULL = GroupSpec(GroupKind.FULL_ATTENTION, 16)
WINDOW = GroupSpec(GroupKind.SLIDING_WINDOW, 16, window=1024, lookup_class=1)
STATE = GroupSpec(GroupKind.MAMBA, 80, mamba_mode=MambaMode.ALIGN, lookup_class=1)
NOTE = """\
A block cycle is allocate with eviction, register, release, find, touch, release; kvplane also stamps the page, keeps
ages and emits each eviction. A decode step is `Replica.apply` with validation, events, orders and answer for 256
requests; the objects only grow tables and register keys."""
MODELS = {
    "1 group (full)": (FULL,),
    "7 groups (6 windows, full)": (*[WINDOW] * 6, FULL),
    "8 groups (7 states, full)": (*[STATE] * 7, GroupSpec(GroupKind.FULL_ATTENTION, 80)),
}


def cycle_ours(pool: BlockPool, keys: list[bytes]) -> None:
    """Per block: allocate (evicting), register, release, find, touch, release."""
    blocks = pool.take(len(keys))
    for block, digest in zip(blocks, keys, strict=True):
        pool.register(block, ("", 0, digest), 16)
    pool.release(blocks)
    found = [(pool.find("", (0,), digest) or [0])[0] for digest in keys]
    pool.touch(found)
    pool.release(found)
    pool.registered.clear()
    pool.events = CacheEvents()
    pool.stamped.clear()


def cycle_objects(pool: ObjectPool, keys: list[bytes]) -> None:
    """The same operations on objects."""
    blocks = pool.take(len(keys))
    for block, digest in zip(blocks, keys, strict=True):
        pool.register(block, digest)
    pool.release(blocks)
    found = [block for block in map(pool.find, keys) if block is not None]
    pool.touch(found)
    pool.release(found)


class Decoder:
    """256 running requests of one replica, a token each per step."""

    def __init__(self, groups: tuple[GroupSpec, ...]) -> None:
        self.size = groups[-1].block_size
        self.replica = Replica(ReplicaSpec(groups, 250_000, 8192, self.size, self.size, 100_000))
        self.tokens = [PROMPT + n % self.size for n in range(REQUESTS)]
        self.slots = list(range(REQUESTS))
        counts = [tokens // self.size for tokens in self.tokens]
        news = News(slot=self.slots, num_tokens=self.tokens[:], num_hashes=counts, hashes=os.urandom(32 * sum(counts)))
        self.seq = 1
        self.replica.apply(Step(0, 1, [Part(news=news, admit=Admit(slot=self.slots))]))

    def next_step(self) -> Step:
        """Parts are created outside the measured time."""
        self.seq += 1
        self.tokens = [tokens + 1 for tokens in self.tokens]
        counts = [int(tokens % self.size == 0) for tokens in self.tokens]
        facts = Facts(self.slots, appended=[1] * REQUESTS, num_hashes=counts, hashes=os.urandom(32 * sum(counts)))
        return Step(0, self.seq, [Part(facts=facts, run=Run(slot=self.slots))], executed_through=self.seq - 1)


def timed_ns(act: Callable[..., object], *arguments: object) -> int:
    """Duration of the call."""
    start = time.perf_counter_ns()
    act(*arguments)
    return time.perf_counter_ns() - start


def measure() -> dict[str, dict[str, float]]:
    """Run rounds in turn; returns the median of each figure."""
    samples: dict[str, dict[str, list[float]]] = {"ns per block cycle": {"ours": [], "objects": []}}
    ours, objects = BlockPool(20_000, 1, True), ObjectPool(20_000)
    decoders = {name: Decoder(groups) for name, groups in MODELS.items()}
    plain = ObjectDecoder(ObjectPool(60_000), REQUESTS, PROMPT, 16)
    for name in decoders:
        samples[f"µs per decode step, {name}"] = {"ours": [], "objects": []}
    for round_number in range(ROUNDS):
        keys = [os.urandom(32) for _ in range(BATCH)]
        cycle = samples["ns per block cycle"]
        cycle["ours"].append(timed_ns(cycle_ours, ours, keys) / BATCH)
        cycle["objects"].append(timed_ns(cycle_objects, objects, keys) / BATCH)
        for name, decoder in decoders.items():
            row = samples[f"µs per decode step, {name}"]
            for _ in range(STEPS):
                step = decoder.next_step()
                row["ours"].append(timed_ns(decoder.replica.apply, step) / 1000)
                if name == "1 group (full)":
                    full = {n: os.urandom(32) for n, tokens in enumerate(plain.tokens) if (tokens + 1) % 16 == 0}
                    row["objects"].append(timed_ns(plain.step, full) / 1000)
        print(f"round {round_number + 1} of {ROUNDS}", flush=True)
    return {name: {who: statistics.median(v) for who, v in row.items() if v} for name, row in samples.items()}


def report(figures: dict[str, dict[str, float]]) -> tuple[str, dict[str, object]]:
    """The table, and its data."""
    lines = ["# In process", "", machine_line(), ""]
    lines += ["| figure | ours | object per block | ratio |", "|---|---|---|---|"]
    for name, row in figures.items():
        peer = row.get("objects")
        cells = (f"{peer:.0f}", f"{row['ours'] / peer:.2f}") if peer else ("", "")
        lines.append(f"| {name} | {row['ours']:.0f} | {cells[0]} | {cells[1]} |")
    return "\n".join([*lines, "", NOTE, ""]), {"machine": machine(), "figures": figures}


def main() -> None:
    """Measure, print, write."""
    table, data = report(measure())
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "in_process.md").write_text(table)
    (RESULTS / "in_process.json").write_text(json.dumps(data, indent=2) + "\n")
    print(table)


if __name__ == "__main__":
    main()
