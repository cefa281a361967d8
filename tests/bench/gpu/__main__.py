"""Figures of the kernels on one GPU, in parts that fit into short leases of a machine.

python -m tests.bench.gpu --only correct            every operation against float64, in several processes
python -m tests.bench.gpu --only moving decoding    some figures; kernels are compiled first, several at a time
python -m tests.bench.gpu                           checks, measures, writes tests/bench/results/gpu.{md,json}
python -m tests.bench.gpu --tiny                    the same on a CPU in Triton's interpreter: no figure means anything

Results are written after each figure. --cache keeps compiled kernels in a folder for the next lease.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton

from kvplane_worker.ops.triton_ops import compiles
from kvplane_worker.ops.triton_ops.launch import Launch
from tests.bench.gpu import correct, decoding, limits, moving, serving, together
from tests.bench.gpu.figures import FULL, TINY, Figure, Sizes
from tests.bench.gpu.timing import Clock, DryClock

MEASURED = {"moving": moving, "decoding": decoding, "serving": serving, "together": together}
PARTS = ("correct", *MEASURED)
INTERPRETED = "CPU, interpreted: NO FIGURE COUNTS"
Part = Callable[[Clock, Sizes, limits.Limits], Iterator[Figure]]
RESULTS = Path(__file__).parents[1] / "results"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="on a CPU, with TRITON_INTERPRET=1 in the environment")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run, in this order")
    parser.add_argument("--cache", type=Path, help="folder of compiled kernels, kept between runs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of gpu.md and gpu.json")
    asked = parser.parse_args()
    if not asked.tiny and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; --tiny tries the script on a CPU")
    sizes, device = (TINY, torch.device("cpu")) if asked.tiny else (FULL, torch.device("cuda:0"))
    if asked.cache:
        os.environ["TRITON_CACHE_DIR"] = str(asked.cache.absolute())
    wrong = list(said(correct.failures(device, sizes))) if "correct" in asked.only else []
    parts = [part for name in asked.only if name in MEASURED for part in MEASURED[name].PARTS]
    if parts:
        wrong += measure(parts, Run(device, sizes, asked.out, (1, 1) if asked.tiny else (10, 5), tuple(wrong)))
    return 1 if wrong else 0


def said(lines: Iterable[str]) -> Iterator[str]:
    """Print each line when it comes."""
    for line in lines:
        print(f"WRONG: {line}", file=sys.stderr, flush=True)
        yield line


@dataclass(frozen=True)
class Run:
    """Where and how much is measured: device, sizes, folder of results, runs and rounds; and what was wrong before."""

    device: torch.device
    sizes: Sizes
    out: Path
    repeats: tuple[int, int]
    wrong: tuple[str, ...] = ()


def measure(parts: Sequence[Part], run: Run) -> list[str]:
    """Compile the kernels of all parts, then measure; the tables are written after each figure. A part that fails does
    not end the others: returns a line for each.
    """
    begun = time.monotonic()
    clock, figures, failed = Clock(run.device, *run.repeats), [], []
    if run.device.type == "cuda":
        print(f"{compiled_first(parts, run)} kernels compiled in {time.monotonic() - begun:.0f} s", flush=True)
    machine = limits.measure(clock, run.sizes)
    for part in parts:
        try:
            for figure in part(clock, run.sizes, machine):
                print(figure.row, flush=True)
                figures.append(figure)
                write(run, machine, figures, time.monotonic() - begun)
        except Exception as error:
            traceback.print_exc()
            failed.append(f"{part.__module__}.{part.__name__}: {type(error).__name__}: {error}")
    return failed


def compiled_first(parts: Sequence[Part], run: Run) -> int:
    """Go through the figures once without running a kernel: each launch is only compiled, several at a time. What
    fails here fails again, and is reported, where it is measured.
    """
    dry = DryClock(run.device, 1, 1)
    ran, Launch.run = Launch.run, Launch.compile  # type: ignore[method-assign]
    try:
        with (
            compiles.WATCH.warming() as kernels,
            ThreadPoolExecutor(os.cpu_count()) as pool,
            triton.AsyncCompileMode(pool),
        ):
            machine = limits.measure(dry, run.sizes)
            for part in parts:
                with suppress(Exception):
                    list(part(dry, run.sizes, machine))
    finally:
        Launch.run = ran  # type: ignore[method-assign]
    return len(kernels)


def write(run: Run, machine: limits.Limits, figures: list[Figure], seconds: float) -> None:
    """Both forms of the table."""
    device, out = run.device, run.out
    about = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else INTERPRETED,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "seconds": round(seconds),
        **({"WRONG RESULTS": len(run.wrong)} if run.wrong else {}),
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.md").write_text(table(about, machine, figures), encoding="utf-8")
    data = {**about, "limits": [asdict(each) for each in machine.all()], "figures": [asdict(each) for each in figures]}
    (out / "gpu.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def table(about: dict[str, object], machine: limits.Limits, figures: Iterable[Figure]) -> str:
    lines = ["# Kernels on one GPU", "", ", ".join(f"{name} {value}" for name, value in about.items()), ""]
    lines += ["| limit | measured |", "|---|---|"]
    lines += [f"| {each.name} | {limit_text(each.value)} |" for each in machine.all()]
    lines += ["", "| figure | measured | part of the limit | goal | |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *(figure.row for figure in figures)]) + "\n"


def limit_text(value: float) -> str:
    return f"{value / 1e9:.1f} GB/s" if value > 1 else f"{value * 1e6:.1f} µs"


if __name__ == "__main__":
    sys.exit(main())
