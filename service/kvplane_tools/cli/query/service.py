"""Commands about a service as a whole: `status`, `replicas`, `top`, `doctor`, `health`, `drain`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, cast

import typer

from kvplane.base.errors import InvalidArgument, Unavailable
from kvplane_tools.cli.client import calls, client_of, described, print_call, remedies
from kvplane_tools.cli.options import FAILED, TABLE, Format, Grpcurl, Once, Output, Svg, Wait, Watch, duration, given
from kvplane_tools.cli.output import age, columns, last_seen, repeat, show, store_word, text_of, word

if TYPE_CHECKING:
    from kvplane import Client
    from kvplane.v1.admin_pb2 import StatusResponse
    from kvplane.v1.allocation_pb2 import ReplicaSummary
    from kvplane_tools.cli.query.checks import Finding

_PAGE = 1000
_ALL = 1 << 30
_PIPE_COLUMNS = 200
_POLL_S = 0.2
_HEALTH_TIMEOUT_S = 5.0


def status_command(output: Output = TABLE, watch: Watch = None, grpcurl: Grpcurl = False) -> None:
    """Show version, uptime, replicas and telemetry endpoints of a service."""
    print_call(grpcurl, calls.status())

    def one() -> None:
        answer = client.status()
        show(answer, output, table=lambda: _status_table(given().address, answer))

    with client_of() as client:
        repeat(watch, one)


def _status_table(service: str, answer: StatusResponse) -> str:
    counts = {
        "live": answer.live_replicas,
        "idle": answer.replicas - answer.live_replicas - answer.lapsed_replicas - answer.recovering_replicas,
        "lapsed": answer.lapsed_replicas,
        "recovering": answer.recovering_replicas,
    }
    state = "draining" if answer.draining else "serving"
    return "\n".join(
        (
            f"kvplane {answer.version} at {service}, {state} for {age(answer.uptime_ms)}",
            f"replicas: {answer.replicas} ({', '.join(f'{count} {state}' for state, count in counts.items())})",
            f"metrics: {answer.metrics_address or 'none'}",
            f"traces: {'on' if answer.tracing else 'off'}",
            f"core: {answer.core.name or '-'}" + (f" ({answer.core.reason})" if answer.core.reason else ""),
        )
    )


def replicas_command(output: Output = TABLE, watch: Watch = None, grpcurl: Grpcurl = False) -> None:
    """List the replicas of a service with their session states, running requests, hits and the use of their pools."""
    from kvplane.v1.allocation_pb2 import ListReplicasResponse

    print_call(grpcurl, calls.list_replicas(_PAGE, ""))

    def one() -> None:
        answer = ListReplicasResponse(replicas=client.list_replicas())
        show(
            answer,
            output,
            table=lambda: columns([_HEADINGS, *map(_row, answer.replicas)]),
            wide=lambda: _wide_table(client, answer.replicas),
            name=lambda: "\n".join(one.replica for one in answer.replicas),
        )

    with client_of() as client:
        repeat(watch, one)


_HEADINGS = ("REPLICA", "STATE", "RUNNING", "WAITING", "HIT", "BLOCKS", "FREE", "HELD", "LAST SEEN")
_MORE = ("PREEMPTED", "WORKERS", "STORE", "EPOCH", "AGE", "MODEL")


def _row(one: ReplicaSummary) -> tuple[str, ...]:
    from kvplane.v1.allocation_pb2 import ReplicaState

    usable = one.num_blocks - 1
    waiting = f"{one.waiting_requests:,}" if one.HasField("waiting_requests") else "-"
    hit = f"{one.hit_tokens / one.queried_tokens:.0%}" if one.queried_tokens else "-"
    held = f"{1 - one.free_blocks / max(1, usable):.0%}"
    state = word(ReplicaState.Name(one.state), "REPLICA_STATE_")
    pool = hit, f"{usable:,}", f"{one.free_blocks:,}", held
    return one.replica, state, f"{one.running_requests:,}", waiting, *pool, last_seen(one)


def _wide_table(client: Client, replicas: Sequence[ReplicaSummary]) -> str:
    """Return the table with what DescribeReplica adds, which takes a call for each replica."""
    rows: list[tuple[str, ...]] = [_HEADINGS + _MORE]
    for one in replicas:
        details = next(described(client, [one]), None)  # None: it was deregistered since it was listed
        more = ("-", "-", "-")
        if details is not None:
            workers = f"{len(details.workers)} of {details.num_ranks}"
            more = (f"{details.counters.preempted:,}", workers, store_word(details.store))
        rows.append((*_row(one), *more, str(one.epoch), age(one.age_ms), one.model_name or "-"))
    return columns(rows)


def top_command(
    interval: Annotated[float, duration("--interval", least=0.1, text="Time between refreshes.")] = 1.0,
    once: Once = False,
    sort: Annotated[str, typer.Option(help="Column to sort by, such as held; -held: smallest first.")] = "replica",
    wanted: Annotated[str, typer.Option("--filter", help="Show replicas with this text in name or state.")] = "",
    svg: Svg = None,
    output: Output = TABLE,
) -> None:
    """Watch the replicas of a service as a table: pools, hits, steps, preemptions, refusals.

    Keys: arrows move, Enter shows one replica with its requests, Escape goes back; s sorts by the next column, r
    reverses, / filters, p pauses, q quits. A click on a heading sorts. --once looks twice, --interval apart.
    """
    from kvplane_tools.cli.views.fleet import order_of

    order = order_of(sort, wanted)
    with client_of() as client:
        if once:
            from rich.console import Console

            from kvplane_tools.cli.views.fleet import Fleet, fleet_table, names_of, plain_rows

            fleet = Fleet(client)
            if fleet.sample(time.monotonic(), most=_ALL):
                time.sleep(interval)  # rates take two samples
            rows = fleet.sample(time.monotonic(), most=_ALL)
            if output.format in (Format.TABLE, Format.WIDE):
                Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS).print(fleet_table(order, rows))
            else:
                print(
                    text_of(lambda: {"replicas": plain_rows(order, rows)}, output, name=lambda: names_of(order, rows))
                )
            return
        from kvplane_tools.cli.views.top_app import Top

        client.status()  # raises Unavailable before the screen is taken over
        if svg is None and not (sys.stdin.isatty() and sys.stdout.isatty()):
            remedy = "give --once, which prints the table"
            raise InvalidArgument("there is no terminal to draw on", field="kvplane top", remedy=remedy)
        app = Top(client, given().address, interval, order)
        app.run() if svg is None else app.save_picture(svg)


def doctor_command(
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="Check why pods of the chart do not run, by kubectl.")
    ] = False,
    namespace: Annotated[str, typer.Option("-n", "--namespace", help="Of the release [default: the context's].")] = "",
    context: Annotated[str, typer.Option("--kube-context", help="Of kubectl [default: the current one].")] = "",
    output: Output = TABLE,
) -> None:
    """Check a service for common problems and print remedies. Exits 1 if any are found.

    Checks health, reflection, versions, clocks, expired sessions, ranks without a worker, workers of another epoch, the
    store, external loads, budgets and drafts. Says how blocks are hashed. With --kubernetes it queries the cluster, not
    a service: nodes, quotas, security, secrets, volumes and images that keep pods from running.
    """
    from dataclasses import asdict

    from kvplane_tools.cli.query.checks import examine
    from kvplane_tools.cli.query.kubernetes import look

    if (namespace or context) and not kubernetes:
        what = "--namespace and --kube-context are those of a cluster"
        raise InvalidArgument(what, field="kvplane doctor", remedy="add --kubernetes")
    with remedies():
        if kubernetes:
            findings = look(namespace, context)
        else:
            findings = examine(given().address, given().access(), given().request_timeout)
    print(text_of(lambda: [asdict(one) for one in findings], output, table=lambda: _finding_table(findings)))
    raise typer.Exit(0 if all(one.is_well for one in findings) else FAILED)


def _finding_table(findings: list[Finding]) -> str:
    rows = [("CHECK", "STATE", "FOUND")]
    rows += [(one.check, "ok" if one.is_well else "FAULT", one.seen) for one in findings]
    remedies = [f"{one.check}: {one.remedy}" for one in findings if not one.is_well]
    return "\n".join([columns(rows), *([""] if remedies else []), *remedies])


def health_command(
    address: Annotated[str, typer.Argument(help="host:port of health_listen, or unix:PATH of a worker.")],
    name: Annotated[
        str, typer.Option(help="What to check: readiness, liveness, or a service. Default: the whole process.")
    ] = "",
) -> None:
    """Query gRPC Health in plaintext, for probes. Exits 0 if serving, 1 if not, 3 if there is no answer."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from kvplane.rpc.channel import open_channel
    from kvplane.rpc.status import RpcOutcome, error_of_rpc

    with open_channel(address) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=name)
            timeout_s = given().request_timeout or _HEALTH_TIMEOUT_S
            status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s).status
        except grpc.RpcError as outcome:
            raise error_of_rpc(cast(RpcOutcome, outcome)) from None
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(status).lower())
    raise typer.Exit(0 if status == health_pb2.HealthCheckResponse.SERVING else FAILED)


def drain_command(
    wait: Wait = False,
    grpcurl: Grpcurl = False,
) -> None:
    """Drain a service: it refuses new sessions, waits until open sessions are closed, then exits. Same as SIGTERM."""
    print_call(grpcurl, calls.drain())
    with client_of() as client:
        client.drain()
        print(f"{given().address}: draining", flush=True)
    if wait:
        _wait_for_exit()
        print(f"{given().address}: exited")


def _wait_for_exit() -> None:
    with client_of() as client:
        while True:
            try:
                client.status()
            except Unavailable:
                return
            time.sleep(_POLL_S)
