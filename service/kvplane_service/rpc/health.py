"""The gRPC Health service, for probes and load balancers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from kvplane.base.errors import LimitExceeded, NotFound

LIVENESS = "liveness"
READINESS = "readiness"
STORE = "store"
STATE = "state"
SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"]
MAX_WATCHES = 1024  # Watch calls at a time, since Health needs no authentication on its own port


class HealthServicer:
    """Answers Health.Check and Health.Watch from the stored statuses.

    `set` stores a status and never waits for a client: a client that does not read holds up only its own Watch call.
    (The servicer of grpcio-health-checking holds a lock while it sends, and its `set` waits for that lock.)
    """

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._changed = asyncio.Event()  # set at the next change, and then replaced
        self._num_watches = 0

    def set(self, name: str, status: int) -> None:
        """Store the status of a service and wake all Watch calls."""
        if self._statuses.get(name) != status:
            self._statuses[name] = status
            self._changed.set()
            self._changed = asyncio.Event()

    async def Check(self, request: HealthCheckRequest, _: bytes) -> HealthCheckResponse:  # noqa: N802
        """Return the status of a service. Raises NotFound if the name is unknown."""
        status = self._statuses.get(request.service)
        if status is None:
            raise NotFound(
                f"there is no health status of {request.service[:140]!r}",
                field="service",
                remedy=f"ask for one of {', '.join(map(repr, sorted(self._statuses)))}",
            )
        return HealthCheckResponse(status=status)

    async def List(self, _: Message, __: bytes) -> Message:  # noqa: N802 - not in every version of the library
        """Return all statuses."""
        statuses = {name: HealthCheckResponse(status=status) for name, status in self._statuses.items()}
        answer: Message = health_pb2.HealthListResponse(statuses=statuses)
        return answer

    async def Watch(self, request: HealthCheckRequest) -> AsyncGenerator[HealthCheckResponse]:  # noqa: N802
        """Yield the status of a service now and after each change; SERVICE_UNKNOWN if the name is unknown.

        A slow client misses intermediate statuses. Raises LimitExceeded if MAX_WATCHES others run.
        """
        if self._num_watches >= MAX_WATCHES:
            raise LimitExceeded(f"{MAX_WATCHES} Watch calls run, the maximum", remedy="call Health.Check")
        self._num_watches += 1
        try:
            sent = None
            while True:
                changed = self._changed  # read before the status, so that no change is missed during the write
                status = self._statuses.get(request.service, HealthCheckResponse.SERVICE_UNKNOWN)
                if status != sent:
                    yield HealthCheckResponse(status=status)
                    sent = status
                await changed.wait()
        finally:
            self._num_watches -= 1


class Health:
    """Reports the health of this process under the names "" (the whole process), each gRPC service, 'readiness',
    'liveness', 'store' and 'state'.
    """

    def __init__(self, services: Sequence[str]) -> None:
        self.servicer = HealthServicer()
        self._names = ("", *services, READINESS)

    def starting(self) -> None:
        """Report that the process is alive but not ready, because the store is still being read."""
        self._set(True, LIVENESS, STATE)
        self._set(False, *self._names)

    def serving(self) -> None:
        """Report that the process is alive and ready."""
        self._set(True, *self._names, LIVENESS)

    def store(self, is_there: bool) -> None:
        """Report under 'store' whether the store is available. For operators; called only if a store is configured."""
        self._set(is_there, STORE)

    def state(self, is_sound: bool) -> None:
        """Report under 'state' whether every check of an idle replica's state has passed. For operators; probes need
        not read this status.
        """
        self._set(is_sound, STATE)

    def draining(self) -> None:
        """Report that the process is alive but not ready, so that Kubernetes does not kill it during the drain."""
        self._set(False, *self._names)

    def _set(self, is_serving: bool, *names: str) -> None:
        for name in names:
            self.servicer.set(name, HealthCheckResponse.SERVING if is_serving else HealthCheckResponse.NOT_SERVING)
