"""Figures of the kernels on one GPU, in parts that fit into short leases of a machine.

python -m tests.bench.gpu --only correct            every operation against float64, in several processes
python -m tests.bench.gpu --only moving decoding    some figures; kernels are compiled first, several at a time
python -m tests.bench.gpu                           checks, measures, writes tests/bench/results/gpu.{md,json}
python -m tests.bench.gpu --only causes             an experiment, not part of a whole run
python -m tests.bench.gpu --tiny                    the same on a CPU in Triton's interpreter: no figure means anything

Results are written after each figure. --cache keeps compiled kernels in a folder for the next lease.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import triton

from kvplane_kernels.triton_ops import compiles
from kvplane_kernels.triton_ops.launch import Launch
from tests.bench.gpu import causes, correct, decoding, limits, moving, processes, serving, together
from tests.bench.gpu.figures import FULL, TINY, Figure, Sizes
from tests.bench.gpu.timing import Clock, DryClock

MEASURED = {
    "moving": moving,
    "decoding": decoding,
    "serving": serving,
    "together": together,
    "processes": processes,
}
ALL = ("correct", *MEASURED)
EXPERIMENTS = {"causes": causes}
INTERPRETED = "CPU, interpreted: NO FIGURE COUNTS"
Part = Callable[[Clock, Sizes, limits.Limits], Iterator[Figure]]
# Bytes per second of a GPU's memory as its vendor states them.
STATED = {"NVIDIA H100 80GB HBM3": 3.35e12, "NVIDIA H200": 4.8e12}
SMI = "nvidia-smi --query-gpu=clocks.sm,clocks.mem,temperature.gpu,power.draw --format=csv,noheader,nounits -lms 500"
RESULTS = Path(__file__).parents[1] / "results"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="on a CPU, with TRITON_INTERPRET=1 in the environment")
    parser.add_argument(
        "--only", nargs="+", choices=(*ALL, *EXPERIMENTS), default=ALL, help="parts to run, in this order"
    )
    parser.add_argument("--cache", type=Path, help="folder of compiled kernels, kept between runs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of gpu.md and gpu.json")
    asked = parser.parse_args()
    if not asked.tiny and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; --tiny tries the script on a CPU")
    sizes, device = (TINY, torch.device("cpu")) if asked.tiny else (FULL, torch.device("cuda:0"))
    if asked.cache:
        os.environ["TRITON_CACHE_DIR"] = str(asked.cache.absolute())
    wrong = list(said(correct.failures(device, sizes))) if "correct" in asked.only else []
    modules = MEASURED | EXPERIMENTS
    parts = [part for name in asked.only if name in modules for part in modules[name].PARTS]
    if parts:
        wrong += measure(parts, Run(device, sizes, asked.out, (1, 1) if asked.tiny else (10, 5), tuple(wrong)))
    return 1 if wrong else 0


def said(lines: Iterable[str]) -> Iterator[str]:
    """Print each line when it comes."""
    for line in lines:
        print(f"WRONG: {line}", file=sys.stderr, flush=True)
        yield line


class Watched:
    """The clocks, temperature and power of a GPU while it is measured, read by the driver's tool."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lines: list[list[float]] = []

    def start(self, device: torch.device) -> None:
        """Read them twice a second, on a thread."""
        if device.type == "cuda" and shutil.which("nvidia-smi"):
            self._process = subprocess.Popen(SMI.split(), stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._read, args=(self._process,), daemon=True).start()

    def stop(self) -> None:
        if self._process:
            self._process.terminate()
            self._process.wait()

    @property
    def text(self) -> str:
        """The ranges so far."""
        if not self._lines:
            return "not read"
        columns = list(zip(*self._lines, strict=True))
        ranges = [f"{min(column):.0f}-{max(column):.0f}" for column in columns]
        return "SM {} MHz; memory {} MHz; {} °C; {} W".format(*ranges)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with suppress(ValueError):
                self._lines.append([float(part) for part in line.split(",")])


@dataclass(frozen=True)
class Run:
    """Where and how much is measured: device, sizes, folder of results, runs and rounds; and what was wrong before."""

    device: torch.device
    sizes: Sizes
    out: Path
    repeats: tuple[int, int]
    wrong: tuple[str, ...] = ()
    watched: Watched = field(default_factory=Watched)


def measure(parts: Sequence[Part], run: Run) -> list[str]:
    """Compile the kernels of all parts, then measure; the tables are written after each figure. A part that fails does
    not end the others: returns a line for each.
    """
    begun = time.monotonic()
    clock, figures, failed = Clock(run.device, *run.repeats), [], []
    run.watched.start(run.device)
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
    run.watched.stop()
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
        "clocks": run.watched.text,
        **({"WRONG RESULTS": len(run.wrong)} if run.wrong else {}),
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.md").write_text(table(about, machine, figures), encoding="utf-8")
    data = {**about, "limits": [asdict(each) for each in machine.all()], "figures": [asdict(each) for each in figures]}
    (out / "gpu.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def table(about: dict[str, object], machine: limits.Limits, figures: Iterable[Figure]) -> str:
    lines = ["# Kernels on one GPU", "", ", ".join(f"{name} {value}" for name, value in about.items()), ""]
    lines += ["| limit | measured |", "|---|---|"]
    stated = STATED.get(str(about["device"]), 0.0)
    lines += [f"| {each.name} | {limit_text(each.value, stated)} |" for each in machine.all()]
    lines += ["", "| figure | measured | part of the limit | goal | |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *(figure.row for figure in figures)]) + "\n"


def limit_text(value: float, stated: float) -> str:
    """A limit; those of the GPU's memory also as a part of what the vendor states."""
    if value <= 1:
        return f"{value * 1e6:.1f} µs"
    part = f", {value / stated:.2f} of the vendor's {stated / 1e12} TB/s" if stated and value > stated / 4 else ""
    return f"{value / 1e9:.1f} GB/s{part}"


if __name__ == "__main__":
    sys.exit(main())
