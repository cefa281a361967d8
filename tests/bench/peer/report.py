"""From rounds to cells, and from cells to a table and a JSON file."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.bench.machine import cpu_model
from tests.bench.peer.models import MODELS
from tests.bench.peer.plan import (
    AHEAD,
    CBOR_HASH,
    CPU,
    DECODE,
    DEFAULT_HASH,
    DELAY,
    HASHES,
    HIT,
    MISS,
    PACED,
    PLACES,
    REFERENCE,
    SOCKET,
    TCP,
    UNIX,
    WAIT,
    Case,
    Plan,
    Round,
)

GOALS = {  # ratios of steps sent ahead to the reference, by requests and model
    size: dict(zip([model.name for model in MODELS], goals, strict=True))
    for size, goals in {
        1: (5, 4, 2, 1),
        8: (1.0, 0.7, 0.3, 0.25),
        32: (0.35, 0.25, 0.12, 0.08),
        256: (0.08, 0.06, 0.03, 0.02),
    }.items()
}
OF_AHEAD = (AHEAD, WAIT, DELAY, CPU)
Found = dict[str, Any]  # of one process start, as `start.measure` gives it

INTERVALS = f"""\
**Decode** ({REFERENCE}): `new_step_starts`; then for each request `append_output_token_ids` with the sampled token (it
hashes the block that the token fills), `allocate_slots(request, 1)`, and the count of computed tokens raised by one.
Not in it, in its favour: block ids taken from the returned objects, copies and zeroing fetched, all other scheduling.

**Decode** (ours): the tokens kept in the engine's record, and put into the `StepBuilder`; `Session.apply`: encoded,
sent, waited for, decoded, the service hashes the blocks that they fill; new block ids put into the engine's
`BlockTables`, the grants of all requests checked.

**Ahead** (ours): a step is submitted while the GPU works on the one before. In the GPU's place the thread does other
Python work, and then sleeps, half of the time each. The interval is what the step costs the engine's thread: tokens,
columns, `submit`; after the sleep `receive`, tables and grants; and `delay`, how long the other work waited for
the interpreter's lock while other threads of the client had it. `waiting` is `receive` alone, and `process CPU` is the
time of all threads of the engine's process without the other work.

**Paced** ({REFERENCE}): a decode step behind the same work and sleep on its thread. {REFERENCE}'s manager runs on the
engine's thread in any case, so this is what a step sent ahead compares with: as ours, it runs behind a pause, with cold
caches. A step of the decode column runs directly behind another one.

**Admission** ({REFERENCE}): the prompt hashed, `get_computed_blocks`, `allocate_slots` for the whole prompt behind the
hit (models with states: up to the last block boundary). The `Request` is built before. **Ours**: a `RequestHasher`
made and the prompt hashed, `Part` built, `Session.apply`, the whole table put into `BlockTables`. Between intervals, on
all sides, the rest of the prompt is computed and the request freed; the pool holds three such prompts and is full of
cached blocks, so that a miss evicts. A full hit is the prompt that was just freed.

Intervals of steps sent ahead and of paced ones do not contain the time in which their thread was ready to run and other
threads had the CPU (`tests.bench.peer.work.Clock`); the others, which wait for a service, are wall time.

Both: the pool is full of cached blocks, so that a new block evicts one; prefix caching and events on, statistics of
{REFERENCE} off, retention interval 0, the garbage collector frozen after the set-up; ours with `commit=safe`. After
each case the sides must agree in free blocks (decode) and hits (admission). A round of one side is the median of its
intervals; a cell is the median of all rounds (first to third quartile), and behind it the ratio to {REFERENCE}'s cell.
In a decode step of N = 1 or 8 requests (of Jamba, whose blocks have 80 tokens, also of 32 and 64) the median step
starts and fills fewer blocks than its share, on all sides."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A side of a case over all rounds of all process starts, in microseconds.

    Attributes:
        ratio: of medians, to the reference; None without one.
        start_ratios: the same in each process start.
    """

    case: Case
    side: str
    rounds: int
    median: float
    quartiles: tuple[float, float]
    extremes: tuple[float, float]
    mean: float
    ratio: float | None
    start_ratios: tuple[float, ...]


def cells_of(starts: Sequence[Found]) -> list[Cell]:
    """All cells, in the order in which they were first measured."""
    by_start = [_by_cell(found) for found in starts]
    return [_cell(case, side, by_start) for case, side in by_start[0]]


def _by_cell(found: Found) -> dict[tuple[Case, str], list[Round]]:
    cells: dict[tuple[Case, str], list[Round]] = {}
    for record in found["rounds"]:
        one = Round(Case(**record["case"]), record["side"], record["median_us"], record["mean_us"])
        cells.setdefault((one.case, one.side), []).append(one)
    return cells


def _cell(case: Case, side: str, starts: Sequence[dict[tuple[Case, str], list[Round]]]) -> Cell:
    rounds = [one for start in starts for one in start[case, side]]
    medians = sorted(one.median_us for one in rounds)
    low, _, high = statistics.quantiles(medians, n=4, method="inclusive") if len(medians) > 1 else medians * 3
    against = (_base(case), REFERENCE)
    ratios = tuple(_median(start[case, side]) / _median(start[against]) for start in starts if against in start)
    base = [one for start in starts for one in start.get(against, ())]
    return Cell(
        case=case,
        side=side,
        rounds=len(rounds),
        median=statistics.median(medians),
        quartiles=(low, high),
        extremes=(medians[0], medians[-1]),
        mean=statistics.fmean(one.mean_us for one in rounds),
        ratio=statistics.median(medians) / _median(base) if base else None,
        start_ratios=ratios,
    )


def _base(case: Case) -> Case:
    """The case of the reference that this one compares with."""
    return Case(case.model, PACED, case.size) if case.kind in OF_AHEAD else case


def _median(rounds: Sequence[Round]) -> float:
    return statistics.median(one.median_us for one in rounds)


# ---- text


@dataclass(frozen=True, slots=True)
class Report:
    """The plan, date and machine."""

    about: dict[str, Any]
    cells: list[Cell]

    @classmethod
    def of(cls, plan: Plan, starts: Sequence[Found]) -> Report:
        """The report of these process starts."""
        return cls(_about(plan, starts), cells_of(starts))

    def text(self) -> str:
        """The report as Markdown."""
        return _text(self.about, self.cells)

    def write(self, folder: Path, name: str) -> None:
        """Write `name`.md and, of all cases, `name`.json."""
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.md").write_text(self.text(), encoding="utf-8")
        if name == "peer":
            (folder / "peer.json").write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def _about(plan: Plan, starts: Sequence[Found]) -> dict[str, Any]:
    ours = {name: importlib.metadata.version(name) for name in ("grpcio", "protobuf", "uvloop")}
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count(), "system": platform.platform()},
        "versions": {"python": platform.python_version()} | ours,
        "reference": starts[0]["reference"],
        "process_starts": len(starts),
        "load_average": [[load[0] for load in found["load_average"]] for found in starts],
        "plan": asdict(plan),
    }


def _text(about: dict[str, Any], cells: list[Cell]) -> str:
    table = {(cell.case, cell.side): cell for cell in cells}
    models = list(dict.fromkeys(cell.case.model for cell in cells))
    lines = ["# Comparison with the reference, in one run", "", *_head(about), ""]
    for model in models:
        lines += [f"## {model}", "", *_decode_table(model, table), "", *_admission_table(model, table), ""]
    lines += ["## Goals of steps sent ahead", "", *_goals(models, table), ""]
    return "\n".join([*lines, "## What is in an interval", "", INTERVALS, ""])


def _head(about: dict[str, Any]) -> list[str]:
    machine, plan = about["machine"], about["plan"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    theirs = ", ".join(f"{name} {version}" for name, version in about["reference"].items()) or "not measured"
    loads = "; ".join(f"{before:.1f} to {after:.1f}" for before, after in about["load_average"])
    return [
        f"{about['date']}, {machine['cores']} cores of {machine['cpu']}; {versions}. Reference: {theirs}.",
        f"{about['process_starts']} process starts of {plan['rounds']} interleaved rounds; load average {loads}.",
        f"A round: {plan['steps']} steps, {plan['ahead_steps']} sent ahead; {plan['admissions']} admissions of a kind.",
        f"GPU work of a step sent ahead: {plan['gpu_ms']} ms. Times in µs; what they hold is said below.",
    ]


def _decode_table(model: str, table: dict[tuple[Case, str], Cell]) -> list[str]:
    columns = [(DECODE, REFERENCE), *((DECODE, place) for place in PLACES), (PACED, REFERENCE)]
    columns += [(kind, side) for side in (SOCKET, UNIX) for kind in OF_AHEAD] + [(AHEAD, TCP)]
    names = [side if kind == DECODE else f"{side}, {kind[6:].strip(', ')}" for kind, side in columns]
    sizes = sorted({case.size for case, _ in table if case.model == model and case.kind == DECODE})
    rows = [
        [str(size)] + [_show(table.get((Case(model, kind, size), side))) for kind, side in columns] for size in sizes
    ]
    return _table(["requests", *names], rows)


def _goals(models: list[str], table: dict[tuple[Case, str], Cell]) -> list[str]:
    """The ratios of steps sent ahead over a Unix socket to paced ones and to those of a loop, each with its goal, and
    which goals are missed.
    """
    rows, missed, num_goals = [], list[str](), 0
    for model in models:
        row = [model]
        for size, goals in GOALS.items():
            cell = table.get((Case(model, AHEAD, size), UNIX))
            loop = table.get((Case(model, DECODE, size), REFERENCE))
            ratio = "–" if cell is None or cell.ratio is None else f"{cell.ratio:.2f}"
            of_loop = "–" if cell is None or loop is None else f"{cell.median / loop.median:.2f}"
            row.append(f"{ratio} / {of_loop} (≤ {goals[model]})")
            if cell is not None and cell.ratio is not None:
                num_goals += 1
                if cell.ratio > goals[model]:
                    missed.append(f"{model} at {size} ({cell.ratio:.3f})")
        rows.append(row)
    summary = f"{num_goals - len(missed)} of {num_goals} ratios to a paced step are reached"
    summary += f"; missed: {', '.join(missed)}." if missed else "."
    return [*_table(["model", *(f"{size} requests" for size in GOALS)], rows), "", summary]


def _admission_table(model: str, table: dict[tuple[Case, str], Cell]) -> list[str]:
    columns = [(hashing, side) for hashing in (DEFAULT_HASH, CBOR_HASH) for side in (REFERENCE, *PLACES)]
    names = ["admission"]
    names += [f"{side} {HASHES[hashing]['reference' if side == REFERENCE else 'ours']}" for hashing, side in columns]
    sizes = sorted({case.size for case, _ in table if case.model == model and case.kind == MISS})
    rows = [
        [f"{size} tokens, {kind.removeprefix('admission ')}"]
        + [_show(table.get((Case(model, kind, size, hashing), side))) for hashing, side in columns]
        for size in sizes
        for kind in (MISS, HIT)
    ]
    return _table(names, rows)


def _show(cell: Cell | None) -> str:
    if cell is None:
        return "–"
    low, high = cell.quartiles
    text = f"{cell.median:.0f} ({low:.0f}–{high:.0f})"
    return text if cell.ratio is None or cell.side == REFERENCE else f"{text} **{cell.ratio:.2f}**"


def _table(names: list[str], rows: list[list[str]]) -> list[str]:
    return [_row(names), _row(["---"] * len(names)), *map(_row, rows)]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
