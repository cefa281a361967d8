"""Errors of the miss-ratio curves of `kvplane mrc`: recorded in one pool, predicted for five, run in all five.

    KVPLANE_WORKLOADS=FOLDER python -m tests.bench.curve_errors
    python -m tests.bench.curve_errors --traces Weka --models gemma-3-27b --requests 120 --no-write

Five kinds of models serve the first requests of three traces with the cost model of `kvplane replay`, once recorded in
a pool and once in each of the five pools that the curve predicts. Exits with 1 if a prediction is more than 3
percentage points of the tokens from what its pool hit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

from kvplane.base.groups import ReplicaSpec
from kvplane.base.session import OpenRequest
from kvplane.blocking.session import Session
from kvplane.v1.allocation_pb2 import RegisterReplicaRequest
from kvplane.v1.replica_pb2 import ModelSource
from kvplane_service.config import Config
from kvplane_service.decisions.recording import MAGIC, header_of, message_of, write_frame
from kvplane_service.registry import Registration, Registry
from kvplane_service.rpc.sources import plan_source
from kvplane_tools.replay.engine import Engine
from kvplane_tools.replay.fleet import Fleet
from kvplane_tools.replay.plan import CostModel, EngineConfig
from kvplane_tools.replay.pools import Curve, curve_of
from kvplane_tools.replay.workloads import TraceFile
from tests.bench.machine import machine_line
from tests.conftest import workloads_folder, workloads_line
from tests.service.inprocess import InProcessTransport

RESULTS = Path(__file__).parent / "results" / "curve_errors.md"
MOST = 3.0  # percentage points
TRACES = {
    "Weka": "weka_claude_code_share.jsonl.zst",
    "conversation": "mooncake_conversation_first_half.jsonl.gz",
    "synthetic": "mooncake_synthetic_first_half.jsonl.gz",
}
# Blocks of the recorded pool: the working set of the traces' first requests is between a quarter and four of it.
MODELS = {
    "llama-3.1-8b": 20_000,
    "gemma-3-27b": 24_000,
    "gpt-oss-20b": 20_000,
    "jamba-v0.1": 12_000,
    "llama-4-scout": 30_000,
}
HEAD = """\
# Curves of kvplane mrc against the pools themselves

`python -m tests.bench.curve_errors`: {machine}. The first {requests} requests of each trace; a cell is the predicted
share of tokens that hit, the share that the pool of this size hit, and their difference in percentage points. The pool
of 1x is the recorded one.

| trace | model | recorded blocks | 0.25x | 0.5x | 1x | 2x | 4x | curve, CPU s |
|---|---|---|---|---|---|---|---|---|
"""


def spec_of(model: str, num_blocks: int) -> ReplicaSpec:
    """Return the planned spec of a model."""
    source = ModelSource(
        model=model, num_blocks=num_blocks, max_model_len=131_072, max_batched_tokens=8192, hint_values=4
    )
    return plan_source(RegisterReplicaRequest(replica="r", model=source)).spec


def run_trace(trace: Path, spec: ReplicaSpec, num_requests: int, recording: Path | None = None) -> float:
    """Serve the first requests of a trace, recorded or not, and return the share of their tokens that hit."""
    config = Config(decision_log_steps=1 << 20, log_bytes=1 << 36)
    host = Registry(config, lambda: 0).register("r", Registration(spec)).host
    session = Session(InProcessTransport(lambda _: host), OpenRequest("r", nonce=1), heartbeats=False)
    with TraceFile(trace) as requests:
        fleet = Fleet([Engine(session, EngineConfig(), CostModel())], islice(requests, num_requests))
        while fleet.run_step():
            pass
    session.close()
    if recording is not None:
        with recording.open("wb") as file:
            file.write(MAGIC)
            write_frame(file, header_of("r", host.replica.spec))
            for entry in host.decisions:
                write_frame(file, message_of(entry, host.scheme.digest.size))
    counters = host.replica.counters
    return counters.hit_tokens / max(1, counters.queried_tokens)


def complete_curve(recording: Path) -> Curve:
    """Return the curve of a recording with all its sizes."""
    *_, curve = curve_of(recording, 1 << 62)
    return curve


def row_of(name: str, trace: Path, model: str, num_requests: int) -> tuple[str, float]:
    """Return a row of the table, and its greatest error in percentage points."""
    spec, cells, worst = spec_of(model, MODELS[model]), list[str](), 0.0
    with tempfile.TemporaryDirectory() as folder:
        recording = Path(folder) / "recording"
        run_trace(trace, spec, num_requests, recording)
        began = time.process_time()
        curve = complete_curve(recording)
        took = time.process_time() - began
    for pool in curve.pools:
        real = run_trace(trace, replace(spec, num_blocks=pool.num_blocks), num_requests)
        error = 100 * (pool.share - real)
        worst = max(worst, abs(error))
        cells.append(f"{pool.share:.1%} / {real:.1%} ({error:+.1f})")
    return f"| {name} | {model} | {spec.num_blocks:,} | {' | '.join(cells)} | {took:.0f} |", worst


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", nargs="*", choices=TRACES, default=list(TRACES))
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    folder = workloads_folder()
    if folder is None:
        print(workloads_line())
        return 1
    lines, errors = list[str](), list[float]()
    head = HEAD.format(machine=machine_line(), requests=options.requests)
    print(head, end="")
    for trace in options.traces:
        for model in options.models:
            line, worst = row_of(trace, folder / TRACES[trace], model, options.requests)
            print(line, flush=True)
            lines.append(line)
            errors.append(worst)
    last = f"{len(lines)} curves, greatest error {max(errors):.1f} points"
    print(last)
    if not options.no_write:
        RESULTS.write_text(head + "\n".join([*lines, "", last, ""]), encoding="utf-8")
    return 1 if max(errors) > MOST else 0


if __name__ == "__main__":
    sys.exit(main())
