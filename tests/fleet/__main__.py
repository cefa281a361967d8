"""python -m tests.fleet --faults 12 --seed 1: three services, eight engines under faults, by kind of ownership.

Prints a line per fault and a table, and exits with 1 if a rule was broken. tests/fleet/README.md says what is checked.
"""

from __future__ import annotations

import argparse
import sys
from random import Random

from tests.fleet.campaign import FAULTS, Report, run
from tests.fleet.processes import Shape
from tests.fleet.tables import OWNERSHIP


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fleet", description=__doc__)
    parser.add_argument("--faults", type=int, default=len(FAULTS), help="per kind of ownership")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ownership", nargs="*", choices=OWNERSHIP, default=OWNERSHIP)
    parser.add_argument("--kinds", nargs="*", choices=[one.__name__ for one in FAULTS], default=[], help="only these")
    parser.add_argument("--services", type=int, default=3)
    parser.add_argument("--engines", type=int, default=8)
    given = parser.parse_args()
    kinds = [one for one in FAULTS if not given.kinds or one.__name__ in given.kinds]
    reports = list[Report]()
    for ownership in given.ownership:
        rng = Random(f"{given.seed} {ownership}")
        drawn = [kind for _ in range(-(-given.faults // len(kinds))) for kind in rng.sample(kinds, len(kinds))]
        shape = Shape(ownership, given.services, given.engines)
        reports.append(run(shape, drawn[: given.faults], given.seed, lambda line: print(line, flush=True)))
    print(*table(reports), sep="\n")
    findings = [f"{report.ownership}: {finding}" for report in reports for finding in report.findings]
    print(*findings, *(report.line for report in reports), sep="\n")
    return 1 if findings else 0


def table(reports: list[Report]) -> list[str]:
    """Faults and the longest recovery in seconds, by kind of fault and ownership."""
    head = "| fault | " + " | ".join(f"{report.ownership} | recovered within s" for report in reports) + " |"
    lines = [head, "|---|" + "--:|--:|" * len(reports)]
    for name in sorted({name for report in reports for name in report.faults}):
        cells = [f"{report.faults[name]} | {report.recovered_s.get(name, 0.0):.1f}" for report in reports]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
