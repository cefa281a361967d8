"""Time of `apply` by the compiled core, as a share of the Python core's, step by step in one run.

    python -m tests.bench.cores             prints a table and writes tests/bench/results/cores.md

Each step appends one token to each of 256 requests and runs all of them, on both cores in turn. Requests differ in
length, so that 16 of them fill a block in each step; or they are equal, and all fill one in every 16th step. Until the
result's Python objects exist, events aside, which both cores make when they are read.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from kvplane.base.groups import AlignSpec, GroupKind, GroupSpec, MambaMode, ReplicaSpec
from kvplane.base.step import Admit, Facts, News, Part, Run, Step
from kvplane_service.core.interface import ReplicaCore
from kvplane_service.core.native import NativeReplica
from kvplane_service.core.replica import Replica
from tests.bench.machine import machine_line

RESULTS = Path(__file__).parent / "results" / "cores.md"
REQUESTS, BLOCK, TOKENS, STEPS = 256, 16, 512, 96
FULL = GroupSpec(GroupKind.FULL_ATTENTION, BLOCK)
WINDOWS = tuple(GroupSpec(GroupKind.SLIDING_WINDOW, BLOCK, window=128, lookup_class=1) for _ in range(6))
STATES = tuple(
    GroupSpec(GroupKind.MAMBA, BLOCK, mamba_mode=MambaMode.ALIGN, lookup_class=1, zero_new_blocks=True)
    for _ in range(7)
)
SHAPES = {"1 full": (FULL,), "1 full, 6 windows": (FULL, *WINDOWS), "1 full, 7 states": (FULL, *STATES)}


def digest(slot: int, block: int) -> bytes:
    """A hash that no other block of any request has."""
    return b"%016d%016d" % (slot, block)


def spec(groups: tuple[GroupSpec, ...]) -> ReplicaSpec:
    """A replica with room for all requests, and events on."""
    aligned = AlignSpec(BLOCK, 8192) if STATES[0] in groups else AlignSpec()
    return ReplicaSpec(groups, 60_000, 8192, BLOCK, BLOCK, max_in_flight_tokens=8192, align=aligned)


def admission(lengths: list[int]) -> Part:
    """All requests, and their admission."""
    counts = [length // BLOCK for length in lengths]
    hashes = b"".join(digest(slot, block) for slot, count in enumerate(counts) for block in range(count))
    slots = list(range(REQUESTS))
    return Part(news=News(slots, lengths, num_hashes=counts, hashes=hashes), admit=Admit(slots))


def decode(lengths: list[int]) -> Part:
    """One token more for each request; `lengths` counts it."""
    full = [length % BLOCK == 0 for length in lengths]
    hashes = b"".join(digest(slot, lengths[slot] // BLOCK) for slot in range(REQUESTS) if full[slot])
    facts = Facts(list(range(REQUESTS)), appended=[1] * REQUESTS, hashes=hashes)
    if hashes:
        facts.num_hashes = list(map(int, full))
    return Part(facts=facts, run=Run(list(range(REQUESTS))))


def cpu_us(core: ReplicaCore, step: Step) -> float:
    """CPU time of one step."""
    began = time.process_time_ns()
    result = core.apply(step)
    spent = time.process_time_ns() - began
    assert len(result.parts) == 1
    return spent / 1000


def measure(groups: tuple[GroupSpec, ...], in_phase: bool) -> list[tuple[float, float]]:
    """Times of each decode step in microseconds: by Python, compiled."""
    cores: list[ReplicaCore] = [Replica(spec(groups)), NativeReplica(spec(groups))]
    for core in cores:
        core.begin_epoch(1)
    lengths = [TOKENS + (0 if in_phase else slot % BLOCK) for slot in range(REQUESTS)]
    for core in cores:
        core.apply(Step(1, 1, [admission(lengths)]))
    times = []
    for seq in range(2, STEPS + 2):
        lengths = [length + 1 for length in lengths]
        steps = [Step(1, seq, [decode(lengths)], executed_through=seq - 1) for _ in cores]
        python, native = (cpu_us(core, step) for core, step in zip(cores, steps, strict=True))
        times.append((python, native))
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    lines = ["# The compiled core", "", machine_line(), ""]
    lines.append("| groups | step of 256 requests | Python, us | compiled, us | compiled / Python |")
    lines.append("|---|---|---|---|---|")
    for name, groups in SHAPES.items():
        staggered, in_phase = measure(groups, False), measure(groups, True)
        for what, chosen in (
            ("16 fill a block", staggered),
            ("none fills a block", [one for at, one in enumerate(in_phase) if (at + 1) % BLOCK]),
            ("all fill a block", [one for at, one in enumerate(in_phase) if (at + 1) % BLOCK == 0]),
        ):
            python, native = (statistics.median(column) for column in zip(*chosen, strict=True))
            ratio = statistics.median(native / python for python, native in chosen)
            lines.append(f"| {name} | {what} | {python:,.0f} | {native:,.0f} | {ratio:.3f} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if not arguments.no_write:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
