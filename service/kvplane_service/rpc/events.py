"""The Events service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from google.protobuf.message import Message

from kvplane.base.errors import Unavailable
from kvplane.v1 import events_pb2 as pb
from kvplane_service.auth.visible import VisibleReplicas
from kvplane_service.rpc.batches import encode_batch


class EventsServicer:
    """Streams the logs of replicas."""

    def __init__(self, registry: VisibleReplicas) -> None:
        self._registry = registry
        self._draining = asyncio.Event()
        self._wakers: set[asyncio.Event] = set()

    def drain(self) -> None:
        """End every stream, and refuse new ones."""
        self._draining.set()
        for waker in self._wakers:
            waker.set()

    async def Subscribe(self, request: pb.SubscribeRequest) -> AsyncIterator[Message]:  # noqa: N802
        """See the contract."""
        log = self._registry.get(request.replica).host.events
        waker = asyncio.Event()
        subscription = log.subscribe(request.after_seq if request.HasField("after_seq") else None, waker.set)
        self._wakers.add(waker)
        try:
            while not self._draining.is_set():
                waker.clear()
                for batch in subscription.take():
                    yield encode_batch(batch)
                await waker.wait()
        finally:
            self._wakers.discard(waker)
            subscription.cancel()
        raise Unavailable("the service is going away", remedy="subscribe elsewhere")
