"""A running service for tests: the real one, over real gRPC, in a thread of this process."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar, cast

import grpc
import pytest

from kvplane.base import groups
from kvplane.base.errors import KvplaneError
from kvplane.base.step import Step, StepResult
from kvplane.rpc.status import error_of_rpc
from kvplane.v1 import admin_pb2, events_pb2_grpc
from kvplane.v1 import allocation_pb2 as pb
from kvplane.v1.admin_pb2_grpc import AdminStub
from kvplane.v1.allocation_pb2_grpc import AllocationStub
from kvplane.v1.replica_pb2 import GroupSpec, ReplicaSpec
from kvplane.v1.step_pb2 import StepError
from kvplane_core.face import loader
from kvplane_core.face.interface import ReplicaCore
from kvplane_service.config import Config
from kvplane_service.process.app import App

T = TypeVar("T")
WAIT_S = 20  # for what must happen; reached only by a failure
BLOCK = 16
SPEC = ReplicaSpec(
    groups=[
        GroupSpec(kind="GROUP_KIND_FULL_ATTENTION", block_size=BLOCK),
        GroupSpec(kind="GROUP_KIND_SLIDING_WINDOW", block_size=BLOCK, window=32, lookup_class=1),
    ],
    num_blocks=41,
    max_model_len=1024,
    hash_block_size=BLOCK,
    scheduler_block_size=BLOCK,
    max_in_flight_tokens=256,
)
NONCES = itertools.count(1)


class Service:
    """A service and a client's stubs for it."""

    def __init__(self, app: App, address: str, loop: asyncio.AbstractEventLoop) -> None:
        self.app = app
        self.address = address
        self.loop = loop
        self.channel = grpc.insecure_channel(address)
        self.allocation = AllocationStub(self.channel)
        self.events = events_pb2_grpc.EventsStub(self.channel)
        self.admin = AdminStub(self.channel)

    def register(self, name: str = "r", spec: ReplicaSpec = SPEC) -> None:
        self.allocation.RegisterReplica(pb.RegisterReplicaRequest(replica=name, spec=spec))

    def digest(self, name: str = "r") -> str:
        """Of the whole state, which is proved sound."""
        return self.admin.Snapshot(admin_pb2.SnapshotRequest(replica=name, summary=True)).digest

    def describe(self, name: str = "r") -> pb.DescribeReplicaResponse:
        return self.allocation.DescribeReplica(pb.DescribeReplicaRequest(replica=name))

    def state(self, name: str = "r") -> str:
        return pb.ReplicaState.Name(self.describe(name).state).removeprefix("REPLICA_STATE_")

    def in_loop(self, function: Callable[[], T]) -> T:
        """Call a function where the service runs."""

        async def call() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(WAIT_S)

    def open(self, name: str = "r", epoch: int = 0, **fields: Any) -> Stream:
        """An open session."""
        stream = Stream(self.channel)
        stream.nonce = next(NONCES)
        stream.send(open={"replica": name, "epoch": epoch, "nonce": stream.nonce, **fields})
        stream.opened = stream.receive().opened
        return stream


class Stream:
    """A session's stream, message by message."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._requests: SimpleQueue[bytes | None] = SimpleQueue()
        session: Any = channel.stream_stream(
            "/kvplane.v1.Allocation/Session", response_deserializer=pb.SessionResponse.FromString
        )
        self._call = session(iter(self._requests.get, None), timeout=WAIT_S)
        self.opened = pb.SessionOpened()
        self.nonce = 0
        self.seq = 0

    def send(self, **kind: Any) -> None:
        self.send_raw(pb.SessionRequest(**kind).SerializeToString())

    def send_raw(self, raw: bytes) -> None:
        self._requests.put(raw)

    def receive(self) -> pb.SessionResponse:
        return next(self._call)

    def step(self, *parts: Any, **fields: Any) -> pb.SessionResponse:
        """Send the next step and wait for its answer."""
        self.seq += 1
        header = {"epoch": self.opened.epoch, "seq": self.seq, "executed_through": self.seq - 1}
        self.send(step={**header, "parts": parts or [{}], **fields})
        return self.receive()

    def refused(self, *parts: Any, **fields: Any) -> StepError:
        """Send a step that must be refused; the StepError."""
        response = self.step(*parts, **fields)
        assert response.WhichOneof("kind") == "error", response
        self.seq -= 1
        return response.error

    def end(self) -> KvplaneError | None:
        """The refusal that ends the stream; None when it ends well."""
        try:
            for _ in self._call:
                continue
        except grpc.RpcError as error:
            return error_of(error)
        return None

    def vanish(self) -> None:
        """As if the process had died."""
        self._call.cancel()
        self._requests.put(None)

    def finish(self) -> None:
        """Send no more."""
        self._requests.put(None)

    def close(self) -> pb.SessionResponse:
        self.send(close={})
        return self.receive()


@contextmanager
def running(
    config: Config | None = None,
    clock: Callable[[], int] | None = None,
    new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> Iterator[Service]:
    """A service on a free loopback port."""
    config = config or Config(listen="127.0.0.1:0")
    loop = new_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> tuple[App, str]:
        app = App(config, clock) if clock else App(config)
        return app, await app.start()

    app, address = asyncio.run_coroutine_threadsafe(start(), loop).result(WAIT_S)
    service = Service(app, address, loop)
    try:
        yield service
    finally:
        service.channel.close()
        asyncio.run_coroutine_threadsafe(app.stop(), loop).result(WAIT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT_S)
        loop.close()


def core_class() -> type[ReplicaCore]:
    """The class of the replicas of services, which `KVPLANE_CORE` selects."""
    spec = groups.ReplicaSpec((groups.GroupSpec(groups.GroupKind.FULL_ATTENTION, 1),), 2, 1, 1, 1, 1)
    return type(loader.new_replica(spec))


needs_slices = pytest.mark.skipif(
    core_class().__name__ == "Replica", reason="the specification does long work in few passes"
)


class HeldThread:
    """Long steps and calls of services wait in their thread: `began` is set when one does, and `go_on` lets all go."""

    def __init__(self) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()

    def wait(self) -> None:
        """In the thread."""
        self.began.set()
        assert self.go_on.wait(WAIT_S)


@contextmanager
def held_thread() -> Iterator[HeldThread]:
    """Hold long steps and calls until the test lets them go, or ends."""
    held, core = HeldThread(), core_class()
    apply = core.apply_concurrently

    def wait_and_apply(replica: ReplicaCore, step: Step) -> StepResult:
        held.wait()
        return apply(replica, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "apply_concurrently", wait_and_apply)
        try:
            yield held
        finally:
            held.go_on.set()


@contextmanager
def refusal(kind: type[KvplaneError], field: str | None = None) -> Iterator[list[KvplaneError]]:
    """The block must be refused over the wire; yields a list that gets the refusal."""
    caught: list[KvplaneError] = []
    with pytest.raises(grpc.RpcError) as raised:
        yield caught
    error = error_of(raised.value)
    assert type(error) is kind, repr(error)
    if field is not None:
        assert error.field == field
    caught.append(error)


def error_of(error: grpc.RpcError) -> KvplaneError:
    """The refusal that a failed call stands for."""
    return error_of_rpc(cast(Any, error))


def column(*values: int, size: int = 4) -> bytes:
    """A packed column."""
    return b"".join(value.to_bytes(size, "little", signed=value < 0) for value in values)


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another process or thread does; fails after WAIT_S."""
    pause = threading.Event()
    for _ in range(WAIT_S * 200):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError("it did not happen")
