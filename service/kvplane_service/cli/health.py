"""`kvplane health`."""

from __future__ import annotations

from typing import Annotated, cast

import typer

from kvplane_service.cli import FAILED

_TIMEOUT_S = 5.0


def command(
    address: Annotated[str, typer.Argument(help="host:port of health_listen, or unix:PATH of a worker.")],
    name: Annotated[str, typer.Option(help="What to ask for: readiness, liveness, a service; empty = all.")] = "",
) -> None:
    """Ask gRPC Health in plain text, for probes: exit code 0 when it serves, 1 when not, 3 when nobody answers."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from kvplane.channel import open_channel
    from kvplane.status import RpcOutcome, error_of_rpc

    with open_channel(address) as channel:
        try:
            asked = health_pb2.HealthCheckRequest(service=name)
            status = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=_TIMEOUT_S).status
        except grpc.RpcError as outcome:
            raise error_of_rpc(cast(RpcOutcome, outcome)) from None
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(status).lower())
    raise typer.Exit(0 if status == health_pb2.HealthCheckResponse.SERVING else FAILED)
