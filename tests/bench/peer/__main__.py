"""Measures kvplane and the reference, and writes peer.md, peer.json and ahead.svg in tests/bench/results; a row per
model is added to history.md.

make bench-peer                     all cases, 3 process starts of 7 rounds
make bench-peer PEER="--quick"      a look: fewer cases and rounds, nothing is written
make bench-peer PEER="--goals"      the cases that have a goal, 1 process start of 5 rounds; writes ahead.md for peer.md
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.bench.peer import history, report
from tests.bench.peer.models import MODELS
from tests.bench.peer.plan import Plan

RESULTS = Path(__file__).parents[1] / "results"
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
    given = parser.parse_args()
    plan = Plan(models=tuple(given.model or NAMES), reference=not given.no_reference)
    if given.quick:
        plan = replace(plan, **QUICK)
    if given.goals:
        plan = replace(plan, **GOALS)
    if given.rounds:
        plan = replace(plan, rounds=given.rounds)
    starts = [one_start(plan) for _ in range(1 if given.quick or given.goals else given.starts)]
    found = report.Report.of(plan, starts)
    if not given.quick:
        found.write(RESULTS, "ahead" if given.goals else "peer")
        history.add(RESULTS / "history.md", found, _commit())
        (RESULTS / "ahead.svg").write_text(history.chart(found.cells), encoding="utf-8")
    print(found.text())


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
