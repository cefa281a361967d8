"""`kvplane replay FILE`: a public serving trace through the service, by a true engine on a virtual clock."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvplane_replay import CostModel, EngineConfig, Routing

_POOL_BLOCKS = 65_536


def command(
    file: Annotated[Path, typer.Argument(help="Mooncake or Weka trace: .jsonl, .jsonl.gz, .jsonl.zst; or a log")],
    log: Annotated[bool, typer.Option("--log", help="the file is a recording of decisions (kvplane record)")] = False,
    model: Annotated[str, typer.Option(help="model of the service's catalogue")] = "llama-3.1-70b",
    tensor_parallel: Annotated[int, typer.Option(min=1, help="ranks of a replica")] = 1,
    replicas: Annotated[int, typer.Option(min=1, help="equal replicas, each with its own engine")] = 1,
    pool_blocks: Annotated[
        int | None, typer.Option(min=2, help="blocks of each pool; default 65,536, with --log what was recorded")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="tokens per attention block")] = 16,
    max_model_len: Annotated[int, typer.Option(min=1, help="longest request in tokens, with output")] = 131_072,
    limit: Annotated[int | None, typer.Option(min=1, help="stop after so many requests")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="requests that run at once")] = 256,
    one_at_a_time: Annotated[bool, typer.Option(help="the next request waits for the end of the last")] = False,
    token_budget: Annotated[int, typer.Option(min=1, help="tokens of one step")] = 8192,
    max_output: Annotated[int, typer.Option(min=1, help="cut outputs to so many tokens")] = 1 << 30,
    routing: Annotated[Routing, typer.Option(help="sticky: by session; round-robin: by turns")] = Routing.STICKY,
    prefill_tokens_per_second: Annotated[int, typer.Option(min=1, help="cost model")] = 20_000,
    decode_step_us: Annotated[int, typer.Option(min=0, help="cost model")] = 20_000,
    address: Annotated[str, typer.Option(help="of a running service; else one is started for the replay")] = "",
    events: Annotated[bool, typer.Option(help="count evictions in the engine too, from cache events")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the outcome as JSON")] = False,
    speed: Annotated[float, typer.Option(min=0, help="virtual seconds per second; 0 = at once")] = 0.0,
) -> None:
    """Replay a serving trace through the service and show what it decided; or, with --log, recorded decisions.

    A request longer than --max-model-len, or that can never fit the pool, is refused by name. Tokens are a function of
    the trace's block ids; time is virtual, moved by the cost model, so two runs are identical.

    A log is decided again without a service, bit for bit; exit code 1 when a decision differs. With --pool-blocks it is
    a what-if: the recorded steps in a pool of another size, with whoever is refused asking again.
    """
    if log:
        from kvplane_service.cli.log_show import show_log

        raise typer.Exit(show_log(file, pool_blocks, as_json))
    from kvplane_replay.run import RunPlan
    from kvplane_service.cli.replay_show import ReplayOptions, show_replay

    engine = EngineConfig(
        max_running=1 if one_at_a_time else concurrency, token_budget=token_budget, max_output=max_output
    )
    cost = CostModel(prefill_tokens_per_second, decode_step_us)
    pool_blocks = pool_blocks or _POOL_BLOCKS
    plan = RunPlan(
        model, tensor_parallel, replicas, pool_blocks, block_size, max_model_len, engine, cost, routing, events
    )
    raise typer.Exit(show_replay(ReplayOptions(file, plan, limit, address, speed), as_json))
