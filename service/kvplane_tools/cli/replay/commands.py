"""Options of the commands `replay` and `demo`, and the calls that execute them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import EvictionPolicy, SavePolicy, TierKind, TierSpec
from kvplane_tools.cli.options import (
    POOL_BLOCKS,
    TABLE,
    DiskSave,
    Format,
    HostSave,
    Limit,
    Log,
    ModelName,
    Once,
    Output,
    PoolBlocks,
    Ranks,
    Shape,
    Svg,
    duration,
    given,
)
from kvplane_tools.replay.plan import CostModel, EngineConfig, Routing, RunPlan

_EVICTION = typer.Option(help="Eviction: lru, window_tail, turn_tail or hazard. Default: as the service is configured.")
_CHECKPOINTS = typer.Option(min=0, max=100, help="Windows and states kept inside prompts, in percent of the rest.")


def replay_command(
    file: Annotated[
        Path, typer.Argument(help="Mooncake or Weka trace (.jsonl, .jsonl.gz, .jsonl.zst), or a recording.")
    ],
    log: Log = False,
    model: ModelName = "llama-3.1-70b",
    tensor_parallel: Ranks = 1,
    replicas: Annotated[int, typer.Option(min=1, help="Number of equal replicas, each with its own engine.")] = 1,
    pool_blocks: PoolBlocks = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per attention block.")] = 16,
    prefix_match_unit: Annotated[
        int, typer.Option(min=0, help="Prefix hits are multiples of this number of tokens. 0 = the most possible.")
    ] = 0,
    eviction: Annotated[EvictionPolicy | None, _EVICTION] = None,
    host_blocks: Annotated[int, typer.Option(min=0, help="Slots of a host tier for what leaves the pool.")] = 0,
    disk_blocks: Annotated[int, typer.Option(min=0, help="Slots of a disk tier behind it.")] = 0,
    host_save: HostSave = SavePolicy.BEHIND,
    host_checkpoints: Annotated[int, _CHECKPOINTS] = 0,
    disk_save: DiskSave = SavePolicy.BEHIND,
    mover_steps: Annotated[int, typer.Option(min=1, help="Steps after which the copies of tiers end.")] = 2,
    max_model_len: Annotated[int, typer.Option(min=1, help="Longest request in tokens, prompt and output.")] = 131_072,
    limit: Limit = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests that run concurrently.")] = 256,
    one_at_a_time: Annotated[bool, typer.Option(help="Run one request at a time.")] = False,
    token_budget: Annotated[int, typer.Option(min=1, help="Tokens of one step.")] = 8192,
    max_output: Annotated[int, typer.Option(min=1, help="Cut outputs to this number of tokens.")] = 1 << 30,
    routing: Annotated[Routing, typer.Option(help="sticky: by session; round-robin: in rotation.")] = Routing.STICKY,
    prefill_tokens_per_second: Annotated[int, typer.Option(min=1, help="Cost model: prefill rate.")] = 20_000,
    decode_step: Annotated[
        float, duration("--decode-step", unit="us", most=1e9, text="Cost model: time of a decode step, such as 20ms.")
    ] = 20_000,
    events: Annotated[bool, typer.Option(help="Count evictions in the engine too, from cache events.")] = False,
    as_json: Annotated[bool, typer.Option("--json", hidden=True, help="Former name of -o json.")] = False,
    output: Output = TABLE,
    speed: Annotated[float, typer.Option(min=0, help="Virtual seconds per second. 0 = as fast as possible.")] = 0.0,
) -> None:
    """Replay a serving trace through a service, the one that --service names or one of its own, and print what it
    decided. A recording of decisions is replayed without a service.

    A request is refused by name if it is longer than --max-model-len or can never fit the pool. Tokens are a function
    of the trace's block IDs, and time is virtual, advanced by the cost model: two runs are identical.

    A recording is replayed without a service and compared bit by bit; exits 1 if a decision differs. With --pool-blocks
    it is a what-if: the recorded steps in a pool of another size, where refused requests are retried with each step.
    """
    from kvplane_service.decisions.recording import is_recording

    output, log = Shape(Format.JSON) if as_json else output, log or is_recording(file)
    host = TierSpec(TierKind.HOST, host_blocks, host_save, host_checkpoints)
    tiers = _tiers((host, TierSpec(TierKind.DISK, disk_blocks, disk_save)), log)
    if log:
        from kvplane_tools.cli.replay.report import show_log

        raise typer.Exit(show_log(file, pool_blocks, output))
    from kvplane_tools.cli.replay.trace import ReplayOptions, show_replay

    running = 1 if one_at_a_time else concurrency
    engine = EngineConfig(running, token_budget, max_output=max_output, mover_steps=mover_steps)
    cost = CostModel(prefill_tokens_per_second, round(decode_step))
    plan = RunPlan(
        model, tensor_parallel, replicas, pool_blocks or POOL_BLOCKS, block_size, max_model_len, engine, cost, routing,
        events, prefix_match_unit, eviction, tiers,
    )  # fmt: skip
    raise typer.Exit(show_replay(ReplayOptions(file, plan, limit, given().service, speed), output))


def _tiers(asked: Sequence[TierSpec], log: bool) -> tuple[TierSpec, ...]:
    for tier in asked:
        option = "checkpoints" if tier.checkpoint_percent else "save"
        if (tier.checkpoint_percent or tier.save is not SavePolicy.BEHIND) and not tier.num_blocks:
            what, name = f"there is no {tier.kind.value} tier to save into", tier.kind.value
            raise InvalidArgument(what, field=f"--{name}-{option}", remedy=f"give --{name}-blocks, or leave it out")
    tiers = tuple(tier for tier in asked if tier.num_blocks)
    if log and tiers:
        what = "a recording is replayed with the tiers that it was made with"
        raise InvalidArgument(what, field=f"--{tiers[0].kind.value}-blocks", remedy="replay a trace, or leave it out")
    return tiers


def demo_command(
    seed: Annotated[int, typer.Option(help="Seed of the workload. Equal seeds give equal decisions.")] = 8,
    plain: Annotated[bool, typer.Option(help="Print lines instead of the live view.")] = False,
    once: Once = False,
    svg: Svg = None,
) -> None:
    """Start a service, drive four models through it and show their pools, hits, evictions and preemptions.

    The workload is generated from a seed: chats and agents that call tools, with shared system prompts. The service's
    counters must equal what the engines count in its answers, or the exit code is 1. On a terminal the service then
    runs until Ctrl-C, for the commands that are printed; with `--once`, or without a terminal, the demo exits.
    """
    from kvplane_tools.cli.replay.demo import show_demo

    stays = not once and sys.stdin.isatty() and sys.stdout.isatty()
    raise typer.Exit(show_demo(seed, plain, svg, stays))
