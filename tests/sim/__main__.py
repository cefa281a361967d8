"""`python -m tests.sim --seeds N --base M`: run N seeds from M in `--jobs` processes; exit 1 if one fails.

`--record` appends the result to the table of campaigns in this folder, `--twins` writes the table of the twins.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from tests.sim import records
from tests.sim.campaign import FIRST_SEED, campaign, default_jobs, seeds_until_caught
from tests.sim.world import Outcome

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- twins: written by `python -m tests.sim --twins` -->\n", "<!-- end of twins -->\n"


def show(outcome: Outcome, kind: dict[str, bool]) -> None:
    """Print a run with findings, and the command that repeats it."""
    if outcome.findings:
        faults = ", ".join(outcome.faults.elements())
        print(f"seed {outcome.seed} after {outcome.steps} steps ({faults})")
        for finding in outcome.findings[:10]:
            print(f"    {finding[:1000]}")
        options = "".join(f"--{name} " for name, is_set in kind.items() if is_set)
        way = f"python -m tests.sim {options}--seeds 1 --base" if options else "make sim SEEDS=1 SEED_BASE"
        print(f"    again: {way}={outcome.seed}", flush=True)


def table(most: int) -> str:
    """Table of the twins, with the number of seeds that each survives."""
    lines = ["| twin | seeds until caught | by the rule |\n", "|---|---|---|\n"]
    for name in FIRST_SEED:
        number, rule = seeds_until_caught(name, range(1, most + 1))
        lines.append(f"| {name} | {number or f'not within {most}'} | {rule} |\n")
    return "".join(lines)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--base", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=default_jobs())
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--twins", action="store_true")
    parser.add_argument("--hangs", action="store_true", help="parts hang instead of half of the other faults")
    parser.add_argument("--mirrors", action="store_true", help="the engine of one replica decides itself")
    parser.add_argument("--tiers", action="store_true", help="replicas have host and disk tiers")
    given = parser.parse_args()
    if given.twins:
        text = README.read_text()
        before, after = text.partition(BEGIN)[0], text.partition(END)[2]
        README.write_text(before + BEGIN + table(given.seeds) + END + after)
        return 0
    seeds = range(given.base, given.base + given.seeds)
    kind = {"hangs": given.hangs, "mirrors": given.mirrors, "tiers": given.tiers}
    totals = campaign(seeds, partial(show, kind=kind), given.jobs, **kind)
    if given.record:
        records.append(seeds, totals)
    print(f"seeds {seeds[0]}..{seeds[-1]}: ", end="")
    print(", ".join(f"{kind} {count}" for kind, count in totals.faults.most_common()))
    print(totals)
    return 0 if totals.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
