"""The command `bench`: load on a running service, and the time that an engine waits for each step."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvplane.base.errors import InvalidArgument, NotFound
from kvplane_tools.cli.client import client_of
from kvplane_tools.cli.options import POOL_BLOCKS, TABLE, ModelName, Output, Plot, PoolBlocks, duration, given
from kvplane_tools.cli.output import columns, text_of

if TYPE_CHECKING:
    from kvplane import Client, Session
    from kvplane.scheduling import Request

_SEED = 1
_VOCABULARY = 100_000
_NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True)
class Load:
    """What each engine does.

    Attributes:
        model, num_blocks: the replica.
        prompt, output: tokens of a request.
        shared: share of the prompt that all requests have in common, from 0 to 1.
        seconds: duration for each number of requests.
    """

    model: str
    num_blocks: int
    prompt: int
    output: int
    shared: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured with one number of requests at a time; `median_ms` and `p99_ms`: from the message of a step to
    its answer.
    """

    requests: int
    steps: int
    steps_per_s: float
    tokens_per_s: float
    median_ms: float
    p99_ms: float
    hit_share: float
    preempted: int


def bench_command(
    requests: Annotated[
        str, typer.Option(help="Numbers of requests that run at a time, separated by commas; one after the other.")
    ] = "1,8,64",
    model: ModelName = "llama-3.1-8b",
    pool_blocks: PoolBlocks = None,
    prompt: Annotated[int, typer.Option(min=1, help="Prompt tokens of a request.")] = 1024,
    output_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of a request.")] = 128,
    shared: Annotated[float, typer.Option(min=0, max=1, help="Share of the prompt that all have in common.")] = 0.5,
    time_of_each: Annotated[
        float, duration("--duration", least=0.1, text="Time for each number of requests, such as 10s.")
    ] = 5.0,
    plot: Plot = None,
    output: Output = TABLE,
) -> None:
    """Put load on a running service, and print how long an engine waits for a step.

    One engine without a model registers a replica bench-..., runs the given numbers of requests with continuous
    batching, and deregisters the replica. Other engines of the service are slower meanwhile. A step's time is from its
    message to its answer; the rates also contain the engine's own work, which grows with the number of requests.
    """
    from kvplane_tools.cli import plots

    numbers = _numbers(requests)
    if plot is not None:
        plots.check_path(plot)
    load = Load(model, pool_blocks or POOL_BLOCKS, prompt, output_tokens, shared, time_of_each)
    with client_of() as client:
        figures = [_measure(client, load, number) for number in numbers]
    if plot is not None:
        _plot(f"{model} at {given().address}", figures, plot)
    print(text_of(lambda: {"loads": [asdict(one) for one in figures]}, output, table=lambda: _table(figures)))


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(piece) for piece in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        what = f"{text!r} is not a list of numbers from 1"
        raise InvalidArgument(what, field="--requests", remedy="write numbers such as 1,8,64")
    return numbers


def _measure(client: Client, load: Load, number: int) -> Figures:
    """Register a replica, run `number` requests at a time on it, and deregister it."""
    from statistics import quantiles

    from kvplane import ModelSource

    name = f"bench-{secrets.token_hex(4)}"
    length = load.prompt + load.output
    source = ModelSource(model=load.model, num_blocks=load.num_blocks, max_model_len=length)
    try:
        client.register_replica(name, source)
        with client.session(name) as session:
            whole_s, waits_ns, tokens = _run(session, load, number)
        counters = client.describe_replica(name).counters
    finally:
        with suppress(NotFound):
            client.deregister_replica(name)
    cuts = quantiles(waits_ns, n=100) if len(waits_ns) > 1 else waits_ns * 99
    share = counters.hit_tokens / counters.queried_tokens if counters.queried_tokens else 0.0
    rates = (len(waits_ns) / whole_s, tokens / whole_s, cuts[49] / _NS_PER_MS, cuts[98] / _NS_PER_MS)
    return Figures(number, len(waits_ns), *rates, share, counters.preempted)


def _run(session: Session, load: Load, number: int) -> tuple[float, list[int], int]:
    """Return the duration in seconds, the time that the engine waited for each step in nanoseconds, and the number of
    computed tokens.
    """
    from kvplane.scheduling import Limits, Scheduler

    scheduler, contents = Scheduler(session.spec, Limits(max_running=number)), _requests(load)
    for _ in range(number):
        scheduler.add(next(contents))
    waits_ns, tokens, begun_s = list[int](), 0, time.monotonic()
    while time.monotonic() < begun_s + load.seconds:
        part = scheduler.plan()
        sent_ns = time.perf_counter_ns()
        result = session.apply(part).parts[0]
        waits_ns.append(time.perf_counter_ns() - sent_ns)
        for row in scheduler.update(part, result):
            scheduler.finish_row(row, [_SEED] * row.num_outputs)
            tokens += row.num_tokens
        for _ in scheduler.take_finished():
            scheduler.add(next(contents))
    return time.monotonic() - begun_s, waits_ns, tokens


def _requests(load: Load) -> Iterator[Request]:
    """Yield requests without an end, always the same ones."""
    from kvplane.scheduling import Request

    draw, number = random.Random(_SEED), 0
    common = [draw.randrange(_VOCABULARY) for _ in range(int(load.prompt * load.shared))]
    while True:
        own = [draw.randrange(_VOCABULARY) for _ in range(load.prompt - len(common))]
        yield Request(f"bench-{number}", [*common, *own], max_new_tokens=load.output)
        number += 1


def _table(figures: Sequence[Figures]) -> str:
    rows = [("REQUESTS", "STEPS/S", "TOKENS/S", "MEDIAN", "99 %", "HIT", "PREEMPTED")]
    for one in figures:
        times = (f"{one.median_ms:.2f} ms", f"{one.p99_ms:.2f} ms")
        rates = (f"{one.steps_per_s:,.0f}", f"{one.tokens_per_s:,.0f}")
        rows.append((str(one.requests), *rates, *times, f"{one.hit_share:.0%}", str(one.preempted)))
    return columns(rows)


def _plot(title: str, figures: Sequence[Figures], path: Path) -> None:
    """Plot the time of a step over the number of requests. Raises as `plots.new_figure` and `plots.save`."""
    from kvplane_tools.cli import plots

    figure = plots.new_figure()
    axes = figure.add_subplot()
    numbers = [one.requests for one in figures]
    axes.plot(numbers, [one.median_ms for one in figures], "o-", label="median")
    axes.plot(numbers, [one.p99_ms for one in figures], "s--", label="99 % of the steps")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(numbers, [str(number) for number in numbers])
    axes.set(title=title, xlabel="requests at a time", ylabel="time of a step for the engine, ms")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    plots.save(figure, path)
