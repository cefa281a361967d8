"""Remove the replicas that nothing has used for `replica_ttl_ms`, so that they do not fill `max_replicas`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kvplane_service.registry import Registry
from kvplane_service.store.ownership import Ownership

_CHECKS_PER_TTL = 8
_LONGEST_PAUSE_S = 600.0


async def expire_in_background(
    registry: Registry, ownership: Ownership, ttl_ms: int, sleep: Callable[[float], Awaitable[None]]
) -> None:
    """Until cancelled, remove replicas that have expired, several times per `ttl_ms`."""
    while True:
        await sleep(min(_LONGEST_PAUSE_S, ttl_ms / 1000 / _CHECKS_PER_TTL))
        await expire_all(registry, ownership, ttl_ms)


async def expire_all(registry: Registry, ownership: Ownership, ttl_ms: int) -> None:
    """Remove the replicas that have expired, and what a store has kept long enough of earlier ones."""
    for name in _unused(registry, ttl_ms * 1_000_000):
        await ownership.expire(name, ttl_ms * 1_000_000)
    await ownership.drop_expired()


def _unused(registry: Registry, ttl_ns: int) -> list[str]:
    """Return the names of the replicas that have expired. A worker that holds the pages of a replica uses it."""
    for entry in registry:
        if entry.workers.alive():
            entry.host.touch()
    return [entry.host.name for entry in registry if entry.host.unused_ns >= ttl_ns]
