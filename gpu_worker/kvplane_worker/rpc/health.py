"""The gRPC Health service of a worker, for probes."""

from __future__ import annotations

from typing import NoReturn

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from kvplane_worker.rpc.handlers import Context


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # a library without types
    """Answers Health.Check with one status for all names.

    The servicer holds no lock and does not serve Health.Watch, so no client can delay a change of the status. (The
    servicer of grpcio-health-checking sends under a lock that its `set` and its `Check` wait for.)

    Attributes:
        is_serving: the status; the worker sets it.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self.is_serving = False

    def Check(self, request: HealthCheckRequest, context: Context) -> HealthCheckResponse:  # noqa: N802
        """Return the status of a service. The call ends with NOT_FOUND if the name is unknown."""
        if request.service not in self._names:
            context.abort(grpc.StatusCode.NOT_FOUND, "")
        return HealthCheckResponse(
            status=HealthCheckResponse.SERVING if self.is_serving else HealthCheckResponse.NOT_SERVING
        )

    def Watch(self, request: HealthCheckRequest, context: Context) -> NoReturn:  # noqa: N802
        """Refuse with UNIMPLEMENTED, as the protocol allows: each watch would hold a thread of the server."""
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "call Health.Check: a worker does not serve Health.Watch")
        raise AssertionError("abort returned")
