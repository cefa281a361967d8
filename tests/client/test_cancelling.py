"""Calls cancelled or interrupted at any point: the session still works, or has ended with a reason. Both drivers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from contextlib import closing, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane import aio
from kvplane.base.errors import FailedPrecondition, LimitExceeded
from kvplane.base.session import OpenRequest
from kvplane.base.step import StepResult
from kvplane.blocking.session import Session
from kvplane.sansio.retry import RetryPolicy
from kvplane.session.reopening import Revival
from kvplane.session.rows import AdmitRow, NewsRow, part_of
from kvplane_service.config import Config
from kvplane_service.registry import Registry
from kvplane_service.replicas.recovery import Recovering
from kvplane_service.replicas.stamps import Contents
from tests.client.loop_thread import Awaited, on_shared_loop, shared_loop
from tests.client.worlds import GrpcWorld, InProcessWorld
from tests.twins import weakened

ASK = part_of(NewsRow(0, range(40)), AdmitRow(0))
NAMES = ["submit", "receive", "submit", "receive", "apply", "beat", "restart", "renew"]
CALLS = st.lists(st.sampled_from(NAMES), max_size=8)
LAST = ["receive "] * 4 + ["apply "]  # nothing is interrupted any more


class Interrupted(BaseException):
    """Stands for KeyboardInterrupt, which pytest keeps for itself."""


def restless(transport: Any, interrupt: Callable[[], None]) -> Any:
    """The transport, with `interrupt` called before and after what each method does."""

    class Restless:
        def __getattr__(self, name: str) -> Any:
            value = getattr(transport, name)
            if not callable(value) or name == "abort":
                return value

            def call(*given: Any) -> Any:
                interrupt()
                outcome = value(*given)
                interrupt()
                return outcome

            return call

    return Restless()


class Countdown:
    """Interrupts at one point."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Interrupted


class Engine:
    """Names each step by a request with as many hashes as its number, and checks that it gets that step's answer."""

    def __init__(self, world: InProcessWorld, session: Any) -> None:
        self.world, self.session = world, session
        self._count = 0
        self._in_flight: list[int] = []

    def act(self, name: str) -> Any:
        """What the call returns: a result, or what must be awaited."""
        name = name.strip()
        if name == "restart":
            restarted(self.world)
            self.session._transport.abort()
        elif name == "renew":
            self.session.begin_new_life()
        elif name in ("apply", "submit"):
            self._count += 1
            part = part_of(NewsRow(self._count, range(16 * self._count)))
            part.with_hashes = True
            done = self.session.next_seq - 1 - self.session.in_flight
            return getattr(self.session, name)(part, executed_through=done)
        else:
            return getattr(self.session, name)()
        return None

    def note(self, before: int, result: object) -> None:
        """The call ended; `before` steps were in flight before it."""
        assert self.session.ended is None
        answered = isinstance(result, StepResult)
        if self.session.in_flight + answered > before:
            self._in_flight.append(self._count)
        if isinstance(result, StepResult):
            number = self._in_flight.pop(0)
            assert result.parts[0].num_hashes in ([number], [0]), "the answer of another step"
        assert len(self._in_flight) == self.session.in_flight


def restarted(world: InProcessWorld) -> None:
    epoch = world.host.epoch
    world.registry = Registry(Config(), lambda: 0)
    world.register()
    world.host.recover(Recovering(epoch, Contents(), loading=False, entries=[]))


def requests() -> Revival:
    """One of them: the others are never looked at again."""
    return Revival(news=part_of(NewsRow(0, range(40))).news, running=(0,))


@given(CALLS, st.integers(1, 40))
def test_a_blocking_session_survives_an_interrupted_call(calls, after):
    world, countdown = InProcessWorld(), Countdown(10**9)
    policy = RetryPolicy(3, sleep=lambda _: countdown())
    transport = restless(world.transport(), countdown)
    session = Session(transport, OpenRequest(world.replica, 1), retry=policy, heartbeats=False, revive=requests)
    session.apply(ASK)
    engine, countdown.left = Engine(world, session), after
    for name in [*calls, *LAST]:
        if name in LAST:
            countdown.left = 10**9
        before, result = session.in_flight, None
        with suppress(Interrupted, FailedPrecondition, LimitExceeded):
            result = engine.act(name)
        engine.note(before, result)
    assert session.in_flight == 0
    session.close()


class Ticking:
    """A coroutine that is cancelled from within after a number of its own steps, at any await."""

    def __init__(self, work: Coroutine[Any, Any, Any], after: int) -> None:
        self._work, self._left = work, after

    def __await__(self):
        running, value = self._work.__await__(), None
        error: BaseException | None = None
        while True:
            self._left -= 1
            try:
                if self._left == 0:
                    error = asyncio.CancelledError()
                waits = running.throw(error) if error is not None else running.send(value)
            except StopIteration as end:
                return end.value
            value = error = None
            try:
                value = yield waits
            except BaseException as raised:
                error = raised


class Yielding(Awaited):
    """What is blocking but quick, with an await before and behind each method."""

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if not callable(method) or name == "abort":
            return method

        async def call(*args: object, **facts: object) -> Any:
            await asyncio.sleep(0)
            outcome = method(*args, **facts)
            await asyncio.sleep(0)
            return outcome

        return call


@given(CALLS, st.lists(st.integers(1, 12), max_size=8))
def test_an_asyncio_session_survives_a_cancelled_call(calls, points):
    asyncio.run(cancelled_at(calls, points))


async def cancelled_at(calls, points):
    world = InProcessWorld()
    session = aio.Session(
        Yielding(world.transport()),
        OpenRequest(world.replica, 1),
        retry=RetryPolicy(3),
        pause=lambda _: asyncio.sleep(0),
        revive=requests,
    )
    await session.open(heartbeats=False)
    await session.apply(ASK)
    engine = Engine(world, session)
    points = [*points, *[10**9] * len(calls)][: len(calls)] + [10**9] * len(LAST)
    for name, point in zip([*calls, *LAST], points, strict=True):
        before, result = session.in_flight, None
        with suppress(asyncio.CancelledError, FailedPrecondition, LimitExceeded):
            work = engine.act(name)
            if work is not None:
                result = await Ticking(work, point)
        engine.note(before, result)
    assert session.in_flight == 0
    await session.close()


# ---- over gRPC, where a cancelled write or read cancels the stream


@pytest.fixture(scope="module")
def served():
    with closing(GrpcWorld("127.0.0.1:0")) as world:
        yield world


@pytest.fixture
def client(served):
    served.reset()
    client = shared_loop().make(aio.connect, served.service.address)
    yield client
    shared_loop().do(client.close)


@pytest.mark.parametrize("seed", range(4))
def test_a_cancelled_call_over_grpc_does_not_cancel_the_next_one(client, served, seed):
    cancel_here_and_there(client, served.replica, random.Random(seed))


async def answer_is_there(transport: Any) -> None:
    """Wait for it, so that `receive` takes it at once; not for long, since a broken stream has none."""
    for _ in range(200):
        stream = transport._stream
        if stream is None or stream._answers or stream.call.done():
            return
        await asyncio.sleep(0.005)


@on_shared_loop
async def cancel_here_and_there(client, name, rng):
    """A task that was not cancelled itself never sees a CancelledError, and each step is answered once, in order."""
    session = await client.session(name)
    cancelled, first, answered = 0, session.next_seq, list[int]()
    for number in range(60):
        if rng.random() < 0.5:
            if not session.in_flight:
                await session.submit(part_of())
            await answer_is_there(session._transport)
        call = rng.choice([session.submit, session.apply]) if not session.in_flight else session.receive
        task = asyncio.create_task(call(part_of()) if call != session.receive else call())
        for _ in range(rng.choice([0, 1, 1, 2, 3, 20, 200])):
            await asyncio.sleep(0)
        task.cancel()
        try:
            result = await task
        except asyncio.CancelledError:
            cancelled += 1
        else:
            answered += [result.seq] if isinstance(result, StepResult) else []
        assert session.ended is None, number
        while session.in_flight and rng.random() < 0.7:
            answered.append((await session.receive()).seq)
    assert cancelled > 10
    while session.in_flight:
        answered.append((await session.receive()).seq)
    assert answered == list(range(first, session.next_seq)), "an answer was lost"
    seq = session.next_seq
    assert (await session.apply(part_of())).seq == seq
    await session.close()


def test_a_planted_leak_of_a_cancellation_is_caught(client, served):
    with weakened("a cancel that leaks"), pytest.raises((CancelledError, TimeoutError, AssertionError)):
        cancel_here_and_there(client, served.replica, random.Random(1))
