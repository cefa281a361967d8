"""`kvplane bench` on a service of its own: how long an engine waits for a step, by the requests that run at a time.

    python -m tests.bench.service_load [--seconds 10]

prints a table, and writes it to tests/bench/results/service_load.md and the plot of one model to
docs/reference/service_load.svg. The times are those of a clock: on a shared machine they contain the work of others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvplane_tools.cli.child import ServiceChild
from tests.bench.machine import machine_line

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
PICTURES = ROOT / "docs" / "reference"
MODELS = {"llama-3.1-8b": 1, "gpt-oss-20b": 2, "gemma-3-27b": 7}  # with their groups; the first one is plotted
WORDS = ("--requests", "1,8,64,256", "--blocks", "49152")


def loads_of(service: str, model: str, seconds: float, plot: Path) -> list[dict[str, Any]]:
    """Return what the command measured, and let it draw."""
    command = [sys.executable, "-m", "kvplane_tools", "bench", "--model", model, *WORDS, "--seconds", str(seconds)]
    command += ["--plot", str(plot), "--service", service, "-o", "json"]
    loads: list[dict[str, Any]] = json.loads(subprocess.check_output(command))["loads"]
    return loads


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each number of requests")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--pictures", type=Path, default=PICTURES)
    arguments = parser.parse_args()
    command = f"python -m tests.bench.service_load --seconds {arguments.seconds:g}"
    lines = [
        "# A service under load\n",
        f"{machine_line()}, priority {-os.nice(0)}; `{command}`\n",
        "| model | groups | requests | steps | steps/s | tokens/s | median, ms | 99 %, ms | hit | preempted |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    picture = arguments.pictures / "service_load.svg"
    with ServiceChild() as service:
        for model, groups in reversed(MODELS.items()):  # the plot of the first one is written last
            rows = [
                f"| {model} | {groups} | {one['requests']} | {one['steps']:,} | {one['steps_per_s']:,.0f} "
                f"| {one['tokens_per_s']:,.0f} | {one['median_ms']:.2f} | {one['p99_ms']:.2f} "
                f"| {one['hit_share']:.0%} | {one['preempted']:,} |"
                for one in loads_of(service.address, model, arguments.seconds, picture)
            ]
            lines[4:4] = rows
    text = "\n".join(lines) + "\n"
    print(text)
    (arguments.results / "service_load.md").write_text(text)


if __name__ == "__main__":
    main()
