"""gRPC health, for probes and load balancers."""

from __future__ import annotations

from collections.abc import Sequence

from grpc_health.v1 import health, health_pb2
from grpc_health.v1.health_pb2 import HealthCheckResponse

LIVENESS = "liveness"
READINESS = "readiness"
STORE = "store"
SERVICE_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class Health:
    """What this process says of itself under '', each service, 'liveness', 'readiness' and 'store'."""

    def __init__(self, services: Sequence[str]) -> None:
        self.servicer = health.aio.HealthServicer()
        self._names = ("", *services, READINESS)

    async def starting(self) -> None:
        """Calls are answered, but what was stored is still being read: send nothing here yet, and kill nobody."""
        await self.servicer.set(LIVENESS, HealthCheckResponse.SERVING)
        for name in self._names:
            await self.servicer.set(name, HealthCheckResponse.NOT_SERVING)

    async def serving(self) -> None:
        """Everything is up."""
        for name in (*self._names, LIVENESS):
            await self.servicer.set(name, HealthCheckResponse.SERVING)

    async def store(self, is_there: bool) -> None:
        """Whether the durable side is there, under 'store'; for operators alone, and only where there is one."""
        status = HealthCheckResponse.SERVING if is_there else HealthCheckResponse.NOT_SERVING
        await self.servicer.set(STORE, status)

    async def draining(self) -> None:
        """Send nothing new here; the process is well nevertheless, so that nobody kills it while it drains."""
        for name in self._names:
            await self.servicer.set(name, HealthCheckResponse.NOT_SERVING)
