"""python -m tests.faults --faults 200 --seed 1: a campaign of random faults; the last line is a summary.

python -m tests.faults --twins: run the scenario that must catch each twin, and write the table of README.md.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from tests.faults.campaign import one_thread, run_campaign
from tests.faults.cluster import PLAIN, TIERED
from tests.faults.kinds import KINDS
from tests.faults.scenarios import SCENARIOS, play
from tests.faults.tiers import TIER_KINDS

README = Path(__file__).with_name("README.md")
HEAD = "| twin | scenario | faults | caught by |\n|---|---|---|---|\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    names = sorted({kind.name for kind in (*KINDS, *TIER_KINDS)})
    parser.add_argument("--kinds", nargs="*", choices=names, default=[], help="only these")
    parser.add_argument("--tiers", action="store_true", help="a replica with a host and a disk tier, and their faults")
    parser.add_argument("--twins", action="store_true")
    given = parser.parse_args()
    if given.twins:
        return write_table()
    pool = TIERED if given.tiers else PLAIN
    report = run_campaign(given.faults, given.seed, lambda line: print(line, flush=True), pool, given.kinds)
    if report.complaints:
        print(f"again: python -m tests.faults {shlex.join(sys.argv[1:])}")
    print(*report.answers.table(), sep="\n")
    print(*(f"failed: {complaint}" for complaint in report.complaints), report.line, sep="\n")
    return 1 if report.complaints else 0


def write_table() -> int:
    """Run each scenario with its twin. Returns 0 when all twins were caught."""
    rows = []
    with one_thread():
        for scenario in SCENARIOS:
            faults, caught = play(scenario, scenario.twin)
            staged = " ".join((scenario.play.__doc__ or "").split())
            rows.append(f"| {scenario.twin} | {staged} | {faults} | {caught or 'nothing'} |\n")
            print(rows[-1], end="", flush=True)
    text, _, _ = README.read_text(encoding="utf-8").partition(HEAD)
    README.write_text(f"{text}{HEAD}{''.join(rows)}", encoding="utf-8")
    return int(any("| nothing |" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
