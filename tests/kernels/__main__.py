"""Run the contract: `python -m tests.kernels [operation ...] [--seed N | --seeds FIRST:LAST]`."""

from __future__ import annotations

import argparse
import sys
import time

import torch

from tests.kernels.contract import CHECKS, run
from tests.kernels.subjects import SUBJECTS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels", description=__doc__)
    parser.add_argument("operations", nargs="*", metavar="operation", help=", ".join(CHECKS))
    parser.add_argument("--seed", type=int, help="one seed alone")
    parser.add_argument("--seeds", default="0:400", metavar="FIRST:LAST", help="a range (default: %(default)s)")
    parser.add_argument("--backend", default="torch", choices=sorted(SUBJECTS))
    parser.add_argument("--device", default="cpu", help="cpu, cuda:0 (default: %(default)s)")
    asked = parser.parse_args()
    if unknown := [name for name in asked.operations if name not in CHECKS]:
        parser.error(f"unknown operation {', '.join(unknown)}; operations are {', '.join(CHECKS)}")
    first, _, last = asked.seeds.partition(":")
    seeds = range(int(first), int(last)) if asked.seed is None else [asked.seed]
    subject = SUBJECTS[asked.backend](asked.device)
    torch.set_num_threads(1)  # cases are small; threads would slow them down
    failed = 0
    for operation in asked.operations or CHECKS:
        begun = time.monotonic()
        failures = run(subject, operation, seeds)
        failed += len(failures)
        print(f"{operation}: {len(seeds)} cases, {len(failures)} failed, {time.monotonic() - begun:.1f} s")
        print("".join(f"  {line}\n" for line in failures[:20]), end="")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
