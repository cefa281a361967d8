"""The Events service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from kvplane.base.errors import Unavailable
from kvplane.v1 import events_pb2 as pb
from kvplane_service.auth.visible import VisibleReplicas
from kvplane_service.rpc.batches import NewestMessages

_AT_ONCE = 64  # batches that are objects while a subscriber reads; what it has not read stays in the log alone


class EventsServicer:
    """Streams the logs of replicas."""

    def __init__(self, registry: VisibleReplicas) -> None:
        self._registry = registry
        self._draining = asyncio.Event()
        self._wakers: set[asyncio.Event] = set()
        self._messages = NewestMessages()

    def drain(self) -> None:
        """End every stream, and refuse new ones."""
        self._draining.set()
        for waker in self._wakers:
            waker.set()

    async def Subscribe(self, request: pb.SubscribeRequest) -> AsyncIterator[bytes]:  # noqa: N802
        """See the contract."""
        log = self._registry.get(request.replica).host.events
        waker = asyncio.Event()
        subscription = log.subscribe(request.after_seq if request.HasField("after_seq") else None, waker.set)
        self._wakers.add(waker)
        try:
            while not self._draining.is_set():
                waker.clear()
                batches = subscription.take(_AT_ONCE)
                for batch in batches:
                    yield self._messages.encode(log, batch)
                if not batches:
                    await waker.wait()
        finally:
            self._wakers.discard(waker)
            subscription.cancel()
        raise Unavailable("the service is going away", remedy="subscribe elsewhere")
