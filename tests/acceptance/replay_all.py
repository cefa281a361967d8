"""`make replay-all`: real traces through the service, whole, on four models; prints one table.

    KVPLANE_WORKLOADS=FOLDER python -m tests.acceptance.replay_all [--limit N] [--jobs N]

Each cell is a `kvplane replay` of its own, with a service of its own: both Mooncake traces to their end, and the first
100 sessions of the Weka trace.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from kvplane_tools.replay.workloads.lines import TraceLines

WEKA_SESSIONS = 100
MODELS = {"llama-3.1-70b": 4, "gpt-oss-120b": 1, "gemma-3-27b": 1, "jamba-v0.1": 1}  # to tensor-parallel ranks
MOONCAKE_BLOCKS, WEKA_BLOCKS = 131_072, 262_144
MAX_MODEL_LEN = 131_072

COLUMNS = (
    "trace | model | requests | completed | refused | prompt tokens | hit tokens | hit % | block hits per group | "
    "evictions | preemptions | steps | rows | virtual s | wall s | steps/s"
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One trace on one model."""

    trace: str
    file: Path
    model: str
    pool_blocks: int

    def command(self, limit: int | None) -> list[str]:
        """The replay."""
        return [
            *(
                sys.executable,
                "-c",
                "from kvplane_tools.cli import main; main()",
                "replay",
                str(self.file),
                "--json",
                "--events",
            ),
            *("--model", self.model, "--tensor-parallel", str(MODELS[self.model])),
            *("--pool-blocks", str(self.pool_blocks), "--max-model-len", str(MAX_MODEL_LEN)),
            *(("--limit", str(limit)) if limit else ()),
        ]


def main(arguments: Sequence[str]) -> int:
    """Run every cell, print the table; returns 1 when a replay failed or its counts disagree."""
    parser = argparse.ArgumentParser(prog="tests.acceptance.replay_all")
    parser.add_argument("--limit", type=int, help="requests of each trace; default all")
    parser.add_argument("--jobs", type=int, default=2, help="replays at once")
    given = parser.parse_args(arguments)
    folder = os.environ.get("KVPLANE_WORKLOADS")
    if not folder:
        print("KVPLANE_WORKLOADS must name the folder of public traces", file=sys.stderr)
        return 2
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(given.jobs) as pool:
        cells = plan_cells(Path(folder), Path(scratch))
        outcomes = list(pool.map(lambda cell: run_cell(cell, given.limit), cells))
    print(markdown(cells, outcomes))
    print(f"\n{len(cells)} replays, {time.monotonic() - started:,.0f} s wall, {given.jobs} at once")
    return 1 if any(outcome is None for outcome in outcomes) else 0


def plan_cells(folder: Path, scratch: Path) -> list[Cell]:
    """Every trace on every model, the longest replays first."""
    weka = first_sessions(folder / "weka_claude_code_share.jsonl.zst", scratch / "weka_100.jsonl")
    traces = [
        ("Weka, 100 sessions", weka, WEKA_BLOCKS),
        ("Mooncake conversation", folder / "mooncake_conversation_first_half.jsonl.gz", MOONCAKE_BLOCKS),
        ("Mooncake synthetic", folder / "mooncake_synthetic_first_half.jsonl.gz", MOONCAKE_BLOCKS),
    ]
    return [Cell(trace, file, model, blocks) for trace, file, blocks in traces for model in MODELS]


def first_sessions(source: Path, target: Path) -> Path:
    """A trace of the first sessions of another."""
    lines = TraceLines(source)
    with target.open("wb") as out:
        for line in islice(lines, WEKA_SESSIONS):
            out.write(line.text + b"\n")
    lines.close()
    return target


def run_cell(cell: Cell, limit: int | None) -> dict[str, Any] | None:
    """The outcome as `kvplane replay --json` prints it; None, with a message, when the replay failed."""
    done = subprocess.run(cell.command(limit), capture_output=True, text=True, check=False)
    said = done.stderr.strip().splitlines()[-1:] or [""]
    print(f"{cell.trace}, {cell.model}: exit {done.returncode} {said[0]}", file=sys.stderr, flush=True)
    return json.loads(done.stdout) if done.returncode == 0 else None


def markdown(cells: Sequence[Cell], outcomes: Sequence[dict[str, Any] | None]) -> str:
    """The table."""
    head = [f"| {COLUMNS} |", "|" + "---|" * len(COLUMNS.split("|"))]
    return "\n".join(head + [row(cell, outcome) for cell, outcome in zip(cells, outcomes, strict=True)])


def row(cell: Cell, outcome: dict[str, Any] | None) -> str:
    """One line of the table."""
    if outcome is None:
        return f"| {cell.trace} | {cell.model} | FAILED |"
    service, engine = outcome["service"], outcome["engine"]
    cells = (
        cell.trace,
        cell.model,
        f"{outcome['requests']:,}",
        f"{outcome['completed']:,}",
        ", ".join(f"{count:,} {reason}" for reason, count in outcome["refused"].items()) or "0",
        f"{outcome['prompt_tokens']:,}",
        f"{service['hit_tokens']:,}",
        f"{100 * service['hit_tokens'] / max(1, service['queried_tokens']):.1f}",
        " ".join(f"{count:,}" for count in service["hit_blocks"]),
        f"{sum(service['evicted_blocks']):,}",
        f"{service['preempted']:,}",
        f"{service['steps']:,}",
        f"{engine['rows']:,}",
        f"{outcome['virtual_s']:,.0f}",
        f"{outcome['wall_s']:,.0f}",
        f"{outcome['steps_per_s']:,.0f}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
