"""Measures kvplane and the reference, and writes peer.md, peer.json and ahead.svg in tests/bench/results; a row per
model is added to history.md.

make bench-peer                     all cases, 3 process starts of 7 rounds
make bench-peer PEER="--quick"      a look: fewer cases and rounds, nothing is written
make bench-peer PEER="--goals"      the cases that have a goal, 1 process start of 5 rounds; writes ahead.md for peer.md
make bench-peer PEER="--minutes 20" begins no part after 20 minutes; the same command continues with the next part

A part is a process start of one model. What it found is kept in build/peer until the report is written.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.bench.peer import history, report
from tests.bench.peer.models import MODELS
from tests.bench.peer.plan import Plan

RESULTS = Path(__file__).parents[1] / "results"
KEPT = Path(__file__).parents[3] / "build" / "peer"
NAMES = tuple(model.name for model in MODELS)
GOALS: dict[str, Any] = {"requests": tuple(report.GOALS), "prompts": (6144,), "rounds": 5}
QUICK: dict[str, Any] = {"requests": (8, 64, 256), "prompts": (6144,), "rounds": 3, "admissions": 2}


def main() -> None:
    """Parse arguments, run the process starts in sequence, report."""
    parser = argparse.ArgumentParser(prog="make bench-peer", description=__doc__.partition("\n")[0])
    parser.add_argument("--starts", type=int, default=3, help="process starts (3)")
    parser.add_argument("--rounds", type=int, default=None, help="rounds of each case in a start (7)")
    parser.add_argument("--model", action="append", choices=NAMES, help="one model (all); may be repeated")
    parser.add_argument("--no-reference", action="store_true", help="measure only kvplane, without ratios")
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds; prints, writes nothing")
    parser.add_argument("--goals", action="store_true", help="the cases that have a goal")
    parser.add_argument("--minutes", type=float, default=None, help="begin no part later; the next run continues")
    given = parser.parse_args()
    plan = Plan(models=tuple(given.model or NAMES), reference=not given.no_reference)
    if given.quick:
        plan = replace(plan, **QUICK)
    if given.goals:
        plan = replace(plan, **GOALS)
    if given.rounds:
        plan = replace(plan, rounds=given.rounds)
    commit = _commit()
    parts = Parts(plan, 1 if given.quick or given.goals else given.starts, KEPT / ("goals" if given.goals else "all"))
    if not given.quick:
        parts.load(commit)
    if not parts.run(given.minutes):
        print(f"{len(parts.found)} of {len(parts.names)} parts are measured; run the same command again to continue")
        return
    found = report.Report.of(plan, parts.starts())
    if not given.quick:
        found.write(RESULTS, "ahead" if given.goals else "peer")
        history.add(RESULTS / "history.md", found, commit)
        (RESULTS / "ahead.svg").write_text(history.chart(found.cells), encoding="utf-8")
        parts.forget()
    print(found.text())


class Parts:
    """The parts of a run, in the order in which they are measured; what was measured outlives this process."""

    def __init__(self, plan: Plan, starts: int, folder: Path) -> None:
        self._plan, self._starts, self._folder = plan, starts, folder
        self.names = [(start, model) for start in range(starts) for model in plan.models]
        self.found: dict[tuple[int, str], report.Found] = {}

    def load(self, commit: str) -> None:
        """Read the parts of an earlier run. Ends the process if they are of another commit or plan."""
        about = {"commit": commit, "plan": json.loads(json.dumps(asdict(self._plan))), "starts": self._starts}
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / "about.json"
        if path.exists() and json.loads(path.read_text(encoding="utf-8")) != about:
            sys.exit(f"{self._folder} has parts of another commit or plan: remove the folder")
        path.write_text(json.dumps(about), encoding="utf-8")
        for name in self.names:
            if self._path(name).exists():
                self.found[name] = json.loads(self._path(name).read_text(encoding="utf-8"))

    def run(self, minutes: float | None, one: Callable[[Plan], report.Found] | None = None) -> bool:
        """Measure the missing parts. Returns whether all are there; False if the time is over."""
        ends = None if minutes is None else time.monotonic() + 60 * minutes
        for name in self.names:
            if name in self.found:
                continue
            if ends is not None and time.monotonic() > ends:
                return False
            self.found[name] = (one or one_start)(replace(self._plan, models=(name[1],)))
            if self._folder.exists():
                self._path(name).write_text(json.dumps(self.found[name]), encoding="utf-8")
        return True

    def starts(self) -> list[report.Found]:
        """What each process start found, of all models."""
        each = [[self.found[start, model] for model in self._plan.models] for start in range(self._starts)]
        return [
            {
                "rounds": [one for found in of_start for one in found["rounds"]],
                "load_average": [of_start[0]["load_average"][0], of_start[-1]["load_average"][-1]],
                "reference": of_start[0]["reference"],
            }
            for of_start in each
        ]

    def forget(self) -> None:
        """Remove what is kept."""
        shutil.rmtree(self._folder)

    def _path(self, name: tuple[int, str]) -> Path:
        return self._folder / f"{name[0]}-{name[1]}.json"


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=7"]
    return subprocess.run(command, cwd=RESULTS, capture_output=True, text=True, check=True).stdout.strip()


def one_start(plan: Plan) -> report.Found:
    """All rounds of a process start, in a process of its own; whatever it prints does not matter."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, "-m", "tests.bench.peer.start", str(path)]
        subprocess.run(command, input=json.dumps(asdict(plan)), text=True, check=True)
        found: report.Found = json.loads(path.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    main()
