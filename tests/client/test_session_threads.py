"""Leases kept by a thread or a task, and concurrent use of one session."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from kvplane import aio
from kvplane.aio import transport as aio_transport
from kvplane.base.errors import FailedPrecondition
from kvplane.base.session import OpenRequest
from kvplane.base.step import Part
from kvplane.blocking.session import Session
from kvplane.blocking.transport import GrpcTransport
from kvplane.session.rows import AdmitRow, NewsRow, RunRow, part_of
from kvplane.session.view import looked_at
from kvplane_service.config import Config
from tests.client.loop_thread import LIMIT_S, Awaited
from tests.client.worlds import InProcessWorld
from tests.service.inprocess import InProcessTransport

ASK = part_of(NewsRow(0, range(40)), AdmitRow(0, cap=20))


class Watched:
    """Signals when a heartbeat arrived and when a call waits for an answer, which it can hold back."""

    def __init__(self, inner):
        self._inner = inner
        self.beat = threading.Event()
        self.waiting = threading.Event()
        self.release = threading.Event()
        self.release.set()

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def heartbeat(self, waiting_requests=None):
        self._inner.heartbeat()
        self.beat.set()

    def receive(self):
        self.waiting.set()
        assert self.release.wait(LIMIT_S)
        return self._inner.receive()


class WatchedLook(Watched):
    """The same for a transport at which a session looks for an answer before it waits."""

    def ready(self):
        self.waiting.set()
        assert self.release.wait(LIMIT_S)
        return self._inner.ready()

    def receive(self):
        raise AssertionError("the answer was there when the session looked")


@pytest.fixture
def world():
    return InProcessWorld()


@pytest.fixture
def quick():
    """A world whose lease asks for a beat every 10 ms."""
    return InProcessWorld(Config(lease_ms=30))


def lease_threads():
    return {one for one in threading.enumerate() if one.name == "kvplane-lease-small"}


# ---- threads


def test_a_thread_keeps_the_lease_until_the_session_closes(quick):
    transport, others = Watched(quick.transport()), lease_threads()
    with Session(transport, OpenRequest(quick.replica, 1)):
        assert transport.beat.wait(LIMIT_S)
        (thread,) = lease_threads() - others
        assert thread.daemon
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_a_garbage_collected_session_loses_its_lease(quick):
    others = lease_threads()
    session = Session(quick.transport(), OpenRequest(quick.replica, 1))
    (thread,) = lease_threads() - others
    del session
    gc.collect()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("kind", [Watched, WatchedLook])
def test_a_second_thread_is_refused_while_a_call_is_under_way(world, kind):
    transport = kind(world.transport())
    with Session(transport, OpenRequest(world.replica, 1), heartbeats=False) as session:
        transport.release.clear()
        outcome = []
        engine = threading.Thread(target=lambda: outcome.append(session.apply(ASK)))
        engine.start()
        assert transport.waiting.wait(LIMIT_S)
        with pytest.raises(FailedPrecondition, match="another thread"):
            session.apply(Part())
        session.beat()
        assert not transport.beat.is_set()
        transport.release.set()
        engine.join(LIMIT_S)
        assert outcome[0].seq == 1
        assert session.apply(part_of(RunRow(0))).seq == 2


class Replaced(InProcessTransport):
    """Replaces `receive` alone, so that the `ready` of its base class must not be called."""

    def receive(self):
        return super().receive()


class Inherited(InProcessTransport):
    """Changes neither."""


@pytest.mark.parametrize("wrap", [Watched, Awaited], ids=lambda kind: kind.__name__)
def test_a_look_does_not_pass_by_what_wraps_or_replaces_receive(world, wrap):
    assert hasattr(wrap(world.transport()), "ready")
    assert looked_at(wrap(world.transport())) is None
    assert looked_at(Replaced(lambda _: world.host)) is None


def test_transports_with_both_methods_are_looked_at(world):
    for kind in (InProcessTransport, Inherited, GrpcTransport, aio_transport.GrpcTransport):
        transport = kind.__new__(kind)
        assert looked_at(transport) is transport
    assert looked_at(transport := WatchedLook(world.transport())) is transport


def test_a_session_may_be_used_from_one_thread_after_another(world):
    with Session(world.transport(), OpenRequest(world.replica, 1), heartbeats=False) as session:
        outcome = []
        engine = threading.Thread(target=lambda: outcome.append(session.apply(ASK).seq))
        engine.start()
        engine.join(LIMIT_S)
        assert outcome == [1]
        assert session.apply(Part()).seq == 2


# ---- tasks


class Slow(Awaited):
    """Answers only when the test releases it."""

    def __init__(self, inner):
        super().__init__(inner)
        self.waiting = asyncio.Event()
        self.answered = asyncio.Event()
        self.beat = asyncio.Event()

    async def receive(self):
        self.waiting.set()
        await self.answered.wait()
        return self._inner.receive()

    async def heartbeat(self, waiting_requests=None):
        self._inner.heartbeat()
        self.beat.set()


async def test_a_task_keeps_the_lease_until_the_session_closes(quick):
    transport = Slow(quick.transport())
    before = asyncio.all_tasks()
    async with await aio.Session(transport, OpenRequest(quick.replica, 1)).open():
        await asyncio.wait_for(transport.beat.wait(), LIMIT_S)
        (task,) = asyncio.all_tasks() - before
    await asyncio.wait([task], timeout=LIMIT_S)
    assert task.done()


async def test_a_garbage_collected_asyncio_session_loses_its_lease(quick):
    before = asyncio.all_tasks()
    session = await aio.Session(Awaited(quick.transport()), OpenRequest(quick.replica, 1)).open()
    (task,) = asyncio.all_tasks() - before
    del session
    gc.collect()
    await asyncio.wait([task], timeout=LIMIT_S)
    assert task.done()


async def test_a_second_task_is_refused_while_a_call_is_under_way(world):
    transport = Slow(world.transport())
    async with await aio.Session(transport, OpenRequest(world.replica, 1)).open() as session:
        engine = asyncio.create_task(session.apply(ASK))
        await asyncio.wait_for(transport.waiting.wait(), LIMIT_S)
        with pytest.raises(FailedPrecondition, match="another task"):
            await session.apply(Part())
        await session.beat()
        assert not transport.beat.is_set()
        transport.answered.set()
        assert (await engine).seq == 1
        assert (await session.apply(part_of(RunRow(0)))).seq == 2


async def test_a_cancelled_call_leaves_its_step_in_flight(world):
    transport = Slow(world.transport())
    async with await aio.Session(transport, OpenRequest(world.replica, 1)).open() as session:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.apply(ASK), 0.01)
        assert session.in_flight == 1
        transport.answered.set()
        assert (await session.receive()).parts[0].admit_granted == [20]
