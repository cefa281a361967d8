"""`kvplane replay FILE`: a public serving trace through the service, by a true engine on a virtual clock."""

from __future__ import annotations

import json
import secrets
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import kvplane
from kvplane.base.errors import KvplaneError
from kvplane_service.cli import report
from kvplane_service.cli.child import ServiceChild
from kvplane_service.cli.pace import Pace
from kvplane_service.cli.progress import Extent, watch
from kvplane_service.replay import CostModel, EngineConfig, Routing
from kvplane_service.replay.engine import UNLIMITED_OUTPUT
from kvplane_service.replay.run import ReplayRun, RunPlan
from kvplane_service.replay.summary import Summary
from kvplane_service.workloads import TraceFile

INTERRUPTED = 130

app = typer.Typer()


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """A replay as it was asked for. `limit` None = the whole file; `address` "" = a service of its own."""

    file: Path
    plan: RunPlan
    limit: int | None = None
    address: str = ""
    speed: float = 0.0


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="Mooncake or Weka trace: .jsonl, .jsonl.gz, .jsonl.zst")],
    model: Annotated[str, typer.Option(help="model of the service's catalogue")] = "llama-3.1-70b",
    tensor_parallel: Annotated[int, typer.Option(min=1, help="ranks of a replica")] = 1,
    replicas: Annotated[int, typer.Option(min=1, help="equal replicas, each with its own engine")] = 1,
    pool_blocks: Annotated[int, typer.Option(min=2, help="blocks of each replica's pool")] = 65_536,
    block_size: Annotated[int, typer.Option(min=1, help="tokens per attention block")] = 16,
    max_model_len: Annotated[int, typer.Option(min=1, help="longest request in tokens, with output")] = 131_072,
    limit: Annotated[int | None, typer.Option(min=1, help="stop after so many requests")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="requests that run at once")] = 256,
    one_at_a_time: Annotated[bool, typer.Option(help="the next request waits for the end of the last")] = False,
    token_budget: Annotated[int, typer.Option(min=1, help="tokens of one step")] = 8192,
    max_output: Annotated[int, typer.Option(min=1, help="cut outputs to so many tokens")] = UNLIMITED_OUTPUT,
    routing: Annotated[Routing, typer.Option(help="sticky: by session; round-robin: by turns")] = Routing.STICKY,
    prefill_tokens_per_second: Annotated[int, typer.Option(min=1, help="cost model")] = 20_000,
    decode_step_us: Annotated[int, typer.Option(min=0, help="cost model")] = 20_000,
    address: Annotated[str, typer.Option(help="of a running service; else one is started for the replay")] = "",
    events: Annotated[bool, typer.Option(help="count evictions in the engine too, from cache events")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the outcome as JSON")] = False,
    speed: Annotated[float, typer.Option(min=0, help="virtual seconds per second; 0 = at once")] = 0.0,
) -> None:
    """Replay a serving trace through the service and show what it decided.

    A request longer than --max-model-len, or that can never fit the pool, is refused by name. Tokens are a function of
    the trace's block ids; time is virtual, moved by the cost model, so two runs are identical.
    """
    engine = EngineConfig(
        max_running=1 if one_at_a_time else concurrency, token_budget=token_budget, max_output=max_output
    )
    cost = CostModel(prefill_tokens_per_second, decode_step_us)
    plan = RunPlan(
        model, tensor_parallel, replicas, pool_blocks, block_size, max_model_len, engine, cost, routing, events
    )
    raise typer.Exit(show_replay(ReplayOptions(file, plan, limit, address, speed), as_json))


def show_replay(options: ReplayOptions, as_json: bool) -> int:
    """Run, print the outcome, return the exit code: 0, 1 for a fault or disagreeing counts, 130 after Ctrl-C."""
    try:
        summary = run_replay(options, Console(stderr=True))
    except KvplaneError as error:
        print(f"kvplane replay: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("kvplane replay: interrupted", file=sys.stderr)
        return INTERRUPTED
    if as_json:
        print(json.dumps(summary.as_json(), indent=2))
    else:
        print_outcome(summary)
    faults = [fault for fault in (summary.fault, *summary.disagreements()) if fault]
    for fault in faults:
        print(f"kvplane replay: {fault}", file=sys.stderr)
    return 1 if faults else 0


def run_replay(options: ReplayOptions, console: Console) -> Summary:
    """Replay the file; progress goes to `console`. Raises KvplaneError when it cannot begin or go on."""
    with ExitStack() as stack:
        trace = stack.enter_context(TraceFile(options.file))
        address = options.address or stack.enter_context(ServiceChild()).address
        client = stack.enter_context(kvplane.connect(address))
        name = f"replay-{secrets.token_hex(4)}"
        run = stack.enter_context(ReplayRun(client, options.plan, name, islice(trace, options.limit)))
        pace = Pace(options.speed)
        with watch(console, run.fleet, Extent(trace, options.limit)) as show:

            def after_step() -> bool:
                pace.hold(run.fleet.clock_ns)
                show()
                return True

            run.run(after_step)
        return run.summary(options.file.name)


def print_outcome(summary: Summary) -> None:
    """The table, and who was refused."""
    console = Console()
    console.print(report.table(summary))
    for line in report.refusal_lines(summary):
        print(line)
