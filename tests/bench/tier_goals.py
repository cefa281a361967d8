"""All figures and checks of tiers in one run: `make tiers` (KVPLANE_WORKLOADS=FOLDER for N10).

What is measured runs alone, then what only counts, three parts at a time: one of them mostly waits. Each figure is
printed with its reference from this run and its goal, and each part with its duration; the tables are in
results/tiers.md. The status is 1 if a part fails or does not finish, or a figure misses its goal.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Timer

from tests.bench.goals import HEAD
from tests.bench.machine import machine_line
from tests.conftest import workloads_folder, workloads_line

RESULTS = Path(__file__).parent / "results" / "tiers.md"
N1 = "| N1 | bytes that loads read, for 6 models at 4 lengths: as computed | 1 | = 1 | {} |"
NOT_BEGUN, KILLED = -1000, -1001  # instead of a status, when the time was up
AT_A_TIME = 3


@dataclass(frozen=True, slots=True)
class Part:
    """One command of Python, what it shows, and the numbers of the figures that it prints."""

    name: str
    command: str
    figures: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a part ended: its status, seconds, seconds of CPU time, and lines."""

    part: Part
    status: int
    took_s: float = 0.0
    cpu_s: float = 0.0
    lines: list[str] = field(default_factory=list)

    @property
    def how(self) -> str:
        """How it ended, in words."""
        words = {
            0: "ended well",
            NOT_BEGUN: "**not begun**: the time was up",
            KILLED: "**not finished**: the time was up",
        }
        return words.get(self.status, f"**status {self.status}**")

    @property
    def is_whole(self) -> bool:
        """Whether it came to its end."""
        return self.status not in (NOT_BEGUN, KILLED)

    @property
    def figures(self) -> Iterator[str]:
        """The rows of its figures; and one for each figure that was not measured."""
        for number in self.part.figures:
            rows = [line for line in self.lines if line.startswith(f"| N{number} ")]
            if number == 1 and self.is_whole:
                rows = [N1.format("**missed**" if self.status else "reached")]
            yield from rows or [f"| N{number} | {self.part.name}: {self.how} | | | **not measured** |"]

    @property
    def row(self) -> str:
        """A row of the table of parts."""
        last = next((line for line in reversed(self.lines) if line.strip() and not line.startswith("| N")), "")
        seconds = f"{self.took_s:,.0f} | {self.cpu_s:,.0f}"
        return f"| {self.part.name} | `{self.part.command}` | {seconds} | {self.how} | {last.strip()[:160]} |"


class Run:
    """Runs parts until a time of the monotonic clock, at which those that are under way are killed."""

    def __init__(self, until_s: float) -> None:
        self._until_s = until_s
        self._under_way = set[int]()

    def part(self, part: Part) -> Outcome:
        """Run a part, and print what it printed when it has ended."""
        began_s = time.monotonic()
        if began_s >= self._until_s:
            return Outcome(part, NOT_BEGUN)
        with tempfile.TemporaryFile("w+") as out:
            both = [(os.POSIX_SPAWN_DUP2, out.fileno(), number) for number in (1, 2)]
            words = [sys.executable, "-m", *part.command.split()]
            process = os.posix_spawn(sys.executable, words, os.environ, file_actions=both, setpgroup=0)
            self._under_way.add(process)
            timer = Timer(self._until_s - began_s, os.killpg, (process, signal.SIGKILL))
            timer.start()
            _, status, used = os.wait4(process, 0)
            timer.cancel()
            self._under_way.remove(process)
            out.seek(0)
            text = out.read()
        took_s, cpu_s = time.monotonic() - began_s, used.ru_utime + used.ru_stime
        code = os.waitstatus_to_exitcode(status)
        was_killed = code == -signal.SIGKILL and began_s + took_s >= self._until_s
        outcome = Outcome(part, KILLED if was_killed else code, took_s, cpu_s, text.splitlines())
        print(f"== {part.name}: {took_s:,.0f} s, {outcome.how}\n{text}", flush=True)
        return outcome

    def stop(self, *_: object) -> None:
        """Kill what is under way, and begin nothing more."""
        self._until_s = 0
        for process in self._under_way:
            os.killpg(process, signal.SIGKILL)


def parts_of(given: argparse.Namespace) -> tuple[list[Part], list[Part]]:
    """Return the parts that measure, and those that count, the longest first."""
    measured = [
        Part("loads and copies", "tests.bench.tier_moves", (2, 4)),
        Part("disk, look-up, restart", "tests.bench.tier_figures", (5, 7, 9)),
        Part("what tiers cost", "tests.bench.tier_costs", (3, 6, 8)),
    ]
    counted = [
        Part("real faults", f"tests.faults --tiers --faults {given.faults}"),
        Part("planted faults", "tests.core.tier_campaign --twins"),
        Part("the engine and its model", f"tests.engine.tiers --requests {given.requests}"),
        Part("damaged slots", f"tests.worker.corruption --cases {given.cases}"),
        Part("simulated faults", f"tests.sim --tiers --jobs 1 --seeds {given.seeds}"),
        Part("bytes of loads", "pytest -q tests/service/test_tier_rows.py", (1,)),
    ]
    if workloads_folder() is not None:
        counted.insert(2, Part("hits of a trace", "tests.bench.tiers --goals --processes 1", (10,)))
    return measured, counted


def table(outcomes: Sequence[Outcome], took_s: float, head: str) -> str:
    """Return the tables of figures and of parts."""
    figures = sorted((row for one in outcomes for row in one.figures), key=lambda row: int(row.split()[1][1:]))
    if workloads_folder() is None:
        figures.append(f"| N10 | {workloads_line()} | | | **not measured** |")
    unfinished = [one.part.name for one in outcomes if not one.is_whole]
    cpu_s = sum(one.cpu_s for one in outcomes)
    return "\n".join(
        [
            "# Tiers",
            "",
            f"`make tiers`: {took_s / 60:.1f} minutes, {cpu_s / 60:.1f} of CPU time. Each figure has its reference from"
            " the same run.",
            *(["", f"**The run is not whole**: the time was up before {', '.join(unfinished)}."] if unfinished else []),
            "",
            head,
            "",
            *HEAD,
            *figures,
            "",
            "| part | command | seconds | of CPU time | how it ended | last line |",
            "|---|---|---|---|---|---|",
            *[one.row for one in outcomes],
            "",
        ]
    )


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.tier_goals", description=__doc__)
    parser.add_argument("--requests", type=int, default=60, help="of each mix of the reference engine")
    parser.add_argument("--cases", type=int, default=10_000, help="damaged slots")
    parser.add_argument("--seeds", type=int, default=8, help="simulated runs")
    parser.add_argument("--faults", type=int, default=12, help="real faults")
    parser.add_argument("--minutes", type=float, default=30, help="after which what is not finished is killed")
    given = parser.parse_args()
    measured, counted = parts_of(given)
    began_s, head = time.monotonic(), machine_line()
    one = Run(began_s + 60 * given.minutes)
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, one.stop)  # what was measured is still printed
    outcomes = [one.part(part) for part in measured]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        outcomes += pool.map(one.part, counted)
    text = table(outcomes, time.monotonic() - began_s, head)
    print(text)
    RESULTS.write_text(text, encoding="utf-8")
    is_whole = workloads_folder() is None or "not measured" not in text
    return int(any(one.status for one in outcomes) or "**missed**" in text or not is_whole)


if __name__ == "__main__":
    sys.exit(main())
