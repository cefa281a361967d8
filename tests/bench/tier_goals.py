"""All figures and checks of tiers in one run: `make tiers` (KVPLANE_WORKLOADS=FOLDER for N10).

What is measured runs alone. What only counts runs in two lanes, on a machine of two cores. Each figure is printed with
its reference from this run and its goal, and each part with its duration; the tables are in results/tiers.md. The
status is 1 if a part fails or a figure misses its goal.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.bench.goals import HEAD
from tests.bench.machine import machine_line
from tests.conftest import workloads_folder, workloads_line

RESULTS = Path(__file__).parent / "results" / "tiers.md"
N1 = "| N1 | bytes that loads read, for 6 models at 4 lengths: as computed | 1 | = 1 | {} |"


@dataclass(frozen=True, slots=True)
class Part:
    """One command of Python, and what it shows."""

    name: str
    command: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a part ended, after which seconds, with its last lines."""

    part: Part
    status: int
    took_s: float
    lines: list[str]

    @property
    def figures(self) -> list[str]:
        """The rows of its figures."""
        return [line for line in self.lines if line.startswith("| N")]

    @property
    def row(self) -> str:
        """A row of the table of parts."""
        last = next((line for line in reversed(self.lines) if line.strip() and not line.startswith("| N")), "")
        status = "ended well" if not self.status else f"**status {self.status}**"
        return f"| {self.part.name} | `{self.part.command}` | {self.took_s:,.0f} | {status} | {last.strip()[:160]} |"


def run(part: Part) -> Outcome:
    """Run a part, and print what it prints when it has ended."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", *part.command.split()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    outcome = Outcome(part, done.returncode, time.monotonic() - began, done.stdout.splitlines())
    print(f"== {part.name}: {outcome.took_s:,.0f} s, status {done.returncode}\n{done.stdout}", flush=True)
    return outcome


def in_turn(parts: Sequence[Part]) -> list[Outcome]:
    """Run parts one after the other."""
    return [run(part) for part in parts]


def parts_of(given: argparse.Namespace) -> tuple[list[Part], list[list[Part]]]:
    """Return the parts that measure, and the lanes of those that count."""
    measured = [
        Part("loads and copies (N2, N4)", "tests.bench.tier_moves"),
        Part("disk, look-up, restart (N5, N7, N9)", "tests.bench.tier_figures"),
        Part("what tiers cost (N3, N6, N8)", "tests.bench.tier_costs"),
    ]
    lanes = [
        [
            Part("bytes of loads (N1)", "pytest -q tests/service/test_tier_rows.py"),
            Part("the engine and its model", f"tests.engine.tiers --requests {given.requests}"),
        ],
        [
            Part("damaged slots", f"tests.worker.corruption --cases {given.cases}"),
            Part("planted faults", "tests.core.tier_campaign --twins"),
            Part("simulated faults", f"tests.sim --tiers --jobs 1 --seeds {given.seeds}"),
            Part("real faults", f"tests.faults --tiers --faults {given.faults}"),
        ],
    ]
    if workloads_folder() is not None:
        lanes.insert(0, [Part("hits of a trace (N10)", "tests.bench.tiers --goals")])
    return measured, lanes


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.tier_goals", description=__doc__)
    parser.add_argument("--requests", type=int, default=60, help="of each mix of the reference engine")
    parser.add_argument("--cases", type=int, default=10_000, help="damaged slots")
    parser.add_argument("--seeds", type=int, default=8, help="simulated runs")
    parser.add_argument("--faults", type=int, default=12, help="real faults")
    given = parser.parse_args()
    measured, lanes = parts_of(given)
    began, line = time.monotonic(), machine_line()
    outcomes = in_turn(measured)
    with ThreadPoolExecutor(2) as pool:
        outcomes += [one for lane in pool.map(in_turn, lanes) for one in lane]
    took_s = time.monotonic() - began
    figures = [row for outcome in outcomes for row in outcome.figures]
    (loads,) = [one for one in outcomes if "(N1)" in one.part.name]
    figures.insert(0, N1.format("**missed**" if loads.status else "reached"))
    is_good = not any(one.status for one in outcomes) and "missed" not in "".join(figures)
    text = "\n".join(
        [
            "# Tiers",
            "",
            f"`make tiers`: {took_s / 60:.1f} minutes. Each figure has its reference from the same run.",
            "",
            line,
            "",
            *HEAD,
            *figures,
            *([] if workloads_folder() else ["", f"N10 was not measured. {workloads_line()}"]),
            "",
            "| part | command | seconds | status | last line |",
            "|---|---|---|---|---|",
            *[outcome.row for outcome in outcomes],
            "",
        ]
    )
    print(text)
    RESULTS.write_text(text, encoding="utf-8")
    return not is_good


if __name__ == "__main__":
    sys.exit(main())
