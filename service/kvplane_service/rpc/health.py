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
    """The health of this process under '', each service, 'liveness', 'readiness' and 'store'."""

    def __init__(self, services: Sequence[str]) -> None:
        self.servicer = health.aio.HealthServicer()
        self._names = ("", *services, READINESS)

    async def starting(self) -> None:
        """Alive, but not ready: the store is still being read."""
        await self.servicer.set(LIVENESS, HealthCheckResponse.SERVING)
        for name in self._names:
            await self.servicer.set(name, HealthCheckResponse.NOT_SERVING)

    async def serving(self) -> None:
        """Alive and ready."""
        for name in (*self._names, LIVENESS):
            await self.servicer.set(name, HealthCheckResponse.SERVING)

    async def store(self, is_there: bool) -> None:
        """Report whether the store is available, under 'store'; for operators, and only if one is configured."""
        status = HealthCheckResponse.SERVING if is_there else HealthCheckResponse.NOT_SERVING
        await self.servicer.set(STORE, status)

    async def draining(self) -> None:
        """Not ready, but alive, so that Kubernetes does not kill the process while it drains."""
        for name in self._names:
            await self.servicer.set(name, HealthCheckResponse.NOT_SERVING)
