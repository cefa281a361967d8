"""python -m tests.engine --requests 2000 --seed 1: the large stress, with a line per mix and a summary.

The pages belong to another process: shared memory on a CPU, CUDA IPC on a GPU. Triton on a CPU needs
TRITON_INTERPRET=1. `--backend cudnn --dtype bfloat16` computes every row that it can by cuDNN, in spans of 192 tokens;
on a CPU torch's attention takes the place of cuDNN.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

import torch

from tests.engine.backends import CUDNN, Place, default_backend, lender
from tests.engine.reference.config import HALVES
from tests.engine.stress import KINDS, MIXES, Report, in_pages_of, run_mix


def line(name: str, report: Report, seconds: float) -> str:
    counts = report.counts
    return (
        f"{name:<25} {report.requests:>5} requests ({report.long} long) {counts.generated_tokens:>6} tokens"
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
    parser.add_argument("--backend", help="of operations on pages (default: torch on the CPU, triton on a GPU)")
    halves = {dtype.value: dtype for dtype in HALVES}
    parser.add_argument("--dtype", choices=halves, help="16-bit pages and queries, where a mix has no 8-bit pages")
    parser.add_argument("--kinds", action="store_true", help="a model per kind of cache group, with long requests")
    parser.add_argument("--canary", type=float, default=0.0, help="share of the requests whose hits are compared")
    parser.add_argument("--only", nargs="*", default=[], help="names of mixes or kinds")
    given = parser.parse_args()
    backend = given.backend or default_backend(given.device)
    mixes = [mix for mix in (KINDS if given.kinds else MIXES) if not given.only or mix.name in given.only]
    mixes = [in_pages_of(halves[given.dtype], mix) for mix in mixes] if given.dtype else mixes
    mixes = [replace(mix, config=replace(mix.config, canary_rate=given.canary)) for mix in mixes]
    torch.set_num_threads(1)
    total, began = Report(), time.monotonic()
    with lender() as other:
        for number, mix in enumerate(mixes):
            started = time.monotonic()
            share = given.requests // len(mixes) + (number < given.requests % len(mixes))
            report = run_mix(mix, share, given.seed, place=Place(given.device, backend, other))
            total.add(report)
            print(line(mix.name, report, time.monotonic() - started), flush=True)
    print(line(f"{len(mixes)} mixes", total, time.monotonic() - began))
    if given.canary:
        print(f"canary: {total.checks} hits compared, equal within {total.farthest:.1e}")
    complaints = total.complaints
    if backend == CUDNN:
        print(f"{total.by_cudnn} rows by cuDNN")
        complaints += [] if total.by_cudnn else ["cuDNN computed no row"]
    print(f"{len(total.tokens)} distinct tokens; {'; '.join(complaints) or 'nothing differs'}")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
