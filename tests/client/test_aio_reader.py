"""The task that reads the stream of an asyncio session."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import closing
from typing import Any

import pytest

from kvplane import aio
from kvplane.aio.transport import _Stream
from kvplane.base.errors import FailedPrecondition, InternalError, KvplaneError, Unavailable
from kvplane.base.step import Part, StepResult
from kvplane.v1.allocation_pb2 import Draining, SessionResponse
from tests.client.loop_thread import LIMIT_S, on_shared_loop, shared_loop
from tests.client.test_reader import answer
from tests.client.worlds import GrpcWorld


@pytest.fixture(scope="module")
def world():
    with closing(GrpcWorld("127.0.0.1:0")) as world:
        yield world


@pytest.fixture
def client(world):
    world.reset()
    client = shared_loop().make(aio.connect, world.service.address)
    yield client
    shared_loop().do(client.close)


async def until(is_so: Any) -> None:
    for _ in range(int(LIMIT_S / 0.002)):
        if is_so():
            return
        await asyncio.sleep(0.002)
    raise TimeoutError


def readers() -> set[asyncio.Task[Any]]:
    return {one for one in asyncio.all_tasks() if one.get_name() == "kvplane-answers"}


def test_an_answer_is_there_before_anyone_asks(client, world):
    receive_what_is_there(client, world.replica)


@on_shared_loop
async def receive_what_is_there(client, replica):
    """Then receiving does not give the loop to others."""
    async with await client.session(replica) as session:
        for seq in range(1, 4):
            await session.submit(Part())
            await until(lambda: session._transport._stream._answers)
            receiving = session._transport.receive()
            with pytest.raises(StopIteration) as stopped:
                receiving.send(None)
            session._transport._stream._answers.append(stopped.value.value)
            assert (await session.receive()).seq == seq


def test_receive_of_an_answer_that_is_there_asks_nothing_else(client, world):
    receive_without_the_stream(client, world.replica)


@on_shared_loop
async def receive_without_the_stream(client, replica):
    """Only results, and only while the stream is in order and no other task is in a call."""
    async with await client.session(replica) as session:
        transport = session._transport
        await session.submit(Part())
        await until(lambda: transport._stream._answers)
        receiving = session.receive()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transport, "receive", None)  # is not used
            with pytest.raises(StopIteration) as stopped:
                receiving.send(None)
        assert stopped.value.value.seq == 1
        assert transport.ready() is None
        await session.submit(Part())
        await until(lambda: transport._stream._answers)
        notice = SessionResponse(draining=Draining(grace_ms=7))
        transport._stream._answers.appendleft(notice)
        assert transport.ready() is None
        assert not session.draining
        assert (await session.receive()).seq == 2
        assert session.draining
        transport.draining = False
        await session.submit(Part())
        await until(lambda: transport._stream._answers)
        session._in_call = True
        with pytest.raises(FailedPrecondition, match="another task"):
            await session.receive()
        session._in_call = False
        assert (await session.receive()).seq == 3
        session.abort()
        with pytest.raises(FailedPrecondition, match="aborted"):
            await session.receive()


def test_abort_beats_an_answer_and_wakes_who_waits(client, world):
    abort_while_waiting(client, world.replica)


@on_shared_loop
async def abort_while_waiting(client, replica):
    session = await client.session(replica)
    waiting = asyncio.create_task(session._transport.receive())
    await asyncio.sleep(0)
    session.abort()
    with pytest.raises(Unavailable):
        await waiting
    with pytest.raises(FailedPrecondition, match="aborted"):
        await session.apply(Part())


def test_a_collected_session_ends_its_reader(client, world):
    collect(client, world.replica)


@on_shared_loop
async def collect(client, replica):
    before = readers()
    session = await client.session(replica)
    (mine,) = readers() - before
    del session
    gc.collect()
    await asyncio.wait([mine], timeout=LIMIT_S)
    assert mine.done()


def test_a_session_collected_on_another_thread_ends_its_call_on_the_thread_of_its_loop(client, world, monkeypatch):
    ended_on = {}  # threads, by the task that reads the stream

    def cancel(stream: _Stream) -> None:
        ended_on[stream._reader] = threading.current_thread()
        stream.call.cancel()

    monkeypatch.setattr(_Stream, "cancel", cancel)
    collect_on_a_thread(client, world.replica, ended_on)


@on_shared_loop
async def collect_on_a_thread(client, replica, ended_on):
    before = readers()
    sessions = [await client.session(replica)]
    (mine,) = readers() - before

    def drop() -> None:
        sessions.clear()
        gc.collect()

    await asyncio.to_thread(drop)
    await asyncio.wait([mine], timeout=LIMIT_S)
    assert mine.done()
    assert ended_on[mine] is threading.current_thread()


class FakeCall:
    """A call of gRPC that gives one answer and then fails or ends as a test decides."""

    def __init__(self, last: Any) -> None:
        self._given = [SessionResponse.FromString(answer(1)), last]

    def add_done_callback(self, _: Any) -> None:
        """Never called: the test ends first."""

    async def read(self) -> Any:
        given = self._given.pop(0)
        if isinstance(given, BaseException):
            raise given
        return given


async def ends_with(last: Any) -> KvplaneError:
    call: Any = FakeCall(last)
    stream = _Stream(call)
    taken = await stream.read()
    assert isinstance(taken, StepResult)
    assert taken.seq == 1
    errors = []
    for wait in (stream.read, stream.read, stream.raise_end):
        with pytest.raises(KvplaneError) as raised:
            await asyncio.wait_for(wait(), LIMIT_S)
        errors.append(raised.value)
    assert len(set(map(id, errors))) == 1
    return errors[0]


async def test_the_end_of_a_stream_is_raised_again_and_again():
    assert isinstance(await ends_with(object()), Unavailable)
    assert isinstance(await ends_with(asyncio.CancelledError()), Unavailable)


async def test_a_bug_of_the_reader_reaches_who_waits():
    bug = RuntimeError("planted")
    error = await ends_with(bug)
    assert isinstance(error, InternalError)
    assert error.__cause__ is bug
