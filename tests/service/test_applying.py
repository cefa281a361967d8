"""A long step is applied on a thread: the result is the same, and the replica cannot be read meanwhile."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplane.base.errors import InternalError, InvalidArgument, KvplaneError, NotFound, OtherWriter, SequenceError
from kvplane.base.session import OpenRequest
from kvplane.base.step import Admit, End, OnRefusal, Part, Run, Step
from kvplane.session.rows import AdmitRow, FactRow, NewsRow, RunRow, part_of
from kvplane_service.replicas import applying
from kvplane_service.replicas.engine_lives import ignore_end
from kvplane_service.replicas.host import ReplicaState
from kvplane_service.replicas.step_order import UnaryStep
from kvplane_service.runtime.executors import Executor
from kvplane_service.runtime.rota import Busy
from tests.service.hosts import NONCES, HostWorld

PROMPT = list(range(64))


@pytest.fixture(autouse=True)
def every_step_is_long(monkeypatch):
    monkeypatch.setattr(applying, "MOST_INLINE_NS", -1)


class Hand:
    """An offload whose calls begin and return when the test allows it."""

    def __init__(self):
        self.may_begin, self.may_return = asyncio.Event(), asyncio.Event()
        self.num_begun = 0

    async def __call__(self, call):
        await self.may_begin.wait()
        self.num_begun += 1
        try:
            return call()
        finally:
            await self.may_return.wait()

    def go(self):
        self.may_begin.set()
        self.may_return.set()


class Stepping:
    """A host with an open session, whose next step is being applied."""

    def __init__(self, *parts):
        self.world = HostWorld()
        self.host, self.hand = self.world.host, Hand()
        self.engine = self.world.open()
        self.next = Step(self.engine.opened.epoch, 1, list(parts) or [part_of(NewsRow(0, PROMPT), AdmitRow(0))])
        self.before = self.world.digest
        self.work = self.step(self.next)

    def step(self, step):
        return asyncio.ensure_future(self.host.step_aside(self.engine.nonce, step, b"1", self.hand))

    def close(self):
        return asyncio.ensure_future(self.host.close_aside(self.engine.nonce, self.hand))

    def open(self, **fields):
        request = OpenRequest("r", next(NONCES), **fields)
        return asyncio.ensure_future(self.host.open_in_slices(request, ignore_end))


def session_of(host):
    assert host._session is not None
    return host._session


async def turns(count=5):
    for _ in range(count):
        await asyncio.sleep(0)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_steps_on_a_thread_equal_those_on_the_loop(seed):
    asyncio.run(compare(Random(seed)))


async def compare(random):
    here, aside, offload = HostWorld(), HostWorld(), Executor("steps of a test")
    seen = [world.host.events.subscribe(None, lambda: None) for world in (here, aside)]
    engine, nonce = here.open(with_events=True), next(NONCES)
    aside.host.open(OpenRequest("r", nonce, with_events=True))
    live = set[int]()
    for seq in range(1, 30):
        step = Step(2, seq, [part_at_random(random, live)], executed_through=random.randint(max(0, seq - 3), seq - 1))
        step.executed_through = max(step.executed_through, here.host.replica.executed_through)
        answers: list[object] = []
        for apply in (
            lambda step=step: engine.host.step(engine.nonce, step, b"%d" % step.seq),
            lambda step=step: aside.host.step_aside(nonce, step, b"%d" % step.seq, offload),
        ):
            try:
                answer = apply()
                answers.append(await answer if asyncio.iscoroutine(answer) else answer)
            except KvplaneError as error:
                answers.append((type(error), str(error)))
        assert answers[0] == answers[1]
        assert here.digest == aside.digest
        if isinstance(answers[0], tuple):
            break
    assert [batch.events for batch in seen[0].take()] == [batch.events for batch in seen[1].take()]


def part_at_random(random, live):
    part = Part()
    for slot in range(4):
        if slot not in live:
            part.news.slot.append(slot)
            part.news.num_tokens.append(count := random.choice((20, 64, 130)))
            part.news.tokens.extend(random.choice((range(count), range(7, count + 7))))
            live.add(slot)
        elif random.random() < 0.2:
            part.facts.slot.append(slot)
            part.facts.end.append(random.choice((End.FREE, End.FREE, End.PREEMPTED)))
            if part.facts.end[-1] is End.FREE:
                live.discard(slot)
    rows = random.sample(sorted(live), random.randint(0, len(live)))
    part.run = Run([slot for slot in rows if slot not in part.news.slot])
    part.admit = Admit(sorted(live), on_refusal=OnRefusal.SKIP)
    if random.random() < 0.05:
        part.cache.evicted.append(random.choice((3, 4, 999)))
    return part


async def test_reads_wait_for_a_long_step_and_sync_calls_are_refused():
    one = Stepping()
    await turns()
    for act in (
        one.host.check_readable,
        lambda: one.host.check_unary(UnaryStep()),
        lambda: one.host.check_open(OpenRequest("r", 0)),
        lambda: one.host.open(OpenRequest("r", 0)),
        lambda: one.host.close(one.engine.nonce),
        lambda: one.engine.step(),
    ):
        with pytest.raises(Busy, match="long work"):
            act()
    reader = asyncio.ensure_future(one.host.idle())
    await turns()
    assert not reader.done()
    one.hand.may_begin.set()
    await turns()
    assert one.world.digest != one.before
    assert not reader.done(), "events and decisions are still to come"
    one.hand.go()
    await reader
    one.host.check_readable()
    assert (await one.work).seq == one.host.seq == len(one.host.decisions) - 1 == 1


async def test_a_cancelled_step_is_applied_and_its_answer_kept():
    one = Stepping()
    await turns()
    one.work.cancel()
    await turns()
    assert one.work.cancelled()
    one.host.lost(one.engine.nonce)  # as its stream does
    opened = one.open(epoch=one.engine.opened.epoch, life_nonce=one.engine.nonce)
    await turns()
    assert not opened.done()
    one.hand.go()
    assert (await opened).seq == 1
    nonce = session_of(one.host).nonce
    answer = await one.host.step_aside(nonce, one.next, b"1", one.hand)
    assert (answer.parts[0].admit_granted, one.hand.num_begun) == ([64], 1)
    with pytest.raises(SequenceError, match="other content"):
        await one.host.step_aside(nonce, one.next, b"2", one.hand)


async def test_a_refused_long_step_changes_nothing_and_the_session_continues():
    one = Stepping(Part(admit=Admit([7])))
    one.hand.go()
    with pytest.raises(InvalidArgument, match="slot 7 has no request"):
        await one.work
    assert one.world.digest == one.before
    assert one.host.state is ReplicaState.LIVE
    answer = await one.step(Step(one.engine.opened.epoch, 1, [part_of(NewsRow(0, PROMPT), AdmitRow(0))]))
    assert answer.parts[0].admit_granted == [64]


async def test_a_long_step_refused_as_busy_changes_nothing():
    async def busy(_):
        raise Busy("too many", remedy="later")

    world = HostWorld()
    engine = world.open()
    step = Step(engine.opened.epoch, 1, [Part()])
    with world.refuses(Busy):
        await world.host.step_aside(engine.nonce, step, b"", busy)
    engine.step()


async def test_a_session_does_not_lapse_while_its_step_is_applied():
    one = Stepping()
    await turns()
    one.world.pass_lease()
    assert one.host.state.value == "live"
    one.hand.go()
    await one.work
    one.world.pass_lease()
    assert one.host.lease_left_ns == 0


async def test_a_core_that_failed_in_a_long_step_refuses_every_call(monkeypatch, caplog):
    one = Stepping()

    def fail(_):
        raise ZeroDivisionError

    monkeypatch.setattr(one.host.replica, "apply_concurrently", fail)
    one.work.cancel()
    one.work = one.step(one.next)
    await turns()
    one.work.cancel()  # no caller is left to receive the error
    one.hand.go()
    with caplog.at_level(logging.ERROR), suppress(asyncio.CancelledError):
        await one.work
    await turns()
    assert "unhandled exception in long work on a replica" in caplog.text
    with pytest.raises(InternalError, match="an earlier step broke"):
        one.host.check_readable()


async def test_a_replica_is_removed_while_its_step_is_applied():
    one = Stepping()
    follower = one.host.events.subscribe(None, lambda: None)
    await turns()
    one.host.retire(NotFound("gone", remedy="x"))
    one.hand.go()
    await one.work
    assert [type(reason) for reason in one.engine.ended] == [NotFound]
    with pytest.raises(NotFound):
        one.host.check_readable()
    with pytest.raises(NotFound):
        follower.take(), follower.take()


class TestCloseDuringALongStep:
    async def test_a_close_on_a_thread_equals_one_on_the_loop(self):
        here, aside = HostWorld(), HostWorld()
        for world in (here, aside):
            engine = world.open()
            engine.step(part_of(NewsRow(0, PROMPT), NewsRow(1, PROMPT[::-1]), AdmitRow(0), AdmitRow(1)))
            engine.step(part_of(RunRow(0), FactRow(1, end=End.HELD)))
            if world is here:
                world.host.close(engine.nonce)
            else:
                await world.host.close_aside(engine.nonce, Executor("a close"))
        assert here.digest == aside.digest
        assert here.host.seq == aside.host.seq == 3

    async def test_an_opening_waits_for_a_long_step(self):
        one = Stepping()
        one.hand.go()
        await one.work
        one.hand = Hand()
        closing = one.close()
        await turns()
        opening, reader = one.open(), asyncio.ensure_future(one.host.idle())
        await turns()
        assert not opening.done()
        with pytest.raises(Busy):
            one.host.check_readable()
        one.hand.go()
        await closing
        await reader
        assert (await opening).epoch == one.engine.opened.epoch + 1
        assert one.host.state is ReplicaState.LIVE
        assert not one.host.replica.requests.slots()

    async def test_a_cancelled_close_finishes(self):
        one = Stepping()
        one.hand.go()
        await one.work
        one.hand = Hand()
        closing = one.close()
        await turns()
        closing.cancel()
        await turns()
        one.host.lost(one.engine.nonce)
        one.hand.go()
        await one.host.idle()
        assert one.host.state is ReplicaState.IDLE
        assert not one.host.replica.requests.slots()
        with pytest.raises(OtherWriter):
            one.host.heartbeat(one.engine.nonce)
        assert one.host.events.subscribe(None, lambda: None).take()[-1].withdrawn


async def test_events_stay_in_order_when_the_session_breaks_during_a_long_step():
    one = Stepping()
    follower = one.host.events.subscribe(None, lambda: None)
    await turns()
    one.work.cancel()
    await turns()
    one.host.lost(one.engine.nonce)
    one.hand.go()
    await one.open(epoch=one.engine.opened.epoch, life_nonce=one.engine.nonce)
    one.host.step(session_of(one.host).nonce, Step(one.engine.opened.epoch, 2, [Part()], executed_through=1), b"")
    batches = follower.take()
    assert [(batch.withdrawn, batch.restored, bool(batch.events)) for batch in batches] == [
        (True, False, False), (False, True, False), (False, False, True),
    ]  # fmt: skip
