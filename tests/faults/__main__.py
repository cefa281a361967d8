"""python -m tests.faults --faults 200 --seed 1: a campaign of random faults; the last line says what it came to."""

from __future__ import annotations

import argparse
import sys

from tests.faults.campaign import run_campaign


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    report = run_campaign(given.faults, given.seed, lambda line: print(line, flush=True))
    if report.finding:
        print(f"{report.finding}\nagain: make faults FAULTS={report.faults.total()} SEED={given.seed}")
    print(report.line)
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
