"""A service in this process, that is sent the bytes of its session stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import grpc

from kvplane.base.errors import KvplaneError, Unavailable
from kvplane.base.groups import ReplicaSpec
from kvplane.base.session import Opened, OpenRequest
from kvplane.base.step import Step, StepResult
from kvplane.v1 import allocation_pb2 as pb
from kvplane.wire import stream as wire
from kvplane_service.auth.visible import VisibleReplicas
from kvplane_service.registry import Registration
from kvplane_service.replicas.host import ReplicaHost
from kvplane_service.rpc.session import SessionStreams
from kvplane_service.store.memory import MemoryStore
from tests.store.test_restart import Life
from tests.versions.kept import Sent

NAME = "r"


def registration_of(spec: ReplicaSpec) -> Registration:
    """Return the registration of a spec; what tiers keep has a name."""
    return Registration(spec, namespace_digest=b"versions" if spec.tiers else b"")


class _Context:
    """What a stream reads and writes."""

    def __init__(self) -> None:
        self.reads: asyncio.Queue[Any] = asyncio.Queue()
        self.writes: asyncio.Queue[bytes] = asyncio.Queue()

    async def read(self) -> Any:
        return await self.reads.get()

    async def write(self, raw: bytes) -> None:
        self.writes.put_nowait(raw)


class _Ownership:
    async def release(self, replica: str) -> None:
        """No other service takes it."""

    async def ensure_granted(self, name: str) -> None:
        """It is the only service."""


class Served:
    """One service process on a store, with one replica; its streams are open one after the other."""

    def __init__(self, store: MemoryStore, spec: ReplicaSpec) -> None:
        self._life = Life(store)
        self.loop = asyncio.new_event_loop()
        self.registry = self._life.registry
        if NAME not in self.registry:
            self.registry.register(NAME, registration_of(spec))
        visible = VisibleReplicas(self.registry, lambda _: asyncio.sleep(0))
        self._streams = SessionStreams(visible, cast(Any, _Ownership()))
        self._context = _Context()
        self._task: asyncio.Task[None] | None = None

    @property
    def host(self) -> ReplicaHost:
        return self.registry.get(NAME).host

    def connect(self) -> None:
        """Begin a stream."""
        self._context = _Context()
        self._task = self.loop.create_task(self._streams.serve(cast(Any, self._context)))

    def send(self, raw: bytes) -> None:
        """Send a message of the engine."""
        self._context.reads.put_nowait(raw)

    def receive(self) -> bytes:
        """Return the next message of the service; raises the error with which it ended the stream."""
        return self.loop.run_until_complete(self._receive())

    async def _receive(self) -> bytes:
        assert self._task is not None
        answer = asyncio.ensure_future(self._context.writes.get())
        await asyncio.wait({answer, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        answer.cancel()
        self._task.result()
        raise Unavailable("the stream ended")

    def finish(self) -> None:
        """End the stream and the service; the store has all."""
        self._life.flush()
        if self._task is not None and not self._task.done():
            self._context.reads.put_nowait(grpc.aio.EOF)
            self.loop.run_until_complete(asyncio.wait({self._task}))
        self.loop.close()


class Transport:
    """A SessionTransport of messages; `messages` has all of them."""

    draining = can_move = False

    def __init__(self, served: Callable[[], Served]) -> None:
        self._served = served
        self._on: Served | None = None
        self.messages: list[Sent] = []

    def open(self, request: OpenRequest) -> Opened:
        self._on = self._served()
        self._on.connect()
        self._send(wire.serialized(wire.open_message(request)))
        return wire.opened_of(pb.SessionResponse.FromString(self._receive()))

    def send(self, step: Step) -> None:
        if self._on is self._served():
            self._send(wire.step_message(step, 1 << 30))

    def receive(self) -> StepResult | KvplaneError:
        if self._on is not self._served():
            raise Unavailable("the stream is broken")
        answer = wire.answer_of(wire.taken(self._receive()))
        assert answer is not None
        return answer

    def heartbeat(self, waiting_requests: int | None = None) -> None:
        """Leases do not end here."""

    def close(self) -> None:
        self._send(wire.serialized(wire.close_message()))
        self._receive()

    def abort(self) -> None:
        """Nothing waits."""

    def _send(self, raw: bytes) -> None:
        assert self._on is not None
        self.messages.append(Sent(">", raw))
        self._on.send(raw)

    def _receive(self) -> bytes:
        assert self._on is not None
        self.messages.append(Sent("<", self._on.receive()))
        return self.messages[-1].raw
