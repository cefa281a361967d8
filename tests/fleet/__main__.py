"""python -m tests.fleet --faults 12 --seed 1: three services, eight engines under faults, by kind of ownership.

Prints a line per fault and a table, and exits with 1 if a rule was broken. tests/fleet/README.md says what is checked.
"""

from __future__ import annotations

import argparse
import signal
import sys
from random import Random
from statistics import median

from tests.fleet.campaign import run
from tests.fleet.kinds import FAULTS
from tests.fleet.load import Report
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
    parser.add_argument("--no-routers", action="store_true")
    parser.add_argument("--network", choices=["namespaces", "proxies"], default="", help="namespaces where they can be")
    given = parser.parse_args()
    kinds = [one for one in FAULTS if not given.kinds or one.__name__ in given.kinds]
    reports = list[Report]()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that every process and namespace is ended
    for ownership in given.ownership:
        rng = Random(f"{given.seed} {ownership}")
        drawn = [kind for _ in range(-(-given.faults // len(kinds))) for kind in rng.sample(kinds, len(kinds))]
        shape = Shape(ownership, given.services, given.engines, network=given.network, routers=not given.no_routers)
        reports.append(run(shape, drawn[: given.faults], given.seed, lambda line: print(line, flush=True)))
    print(*table(reports), "", *table_of_routers(reports), "", sep="\n")
    findings = [f"{report.ownership}: {finding}" for report in reports for finding in report.findings]
    print(*findings, *(report.line for report in reports), sep="\n")
    return 1 if findings else 0


def table(reports: list[Report]) -> list[str]:
    """Faults, and seconds from the repair to the last answer (median, longest), by kind of fault and ownership."""
    head = "| fault | " + " | ".join(f"{report.ownership} | median s | longest s" for report in reports) + " |"
    lines = [head, "|---|" + "--:|--:|--:|" * len(reports)]
    for name in sorted({name for report in reports for name in report.faults}):
        times = [report.recovered_s.get(name) or [0.0] for report in reports]
        cells = [
            f"{report.faults[name]} | {median(some):.1f} | {max(some):.1f}"
            for report, some in zip(reports, times, strict=True)
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def table_of_routers(reports: list[Report]) -> list[str]:
    """How two routers compared, by kind of fault, over all kinds of ownership."""
    all_counts = [(name, counts) for report in reports for name, counts in report.routers.items()]
    if not all_counts:
        return ["no routers"]
    head = "| fault | decisions | chosen otherwise | hits claimed otherwise | one did not answer "
    lines = [f"{head}| true again: median s | longest s | then chosen otherwise |", "|---|" + "--:|" * 7]
    for name in [*sorted({name for name, _ in all_counts}), ""]:
        some = [counts for one, counts in all_counts if not name or one == name]
        decisions, chosen, hits, silent, quiet, then = (
            sum(getattr(one, each) for one in some)
            for each in "decisions chosen_otherwise hits_otherwise no_answer quiet quiet_otherwise".split()
        )
        times = [each for one in some for each in one.agreed_s] or [0.0]
        shares = (
            f"{chosen} ({100 * chosen / max(1, decisions):.1f} %) | {hits} ({100 * hits / max(1, decisions):.1f} %)"
        )
        rest = f"{silent} | {median(times):.1f} | {max(times):.1f} | {then} of {quiet}"
        lines.append(f"| {name or 'all'} | {decisions} | {shares} | {rest} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
