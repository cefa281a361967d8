"""`python -m tests.core.page_campaign --runs N --base S`: random engines on every mix, and the cells that they reached.

Exit 1 when a run breaks a rule, or when a cell that can be reached was reached fewer than 100 times (in proportion less
for fewer than 20,000 runs). `--twins` says within how many seeds each planted fault is found. `--specs N` plays N
random specs instead (`spec_campaign`), with a table of what was refused, accepted and hit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections import Counter
from functools import partial

from tests.core import spec_campaign
from tests.core.permissions import LEAST, Cell, Cells, cells
from tests.core.test_page_contents import ALL_MIXES, SPLIT_MIXES, run
from tests.twins import weakened

FULL = 20_000  # runs of a whole campaign
MOST_SEEDS = 300
# Planted in the rules of split pages: found in longer lives with more deaths of engines and services.
SPLIT_PLANTED = ("keys under a state", "stamps under a state", "stamp of a divided state")
long_lives = partial(run, steps=60, deaths=15)
PLANTED = (
    "state of rejected drafts",
    "checkpoint of rejected drafts",
    "copy of an evicted state",
    "skipped blocks released during a load",
    "load before launches",
    "load behind writers only",
    "load into a block of the hit",
    "load before stamps",
    "zero after load",
    "new life during a load",
    "failed orders forgotten",
    "image loses blocks behind the computed tokens",
    "limit of a hit counts what is left out",
    "withdrawn keys stay away",
)


def run_seeds(seeds: range) -> tuple[Counter[Cell], list[str]]:
    """All mixes with each seed: cells reached, and what was broken."""
    counted, broken = Cells(), list[str]()
    for seed in seeds:
        for mix in ALL_MIXES:
            try:
                run(mix, seed, cells=counted)
            except Exception as error:
                broken.append(f"run({mix!r}, {seed}): {type(error).__name__}: {str(error)[:200]}")
    return counted.counts, broken


def seeds_until_found(twin: str, base: int = 1) -> int:
    """Seeds, from `base` on, until some mix breaks a rule; 0 = none did."""
    mixes, play = (SPLIT_MIXES, long_lives) if twin in SPLIT_PLANTED else (ALL_MIXES, run)
    with weakened(twin):
        for count in range(1, MOST_SEEDS + 1):
            for mix in mixes:
                try:
                    play(mix, base + count - 1)
                except AssertionError:
                    return count
    return 0


def report(counts: Counter[Cell], runs: int) -> bool:
    """Print the table; whether every cell was reached often enough."""
    table, least = cells(), max(1, LEAST * min(runs, FULL) // FULL)
    low = [cell for cell, reason in table.items() if not reason and counts[cell] < least]
    surprises = [cell for cell, reason in table.items() if reason and counts[cell]]
    for cell, reason in table.items():
        print(f"{counts[cell]:>9}  {' > '.join(cell)}{f'   ({reason})' if reason else ''}")
    reachable = sum(not reason for reason in table.values())
    print(f"{len(table)} cells, {reachable} to reach, {reachable - len(low)} reached {least} times or more")
    for cell in low:
        print(f"too seldom: {' > '.join(cell)}: {counts[cell]}")
    for cell in surprises:
        print(f"reached, and said to be impossible: {' > '.join(cell)}")
    return not low and not surprises


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=FULL)
    parser.add_argument("--base", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--twins", action="store_true")
    parser.add_argument("--specs", type=int, default=0)
    chosen = parser.parse_args()
    if chosen.specs:
        sys.exit(not spec_campaign.main(range(chosen.base, chosen.base + chosen.specs), chosen.jobs))
    if chosen.twins:
        found = {twin: seeds_until_found(twin, chosen.base) for twin in (*PLANTED, *SPLIT_PLANTED)}
        found |= {
            twin: spec_campaign.specs_until_found(twin, MOST_SEEDS, chosen.base) for twin in spec_campaign.PLANTED
        }
        for twin, seed in found.items():
            print(f"{twin}: {f'{seed} seeds' if seed else f'not within {MOST_SEEDS}'}", flush=True)
        sys.exit(not all(found.values()))
    seeds = -(-chosen.runs // len(ALL_MIXES))
    pieces = [
        range(start, min(start + 50, chosen.base + seeds)) for start in range(chosen.base, chosen.base + seeds, 50)
    ]
    counts, broken = Counter[Cell](), list[str]()
    with multiprocessing.Pool(chosen.jobs) as pool:
        for reached, found_broken in pool.imap_unordered(run_seeds, pieces):
            counts += reached
            broken += found_broken
            for line in found_broken:
                print(line, flush=True)
    is_whole = report(counts, seeds * len(ALL_MIXES))
    print(f"{seeds * len(ALL_MIXES)} runs, {len(broken)} broken")
    sys.exit(bool(broken) or not is_whole)


if __name__ == "__main__":
    main()
