"""The reader of a blocking session's stream: every small order of answers, ends and calls; fork, exit, collection."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
import weakref
from contextlib import closing
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from kvplane import connect
from kvplane.base.errors import DeadlineExceeded, FailedPrecondition, InternalError, KvplaneError, Unavailable
from kvplane.base.step import Part, PartResult, StepResult
from kvplane.blocking.transport import GrpcTransport, _Stream
from kvplane.sansio.retry import RetryPolicy
from kvplane.v1.allocation_pb2 import Draining, SessionResponse
from kvplane.wire.result import encode_result
from kvplane.wire.stream import heartbeat_message
from tests.client.loop_thread import LIMIT_S
from tests.client.mini_engine import HYBRID
from tests.client.worlds import GrpcWorld
from tests.service.rig import until

RECEIVE_S = 60.0


class FakeCall(grpc.RpcError):
    """A call of gRPC whose messages, end and failure a test decides; it is also the error that its iterator raises."""

    def __init__(self, deserializer: Any) -> None:
        self._deserializer = deserializer
        self._outcome: Any = None
        self.happens: SimpleQueue[object] = SimpleQueue()
        self.requests: Any = None

    def __iter__(self):
        return self

    def __next__(self) -> object:
        what = self.happens.get()
        if isinstance(what, bytes):
            return self._deserializer(what)  # gRPC calls it before it wakes the reader
        if isinstance(what, RuntimeError):
            raise what
        self._outcome = self._outcome or what
        if what is grpc.StatusCode.OK:
            raise StopIteration
        raise self

    def cancel(self) -> None:
        if self._outcome is None:
            self._outcome = grpc.StatusCode.CANCELLED
        self.happens.put(grpc.StatusCode.CANCELLED)

    def is_active(self) -> bool:
        return self._outcome is None

    def code(self) -> Any:
        assert self._outcome is not None, "gRPC would wait for the outcome"
        return self._outcome

    def details(self) -> str:
        return "broken here"

    def trailing_metadata(self) -> tuple[()]:
        return ()


class FakeChannel:
    """The channel of one FakeCall."""

    call: FakeCall

    def stream_stream(self, path: str, serializer: Any, deserializer: Any) -> Any:
        assert path == "/kvplane.v1.Allocation/Session"
        assert serializer(heartbeat_message()) == serializer(heartbeat_message().SerializeToString())

        def start(requests: Any) -> FakeCall:
            self.call = FakeCall(deserializer)
            self.call.requests = requests
            return self.call

        return start


def answer(seq: int) -> bytes:
    result = StepResult(seq, 0, [PartResult(granted=[seq], free_blocks=5)])
    return SessionResponse(result=encode_result(result)).SerializeToString()


def opened_stream() -> tuple[Any, FakeCall]:
    channel: Any = FakeChannel()
    return _Stream(channel), channel.call


def readers() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name == "kvplane-answers"}


def ended(threads: set[threading.Thread]) -> bool:
    for one in threads:
        one.join(LIMIT_S)
    return not any(one.is_alive() for one in threads)


HAPPENINGS: dict[str, Any] = {
    "answer": lambda stream, call, number: call.happens.put(answer(number)),
    "end": lambda stream, call, number: call.happens.put(grpc.StatusCode.OK),
    "break": lambda stream, call, number: call.happens.put(grpc.StatusCode.UNAVAILABLE),
    "cut": lambda stream, call, number: stream.cut(),
}


def orders() -> list[tuple[str, ...]]:
    """Up to three answers, and one to two endings of any kind somewhere among them."""
    found = set()
    for num_answers, endings in itertools.product(range(4), itertools.product(["end", "break", "cut"], repeat=2)):
        for count in (1, 2):
            found |= set(itertools.permutations(["answer"] * num_answers + list(endings[:count])))
    return sorted(found)


@pytest.mark.parametrize("asks", ["waits", "looks first"])
@pytest.mark.parametrize("when", ["before", "while", "after"])
def test_answers_come_in_order_and_then_the_end_in_every_order_of_events(when, asks):
    """Before, while or after the engine waits for them, whether or not it looks for an answer that is here first."""
    for order in orders():
        before = readers()
        stream, call = opened_stream()
        mine, received = readers() - before, list[int]()

        def receive_all(stream=stream, received=received):
            while True:
                try:
                    taken = (stream.ready() if asks == "looks first" else None) or stream.receive(RECEIVE_S)
                except KvplaneError as error:
                    with pytest.raises(type(error)):  # and again
                        stream.receive(RECEIVE_S)
                    with pytest.raises(type(error)):
                        stream.check()
                    return
                assert isinstance(taken, StepResult), "decoded by the reader"
                received.append(taken.seq)

        def happen(stream=stream, call=call, order=order):
            numbers = itertools.count(1)
            for name in order:
                HAPPENINGS[name](stream, call, next(numbers) if name == "answer" else 0)

        engine = threading.Thread(target=receive_all)
        if when == "before":
            happen()
            assert ended(mine)
        elif when == "while":
            engine.start()
            happen()
        else:
            with pytest.raises(DeadlineExceeded):
                stream.receive(0.0)
            happen()
        if when != "while":
            engine.start()
        assert ended({engine})
        assert ended(mine)
        until_end = order.index(next(name for name in order if name != "answer"))
        if "cut" not in order and when != "after":
            assert received == list(range(1, until_end + 1)), order
        else:  # what arrives behind a cancelled call is lost; the session sends its steps again
            assert received == list(range(1, len(received) + 1)), order
            assert len(received) <= order.count("answer")


def test_look_for_an_answer_leaves_everything_but_results_to_those_who_wait():
    stream, call = opened_stream()
    notice = SessionResponse(draining=Draining(grace_ms=7))
    for number in (1, 2):
        call.happens.put(answer(number))
        call.happens.put(notice.SerializeToString())
    call.happens.put(grpc.StatusCode.OK)
    assert ended({one for one in readers() if one.is_alive()})
    for number in (1, 2):
        found = stream.ready()
        assert found is not None
        assert found.seq == number
        assert (stream.ready(), stream.ready()) == (None, None)
        assert stream.receive(RECEIVE_S) == notice
    assert (stream.ready(), stream.ready()) == (None, None)
    with pytest.raises(Unavailable):
        stream.receive(RECEIVE_S)


def test_a_bug_of_the_reader_reaches_who_waits():
    stream, call = opened_stream()
    call.happens.put(answer(1))
    bug = RuntimeError("planted")
    call.happens.put(bug)
    assert stream.receive(RECEIVE_S).seq == 1
    for _ in range(2):
        with pytest.raises(InternalError, match="planted") as raised:
            stream.receive(RECEIVE_S)
        assert raised.value.__cause__ is bug
    with pytest.raises(KvplaneError):
        stream.check()


def test_a_result_that_cannot_be_decoded_is_refused_where_it_is_awaited(monkeypatch):
    transport, channel = GrpcTransport(FakeChannel()), FakeChannel()  # type: ignore[arg-type]
    transport._stream = _Stream(channel)  # type: ignore[arg-type]
    wrong = SessionResponse()
    wrong.result.parts.add().granted = b"123"
    channel.call.happens.put(wrong.SerializeToString())
    channel.call.happens.put(SessionResponse(draining=Draining()).SerializeToString())
    channel.call.happens.put(answer(2))
    with pytest.raises(KvplaneError, match="granted"):
        transport.receive()
    assert not transport.draining
    taken = transport.receive()
    assert isinstance(taken, StepResult)
    assert (taken.seq, transport.draining) == (2, True)
    transport.abort()


def test_a_collected_stream_ends_its_call_and_its_reader():
    before = readers()
    stream, call = opened_stream()
    mine, gone = readers() - before, weakref.ref(stream)
    assert len(mine) == 1
    del stream
    gc.collect()
    assert gone() is None
    assert ended(mine)
    assert not call.is_active()
    assert next(call.requests, "end") == "end", "gRPC's sender thread ends"


# ---- over gRPC


@pytest.fixture(scope="module")
def world():
    with closing(GrpcWorld("127.0.0.1:0")) as world:
        yield world


def arrived(session: Any) -> None:
    """Wait until an answer has arrived."""
    answers = session._transport._stream._answers
    waiting = threading.Event()
    for _ in range(int(LIMIT_S / 0.005)):
        if not answers.empty():
            return
        waiting.wait(0.005)
    raise AssertionError("no answer arrived")


def test_an_answer_is_there_before_anyone_asks(world):
    with world.client.session(world.replica) as session:
        for seq in range(1, 4):
            session.submit(Part())
            arrived(session)
            assert session._transport._stream._answers.qsize() == 1
            assert session.receive().seq == seq


def test_an_answer_that_is_there_is_lost_with_its_stream_and_repeated(world):
    with world.client.session(world.replica) as session:
        session.submit(Part())
        arrived(session)
        session._transport._drop()
        assert session.receive().seq == 1
        assert session.apply(Part()).seq == 2


@pytest.mark.parametrize("is_there", [False, True])
def test_abort_from_another_thread_beats_an_answer(world, is_there):
    session = world.client.session(world.replica, retry=RetryPolicy(attempts=1))
    session.submit(Part())
    if is_there:
        arrived(session)
    other = threading.Thread(target=session.abort)
    other.start()
    assert ended({other})
    with pytest.raises(FailedPrecondition, match="aborted"):
        session.receive()
    with pytest.raises(Unavailable):
        session._transport.receive()


PROCESS = """
import os, sys, threading
import kvplane

client = kvplane.connect(sys.argv[1])
session = client.session(sys.argv[2])
session.apply(kvplane.Part())
{how}
"""
ENDS = {
    "with a step in flight": "session.submit(kvplane.Part())",
    "with nothing in flight": "",
    "while a thread steps": """
def step():
    while True:
        session.apply(kvplane.Part())
        stepped.set()

stepped = threading.Event()
threading.Thread(target=step, daemon=True).start()
assert stepped.wait(60)
""",
    "after a fork": """
session.submit(kvplane.Part())
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert session.receive().seq == 2
assert session.apply(kvplane.Part()).seq == 3
session.close()
""",
}


@pytest.mark.parametrize("how", ENDS)
def test_a_process_ends_cleanly(world, how):
    command = [sys.executable, "-c", PROCESS.format(how=ENDS[how]), world.service.address, world.replica]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "Fatal" not in done.stderr


@pytest.mark.parametrize("what", ["session", "subscription"])
def test_collection_waits_for_no_lock_of_grpc(world, what):
    """It may run on a thread that holds another lock of gRPC."""
    with connect(world.service.address) as client:
        made: Any
        if what == "session":
            made = client.session(world.replica)
            call = made._transport._stream._call
        else:
            client.register_replica("quiet", HYBRID)
            client.reset_prefix_cache("quiet")  # an event
            made = client.subscribe("quiet", after_seq=0)
            next(made)
            call = made.gi_frame.f_locals["stream"]
        is_held, is_collected = threading.Event(), threading.Event()
        outcomes = []

        def hold() -> None:
            with call._state.condition:
                is_held.set()
                outcomes.append(is_collected.wait(LIMIT_S))

        holder = threading.Thread(target=hold)
        holder.start()
        assert is_held.wait(LIMIT_S)
        del made
        gc.collect()
        is_collected.set()
        holder.join()
        assert outcomes == [True]
        until(lambda: not call.is_active())
