"""CPU time and memory of the compiled core, next to the Python core and to a pool with an object per block.

    python -m tests.bench.cores             prints the tables and writes tests/bench/results/cores.md
    python -m tests.bench.cores --quick     without the pool of ten million blocks, 1.1 GB

The two ways of a ratio alternate in one process, 16 steps each; garbage is collected as in a server. Steps are columns
of arrays, as `StepBuilder` makes them. A time is until the answer's columns exist; events become objects when they are
read.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from kvplane.base.groups import AlignSpec, GroupKind, GroupSpec, MambaMode, ReplicaSpec
from kvplane.base.step import Admit, AdmitStatus, End, Facts, News, OnRefusal, Part, Run, Step
from kvplane_core.face.interface import ReplicaCore
from kvplane_core.face.native import NativeReplica
from kvplane_core.spec.replica import Replica
from kvplane_service.runtime import interpreter
from tests.bench.machine import machine_line
from tests.bench.objects import ObjectPool

RESULTS = Path(__file__).parent / "results" / "cores.md"
REQUESTS, BLOCK, TOKENS, STEPS = 256, 16, 512, 96
PROMPT = 6144  # tokens of a long prompt, 384 blocks
WAITING, ROWS = 10_000, 3800
FULL = GroupSpec(GroupKind.FULL_ATTENTION, BLOCK)
WINDOWS = tuple(GroupSpec(GroupKind.SLIDING_WINDOW, BLOCK, window=128, lookup_class=1) for _ in range(6))
STATES = tuple(
    GroupSpec(GroupKind.MAMBA, BLOCK, mamba_mode=MambaMode.ALIGN, lookup_class=1, zero_new_blocks=True)
    for _ in range(7)
)
ONE, SEVEN, EIGHT = (FULL,), (FULL, *WINDOWS), (FULL, *STATES)
SHAPES = {"1 full": ONE, "1 full, 6 windows": SEVEN, "1 full, 7 states": EIGHT}


def digest(slot: int, block: int) -> bytes:
    """A hash that no other block of any request has."""
    return b"%016d%016d" % (slot, block)


def spec(groups: tuple[GroupSpec, ...], num_blocks: int = 60_000) -> ReplicaSpec:
    """A replica with events on."""
    aligned = AlignSpec(BLOCK, 8192) if STATES[0] in groups else AlignSpec()
    return ReplicaSpec(groups, num_blocks, 8192, BLOCK, BLOCK, max_in_flight_tokens=8192, align=aligned)


def begun(core: ReplicaCore) -> ReplicaCore:
    """The core in its first engine life."""
    core.begin_epoch(1)
    return core


def news(slots: list[int], lengths: list[int], name: int = 0) -> News:
    """New requests, whose hashes differ from those with another name."""
    counts = [length // BLOCK for length in lengths]
    names = zip(slots, counts, strict=True)
    hashes = b"".join(digest(name << 20 | slot, block) for slot, count in names for block in range(count))
    return News(slots, lengths, num_hashes=counts, hashes=hashes)


def decode(lengths: list[int]) -> Part:
    """One token more for each of the first requests; `lengths` counts it."""
    slots = array("I", range(len(lengths)))
    full = [length % BLOCK == 0 for length in lengths]
    hashes = b"".join(digest(slot, lengths[slot] // BLOCK) for slot in slots if full[slot])
    facts = Facts(slots, appended=array("I", [1] * len(slots)), hashes=hashes)
    if hashes:
        facts.num_hashes = array("I", map(int, full))
    return Part(facts=facts, run=Run(slots))


def cpu_us(work: Callable[[], object]) -> float:
    """CPU time of a call."""
    began = time.process_time_ns()
    result = work()
    spent = time.process_time_ns() - began
    del result
    return spent / 1000


def admit_all(core: ReplicaCore, seq: int, lengths: list[int]) -> None:
    """Admit requests of these lengths."""
    slots = list(range(len(lengths)))
    result = core.apply(Step(1, seq, [Part(news=news(slots, lengths), admit=Admit(slots))])).parts[0]
    assert set(result.admit_status) == {AdmitStatus.GRANTED}


def decode_times(cores: list[ReplicaCore], seqs: list[int], lags: list[int], in_phase: bool) -> list[list[float]]:
    """Per step, the time of each core, whose next steps are `seqs`, with `lags` steps in flight."""
    lengths = [TOKENS + (0 if in_phase else slot % BLOCK) for slot in range(REQUESTS)]
    for core, seq in zip(cores, seqs, strict=True):
        admit_all(core, seq, lengths)
    times: list[list[float]] = []
    for first in range(1, STEPS, BLOCK):
        parts = []
        for _ in range(BLOCK):
            lengths = [length + 1 for length in lengths]
            parts.append(decode(lengths))
        block = []
        for core, seq, lag in zip(cores, seqs, lags, strict=True):
            steps = [
                Step(1, at, [part], executed_through=max(at - 1 - lag, 0)) for at, part in enumerate(parts, seq + first)
            ]
            block.append([cpu_us(lambda step=step: core.apply(step)) for step in steps])  # type: ignore[misc]  # noqa: B023
        times.extend(map(list, zip(*block, strict=True)))
    return times


def decode_rows() -> Iterator[str]:
    """Both cores, per shape."""
    yield "| groups | step of 256 requests | Python, us | compiled, us | compiled / Python | goal |"
    yield "|---|---|---|---|---|---|"
    for name, groups in SHAPES.items():
        staggered, in_phase = (
            decode_times([begun(Replica(spec(groups))), begun(NativeReplica(spec(groups)))], [1, 1], [0, 0], phase)
            for phase in (False, True)
        )
        for what, chosen, goal in (
            ("16 fill a block", staggered, "0.02"),
            ("none fills a block", [one for at, one in enumerate(in_phase, start=1) if at % BLOCK], ""),
            ("all fill a block", in_phase[BLOCK - 1 :: BLOCK], "500 us" if groups is SEVEN else ""),
        ):
            python, native = (statistics.median(column) for column in zip(*chosen, strict=True))
            ratio = statistics.median(native / python for python, native in chosen)
            yield f"| {name} | {what} | {python:,.0f} | {native:,.0f} | {ratio:.3f} | {goal} |"


def fill(core: ReplicaCore) -> int:
    """Give free blocks keys, by requests that end, until few have none; returns the last step."""
    seq, slots, before = 0, list(range(1000, 1064)), core.spec.num_blocks
    while core.block_counts.empty < before:
        before, seq = core.block_counts.empty, seq + 2
        part = Part(news=news(slots, [TOKENS] * len(slots), name=seq), admit=Admit(slots, on_refusal=OnRefusal.SKIP))
        core.apply(Step(1, seq - 1, [part], executed_through=max(seq - 2, 0)))
        ends = Facts(slots, end=[End.FREE] * len(slots))
        core.apply(Step(1, seq, [Part(facts=ends)], executed_through=seq - 1))
    return seq


def steady_rows() -> Iterator[tuple[str, float, str]]:
    """A full pool with three steps in flight, against a pool that never fills with none."""
    for name, groups in SHAPES.items():
        cores = [begun(NativeReplica(spec(groups))) for _ in range(2)]
        times = decode_times(cores, [1, fill(cores[1]) + 1], [0, 3], False)
        ratio = statistics.median(full / empty for empty, full in times[8:])
        yield f"{name}: full pool and 3 steps in flight / empty pool and none", ratio, "1.3"


def per_block_rows() -> Iterator[tuple[str, float, str]]:
    """Admission and end of a long prompt, against the same on a pool with an object per block."""
    count, ratios = PROMPT // BLOCK, []
    core, pool = begun(NativeReplica(spec(ONE, 4000))), ObjectPool(4000)
    for number in range(1, 80):
        keys = [digest(number << 20, block) for block in range(count)]
        part = Part(news=news([0], [PROMPT], name=number), admit=Admit([0]))
        admission = Step(1, 2 * number - 1, [part], executed_through=2 * number - 2)
        end = Step(1, 2 * number, [Part(facts=Facts([0], end=[End.FREE]))], executed_through=2 * number - 1)

        def with_objects(keys: list[bytes] = keys) -> None:
            assert pool.find(keys[0]) is None
            blocks = pool.take(count)
            for block, key in zip(blocks, keys, strict=True):
                pool.register(block, key)
            pool.release(blocks[::-1])

        native = cpu_us(lambda: core.apply(admission)) + cpu_us(lambda: core.apply(end))  # noqa: B023
        ratios.append(native / cpu_us(with_objects))
    yield (
        f"admission and end of {count} blocks, per block / an object per block",
        statistics.median(ratios[16:]),
        "0.25",
    )


def waiting_rows() -> Iterator[tuple[str, float, str]]:
    """Many rows of waiting requests while no block is free."""
    for name, groups in ((name, SHAPES[name]) for name in ("1 full", "1 full, 6 windows")):
        core = begun(NativeReplica(spec(groups, 1100)))
        running, seq = list(range(WAITING, WAITING + 128)), 1
        admit = Admit(running, on_refusal=OnRefusal.SKIP)
        core.apply(Step(1, seq, [Part(news=news(running, [480] * len(running)), admit=admit)]))
        for first in range(0, WAITING, 1000):
            slots, seq = list(range(first, first + 1000)), seq + 1
            core.apply(Step(1, seq, [Part(news=news(slots, [TOKENS] * len(slots), name=1))]))
        times, rows = [], list(range(ROWS))
        for _ in range(20):
            seq += 1
            step = Step(1, seq, [Part(admit=Admit(rows, on_refusal=OnRefusal.SKIP))], executed_through=seq - 1)
            times.append(cpu_us(lambda: core.apply(step)))  # noqa: B023
        rows_of = core.apply(replace(step, seq=seq + 1, executed_through=seq)).parts[0]
        assert set(rows_of.admit_status) == {AdmitStatus.REFUSED}
        what = f"{name}: {WAITING:,} waiting requests, {ROWS:,} admit rows with SKIP and no room, ms"
        yield what, statistics.median(times) / 1000, "5"


def longest_ms(num_blocks: int, runs: int = 5) -> float:
    """The longest step of one recording, each step as its least time over some runs."""
    best = [float("inf")] * STEPS
    for _ in range(runs):
        times = decode_times([begun(NativeReplica(spec(ONE, num_blocks)))], [1], [3], False)
        best = [min(before, now) for before, (now,) in zip(best, times, strict=True)]
        gc.collect()
    return max(best)


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory_rows() -> Iterator[tuple[str, float, str]]:
    """Resident memory of a pool of a million blocks, less that of a small one."""
    small, before = NativeReplica(spec(ONE, 1000)), resident_bytes()
    other, after_small = NativeReplica(spec(ONE, 1000)), resident_bytes()
    large = NativeReplica(spec(ONE, 1_000_000))
    grown = resident_bytes() - after_small - (after_small - before)
    assert small.spec.num_blocks == other.spec.num_blocks < large.spec.num_blocks
    yield "memory of a pool of 1,000,000 blocks, MB", grown / 1e6, "110"


def goal_rows(quick: bool) -> Iterator[str]:
    """The other measurements, each with its goal."""
    yield "| measurement | value | goal: at most |"
    yield "|---|---|---|"
    found = [*memory_rows(), *steady_rows(), *per_block_rows(), *waiting_rows()]
    if not quick:
        ratio = longest_ms(10_000_000) / longest_ms(100_000)
        found.append(("longest step, 10,000,000 blocks / 100,000 blocks", ratio, "2"))
    yield from (f"| {what} | {value:.3g} | {goal} |" for what, value, goal in found)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--quick", action="store_true", help="leave out the pool of ten million blocks")
    arguments = parser.parse_args()
    interpreter.tune()
    lines = ["# The compiled core", "", machine_line(), "", *goal_rows(arguments.quick), "", *decode_rows()]
    text = "\n".join(lines) + "\n"
    print(text)
    if not arguments.no_write:
        RESULTS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
