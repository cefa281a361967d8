"""Figures of the kernels on one GPU, within 8 minutes.

python -m tests.bench.gpu            checks every operation, measures, writes tests/bench/results/gpu.{md,json}
python -m tests.bench.gpu --tiny     the same at tiny size, on a CPU in Triton's interpreter: no figure means anything
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch
import triton

from tests.bench.gpu import correct, decoding, limits, moving, together
from tests.bench.gpu.figures import FULL, TINY, Figure
from tests.bench.gpu.timing import Clock

INTERPRETED = "CPU, interpreted: NO FIGURE COUNTS"
RESULTS = Path(__file__).parents[1] / "results"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="on a CPU, with TRITON_INTERPRET=1 in the environment")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of gpu.md and gpu.json")
    asked = parser.parse_args()
    if not asked.tiny and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; --tiny tries the script on a CPU")
    sizes, device = (TINY, torch.device("cpu")) if asked.tiny else (FULL, torch.device("cuda:0"))
    begun = time.monotonic()
    if wrong := correct.failures(device, sizes):
        print("\n".join(["WRONG RESULTS, nothing is measured:", *wrong]), file=sys.stderr)
        return 1
    clock = Clock(device, *((1, 1) if asked.tiny else (10, 5)))
    machine = limits.measure(clock, sizes)
    figures = []
    for part in (moving, decoding, together):
        for figure in part.figures(clock, sizes, machine):
            print(figure.row, flush=True)
            figures.append(figure)
    write(asked.out, device, machine, figures, time.monotonic() - begun)
    return 0


def write(out: Path, device: torch.device, machine: limits.Limits, figures: list[Figure], seconds: float) -> None:
    """Both forms of the table."""
    about = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else INTERPRETED,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "seconds": round(seconds),
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
