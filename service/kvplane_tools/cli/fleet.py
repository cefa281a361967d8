"""The commands `kvplane router` and `kvplane fleet list | describe | score | explain`.

`fleet` asks a router; with --places it follows the engines of a file once instead, and answers as a router would that
nothing was sent to. What the commands use is imported inside them, so that `kvplane --help` loads neither ZeroMQ nor
msgspec.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from kvplane.base.errors import InvalidArgument, NotFound, Unavailable
from kvplane.base.installed import command_for
from kvplane_tools.cli.client import remedies
from kvplane_tools.cli.options import (
    TABLE,
    ConfigFile,
    Listen,
    Metrics,
    ModelName,
    Output,
    Settings,
    Watch,
    given,
    load_config,
)
from kvplane_tools.cli.output import columns, repeat, show
from kvplane_tools.cli.query.prompt import Tokens, token_ids

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from kvplane.v1 import routing_pb2 as pb
    from kvplane_fleet.router.process import Router

DEFAULT_ROUTER = "127.0.0.1:7080"
_TIMEOUT_S = 30.0

app = typer.Typer(no_args_is_help=True, help="Show what the caches of many engines hold, and where a prompt belongs.")

PlacesFile = Annotated[Path, typer.Argument(metavar="FILE", help="YAML file with the engines, as in docs/fleet.md.")]
RouterAddress = Annotated[
    str, typer.Option("--router", envvar="KVPLANE_ROUTER", help="Address of the router: host:port or unix:PATH.")
]
Places = Annotated[
    Path | None, typer.Option("--places", metavar="FILE", help="Ask no router, but follow the engines of FILE once.")
]


def router_command(
    file: PlacesFile,
    config: ConfigFile = None,
    listen: Listen = None,
    metrics: Metrics = None,
    settings: Settings = None,
) -> None:
    """Follow the caches of engines and say where a prompt is answered soonest, until SIGTERM or Ctrl-C."""
    import asyncio
    import logging

    _check_packages()
    from kvplane_fleet.router.process import check_keys, serve
    from kvplane_fleet.settings import load

    loaded = load_config(config, listen, settings, metrics)
    check_keys(loaded)
    if loaded.sources["listen"] == "default":
        loaded = load_config(config, DEFAULT_ROUTER, settings, metrics)
    logging.basicConfig(level=loaded.config.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(serve(loaded.config, load(file), _print_addresses, given().access()))


def _print_addresses(router: Router) -> None:
    lines = [f"routing on {router.address}"]
    if router.metrics_address:
        lines.append(f"metrics on http://{router.metrics_address}/metrics")
    if router.health_address:
        lines.append(f"health on {router.health_address}")
    sys.stdout.write("".join(f"kvplane: {line}\n" for line in lines))
    sys.stdout.flush()


@app.command("list")
def list_places(
    router: RouterAddress = DEFAULT_ROUTER,
    model: ModelName = "",
    places: Places = None,
    output: Output = TABLE,
    watch: Watch = None,
) -> None:
    """List the engines with their entries and faults of their events; -o wide also their groups and kind of hashes."""
    from kvplane.v1 import routing_pb2 as pb

    def one() -> None:
        answer = cast("pb.ListPlacesResponse", _ask(pb.ListPlacesRequest(model=model), router, places))
        show(
            answer,
            output,
            table=lambda: columns([_SHORT, *([_facts(one)[name] for name in _SHORT] for one in answer.places)]),
            wide=lambda: columns([_HEADING, *map(_row, answer.places)]),
            name=lambda: "\n".join(one.place for one in answer.places),
        )

    repeat(watch, one)


@app.command()
def describe(
    place: Annotated[str, typer.Argument(help="Name of the place.")],
    router: RouterAddress = DEFAULT_ROUTER,
    places: Places = None,
    output: Output = TABLE,
) -> None:
    """Show what is known of one engine."""
    from kvplane.v1 import routing_pb2 as pb

    answer = cast("pb.ListPlacesResponse", _ask(pb.ListPlacesRequest(), router, places))
    found = [one for one in answer.places if one.place == place]
    if not found:
        raise NotFound(f"there is no place {place!r}", field="place", remedy="`kvplane fleet list` names all")
    show(
        found[0],
        output,
        table=lambda: columns([(f"{name.capitalize()}:", it) for name, it in _facts(found[0]).items()]),
    )


@app.command()
def score(
    tokens: Tokens = None,
    model: ModelName = "",
    policy: Annotated[str, typer.Option("--policy", help="Policy; default: the router's.")] = "",
    router: RouterAddress = DEFAULT_ROUTER,
    places: Places = None,
    output: Output = TABLE,
) -> None:
    """List what each engine would hit of a prompt, which groups of layers limit it, and what answering there costs."""
    from kvplane.v1 import routing_pb2 as pb

    prompt = pb.Prompt(token_ids=token_ids(tokens))
    known = {name.removeprefix("ROUTING_POLICY_").lower(): value for name, value in pb.RoutingPolicy.items()}
    known[""] = known.pop("unspecified")
    if policy not in known:
        remedy = f"use one of {', '.join(filter(None, known))}"
        raise InvalidArgument(f"{policy!r} is no policy", field="--policy", remedy=remedy)
    request = pb.ScoreRequest(model=model, prompt=prompt, policy=cast("pb.RoutingPolicy", known[policy]))
    answer = cast("pb.ScoreResponse", _ask(request, router, places))
    show(answer, output, table=lambda: _scores(answer))


@app.command()
def explain(
    tokens: Tokens = None,
    model: ModelName = "",
    place: Annotated[
        list[str] | None, typer.Option("--place", help="Only this place; may be given repeatedly.")
    ] = None,
    router: RouterAddress = DEFAULT_ROUTER,
    places: Places = None,
    output: Output = TABLE,
) -> None:
    """Say for each engine why a prompt hits no more there, and why the first one is chosen."""
    from kvplane.v1 import routing_pb2 as pb

    prompt = pb.Prompt(token_ids=token_ids(tokens))
    request = pb.ScoreRequest(model=model, prompt=prompt, candidates=place or ())
    answer = cast("pb.ScoreResponse", _ask(request, router, places))
    show(answer, output, table=lambda: "\n\n".join(explanations(answer, len(prompt.token_ids))))


# -- asking ----------------------------------------------------------------------------------------------------------


def _ask(request: Message, router: str, places: Path | None) -> Message:
    """Return the answer of a router, or of the places of a file, to a request of Score or ListPlaces."""
    method, timeout_s = type(request).__name__.removesuffix("Request"), given().request_timeout or _TIMEOUT_S
    if places is not None:
        return _ask_once(method, request, places, timeout_s)
    return _ask_router(method, request, router, timeout_s)


def _ask_router(method: str, request: Message, router: str, timeout_s: float) -> Message:
    import grpc

    from kvplane.rpc.channel import open_channel
    from kvplane.rpc.status import RpcOutcome, error_of_rpc
    from kvplane.v1 import routing_pb2_grpc

    with remedies("--router", "KVPLANE_ROUTER"), open_channel(router, given().access()) as channel:
        try:
            answer: Message = getattr(routing_pb2_grpc.RoutingStub(channel), method)(request, timeout=timeout_s)
        except grpc.RpcError as outcome:
            raise error_of_rpc(cast(RpcOutcome, outcome)) from None
    return answer


def _ask_once(method: str, request: Message, file: Path, within_s: float) -> Message:
    _check_packages()
    import asyncio
    import time

    from kvplane_fleet.decisions import Decisions
    from kvplane_fleet.fleet import Fleet, following
    from kvplane_fleet.router.servicer import RoutingServicer
    from kvplane_fleet.settings import load

    settings = load(file)

    async def run() -> Message:
        fleet = Fleet(given().access())
        async with following(fleet, settings.places):
            try:
                async with asyncio.timeout(within_s):
                    await fleet.wait_until_current()
            except TimeoutError:
                if not any(one.source.is_connected for one in fleet.followed.values()):
                    raise Unavailable(f"no engine of {file} was connected within {within_s:g} s") from None
            servicer = RoutingServicer(fleet, Decisions(fleet, settings.router, time.monotonic), time.monotonic)
            answer: Message = await getattr(servicer, method)(request, b"")
            return answer

    return asyncio.run(run())


def _check_packages() -> None:
    missing = [name for name in ("zmq", "msgspec") if find_spec(name) is None]
    if missing:
        remedy = command_for("cli,service,fleet")
        raise NotFound(f"the package {missing[0]} is not installed", field="fleet", remedy=remedy)


# -- tables ----------------------------------------------------------------------------------------------------------

_HEADING = [
    "PLACE",
    "MODEL",
    "STATE",
    "IN FLIGHT",
    "BATCHES",
    "ENTRIES",
    "GROUPS",
    "HASHES",
    "CLAIMED",
    "REAL",
    "FAULTS",
]


def _row(one: pb.PlaceInfo) -> list[str]:
    claimed = (str(one.claimed_tokens), str(one.real_tokens))
    counts = (str(one.in_flight), str(one.batches), str(one.entries))
    who = (one.place, ", ".join([one.model or "-", *one.other_models]), one.state)
    return [*who, *counts, _groups(one), one.hashes or "not proven", *claimed, _faults(one)]


def _groups(one: pb.PlaceInfo) -> str:
    texts = []
    for group in one.groups:
        window = f" of {group.window}" if group.window else ""
        texts.append(f"{group.group} {group.kind or 'not stated'}{window} in {group.block_size}")
    return "; ".join(texts) or "-"


def _faults(one: pb.PlaceInfo) -> str:
    return ", ".join(f"{name} {times}" for name, times in sorted(one.faults.items())) or "-"


_SHORT = ("PLACE", "MODEL", "STATE", "IN FLIGHT", "ENTRIES", "CLAIMED", "REAL", "FAULTS")


def _facts(one: pb.PlaceInfo) -> dict[str, str]:
    facts = dict(zip(_HEADING, _row(one), strict=True))
    facts["ENDPOINT"] = one.endpoint or "-"
    facts["PREFILL"] = f"{one.prefill_tokens_per_s:,.0f} tokens/s from {one.samples} reports"
    return facts


def explanations(answer: pb.ScoreResponse, num_tokens: int) -> Iterator[str]:
    """Yield a paragraph for each place, and then why the first one was chosen."""
    longest = max((one.expected_tokens for one in answer.places), default=0)
    for one in answer.places:
        lines = [f"{one.place}: {one.hit_tokens} of {num_tokens} tokens hit; at most {max(num_tokens - 1, 0)} can"]
        if one.expected_tokens > one.hit_tokens:
            lines.append(f"{one.expected_tokens} once the prompts that were sent there are computed")
        peers = f"the host memory of peers, such as {one.peer}"
        sources = ((one.host_tokens, "host memory"), (one.disk_tokens, "disk"), (one.peer_tokens, peers))
        for tokens, memory in sources:
            if tokens:
                lines.append(f"up to {tokens} more from {memory}, loaded in {one.cost.load_s:.3f} s in all")
        rows = [["GROUP", "KIND", "HIT ALONE", ""]]
        for group in one.groups:
            mark = "limits the hit" if group.limits else ""
            rows.append([str(group.group), group.kind or "not stated", str(group.tokens_alone), mark])
        if one.groups:
            lines.append(columns(rows))
        lines.append(f"cause: {_cause(one)}")
        if one.expected_tokens < longest:
            lines.append(f"{longest - one.expected_tokens} tokens less than the place that has the most")
        yield "\n".join(lines)
    yield answer.reason


_NEEDS = {
    "sliding_window": "the last window before a token",
    "sliding_window_mla": "the last window before a token",
    "chunked_local_attention": "the chunk of a token",
    "mamba": "the state at a token",
}


def _cause(one: pb.PlaceScore) -> str:
    """Return why a place hits no more of a prompt."""
    if one.inexact:
        return one.inexact
    limits = [group for group in one.groups if group.limits]
    longest = max((group.tokens_alone for group in one.groups), default=0)
    if not longest:
        return "none of its blocks is cached: it was not sent there, or was evicted"
    if limits:
        first = limits[0]
        need = _NEEDS.get(first.kind, "every block up to a token")
        numbers = " and ".join(str(group.group) for group in limits)
        return f"group {numbers} needs {need}, and has it for {one.hit_tokens} tokens; another group has {longest}"
    if one.hit_tokens == longest:
        return f"the blocks after token {one.hit_tokens} are not cached, or not whole"
    return f"no length above {one.hit_tokens} fits all groups at once"


def _scores(answer: pb.ScoreResponse) -> str:
    rows = [
        [
            "PLACE",
            "TOKENS",
            "EXPECTED",
            "IN TIERS",
            "LIMITED BY GROUPS",
            "ALONE",
            "QUEUE S",
            "MEMORY S",
            "MISS S",
            "COST S",
            "REMARK",
        ]
    ]
    for one in answer.places:
        limits = ", ".join(str(group.group) for group in one.groups if group.limits)
        alone = ", ".join(str(group.tokens_alone) for group in one.groups)
        costs = (f"{value:.3f}" for value in (one.cost.queue_s, one.cost.memory_s, one.cost.miss_s, one.cost.total_s))
        in_tiers = one.host_tokens + one.disk_tokens + one.peer_tokens
        counts = (str(one.hit_tokens), str(one.expected_tokens), str(in_tiers))
        rows.append([one.place, *counts, limits or "-", alone or "-", *costs, one.inexact or "-"])
    return f"{columns(rows)}\n\n{answer.reason}"
