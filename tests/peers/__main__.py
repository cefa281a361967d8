"""python -m tests.peers --requests 150 --seed 1: the campaign of peers, a line per kind; then the planted faults.

The last line counts tokens that differ from the dense model's, and leaks. The exit status is 1 unless both are 0, no
wrong copy was accepted, at least 95 % of what only peers have is loaded from sound ones, and 60 % of what they hold
while others are killed, and every planted fault was found. With --soak 30 prompts move for 30 minutes, over two
services: the exit status is 1 if anything grows.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time

import torch

from tests.peers import disaggregated
from tests.peers.campaign import HAS_NIXL, OF_TWO, OVER_NIXL, Outcome, kinds, kinds_over_nixl, plants, run
from tests.peers.soak import soak

LEAST_LOADED, LEAST_UNDER_CHURN = 0.95, 0.6
CHURN = ("killed", "restarted", "cut")
PLANT_REQUESTS, PLANT_SEEDS = 40, 6


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=60, help="of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="look for growth instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # refused copies are expected here
    return soaked(options) if options.soak else campaign(options)


def soaked(options: argparse.Namespace) -> int:
    """Look for what grows."""
    verdict, outcomes = soak(options.soak, options.seed, lambda line: print(line, flush=True))
    print(verdict)
    for outcome in outcomes:
        print("\n".join([outcome.line(), *outcome.wrong[:3], *outcome.leaks[:3]]))
    print(f"grows: {', '.join(verdict.leaks) or 'nothing'}")
    return int(bool(verdict.leaks) or not all(one.is_good for one in outcomes))


def campaign(options: argparse.Namespace) -> int:
    """Run all kinds, and the planted faults."""
    outcomes = list[Outcome]()
    if not HAS_NIXL:
        print("NIXL is not installed: kinds over it are not run")
    for kind in (*kinds(), *(kinds_over_nixl() if HAS_NIXL else ())):
        began = time.monotonic()
        outcomes.append(run(kind, options.requests, options.seed))
        print(f"{outcomes[-1].line()} ({time.monotonic() - began:.0f} s)", flush=True)
        for problem in (*outcomes[-1].wrong[:3], *outcomes[-1].leaks[:3]):
            print(f"  {problem}")
    for kind in disaggregated.KINDS:
        began = time.monotonic()
        outcomes.append(disaggregated.run(kind, options.requests, options.seed))
        outcomes[-1].kind = f"prefill, {kind}"
        print(f"{outcomes[-1].line()} ({time.monotonic() - began:.0f} s)", flush=True)
    missed = [name for name in plants() if not found(name, options)]
    named = ("sound", "sound" + OVER_NIXL, "sound" + OF_TWO)
    sound = [one for one in outcomes if one.kind in named or one.kind.startswith("prefill, sound")]
    share = min(one.held_share if one.held else one.loaded / max(1, one.only_peers) for one in sound)
    print(f"{share:.1%} of the tokens that only sound peers have are loaded, at least {LEAST_LOADED:.0%} expected")
    churned = min(one.held_share for one in outcomes if one.kind.startswith(CHURN))
    print(f"{churned:.1%} of those that they held while others were killed, at least {LEAST_UNDER_CHURN:.0%} expected")
    print(f"planted faults not found: {', '.join(missed) or 'none'}")
    differ, leaks = sum(one.differing for one in outcomes), sum(len(one.leaks) for one in outcomes)
    wrong = sum(len(one.wrong) for one in outcomes)
    print(f"{wrong} wrong copies accepted")
    print(f"{differ} tokens differ, {leaks} leaks")
    return int(bool(differ or leaks or wrong or missed or share < LEAST_LOADED or churned < LEAST_UNDER_CHURN))


def found(name: str, options: argparse.Namespace) -> bool:
    """Whether a planted fault is found with one of a few seeds."""
    for seed in range(options.seed, options.seed + PLANT_SEEDS):
        outcome = plants()[name](PLANT_REQUESTS, seed)
        if not outcome.is_good:
            print(f"planted: {name}: found, {outcome.differing} tokens differ, {len(outcome.wrong)} wrong copies")
            return True
    return False


if __name__ == "__main__":
    sys.exit(main())
