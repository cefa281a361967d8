"""python -m tests.engine --requests 2000 --seed 1: the large stress, with a line per mix and a summary."""

from __future__ import annotations

import argparse
import sys
import time

import torch

from tests.engine.stress import MIXES, Report, run_mix


def line(name: str, report: Report, seconds: float) -> str:
    counts = report.counts
    return (
        f"{name:<25} {report.requests:>5} requests {counts.generated_tokens:>6} tokens"
        f" | hits {counts.hits} ({counts.hit_tokens} tokens, {len(report.hit_lengths)} lengths), copies {counts.copies}"
        f" | evicted {report.evicted} preempted {counts.preempted} deferred {counts.deferred}"
        f" | drafts {counts.accepted_drafts} kept {counts.rejected_drafts} rejected"
        f" | lost launches {counts.lost_steps} restarts {len(report.kept_keys)}"
        f" | logits within {report.worst:.0e} | {report.differing} differing ({report.near_ties} near ties)"
        f" | {seconds:.0f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engine", description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="over all mixes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="device of the engine; the dense model runs on the CPU")
    given = parser.parse_args()
    torch.set_num_threads(1)
    total, began = Report(), time.monotonic()
    for number, mix in enumerate(MIXES):
        started = time.monotonic()
        share = given.requests // len(MIXES) + (number < given.requests % len(MIXES))
        report = run_mix(mix, share, given.seed, device=given.device)
        total.add(report)
        print(line(mix.name, report, time.monotonic() - started), flush=True)
    print(line(f"{len(MIXES)} mixes", total, time.monotonic() - began))
    print(f"{len(total.tokens)} distinct tokens; {'; '.join(total.complaints) or 'nothing differs'}")
    return 1 if total.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
