"""Long unary calls run on a thread: the result is the same, each call is applied once, in order."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplane.base.errors import InternalError, InvalidArgument, KvplaneError, NotFound, OtherWriter, StaleEpoch
from kvplane.base.requests import Ending
from kvplane.session.rows import AdmitRow, NewsRow, part_of
from kvplane_service.config import Config
from kvplane_service.decisions.log import Decision
from kvplane_service.replicas import applying
from kvplane_service.replicas.host import ReplicaState
from kvplane_service.replicas.step_order import UnaryStep
from kvplane_service.runtime.rota import Busy
from kvplane_service.unary.calls import (
    AllocateCall,
    Appended,
    CommitCall,
    Content,
    EvictCall,
    FreeCall,
    ResetCall,
)
from tests.service.long_work import PROMPT, World, full, slowly
from tests.service.test_applying import Hand, turns


@pytest.fixture(autouse=True)
def every_call_is_long(monkeypatch):
    monkeypatch.setattr(applying, "MOST_INLINE_NS", -1)


def in_turn(*offloads):
    """An offload for each call, in this order."""
    left = list(offloads)

    async def offload(call):
        return await left.pop(0)(call)

    return offload


async def forbidden(_):
    raise AssertionError("a short call took a thread")


def allocation(name="a", tokens=PROMPT, **fields):
    return AllocateCall(name, Content(len(tokens), b"", 0, token_ids=tokens), **fields)


# ---- the same as on the event loop


@given(seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_long_calls_have_the_same_results_as_on_the_loop(seed):
    asyncio.run(compare(Random(seed)))


async def compare(random):
    here, aside = World(forbidden), World()
    seen = [world.host.events.subscribe(None, lambda: None) for world in (here, aside)]
    for _ in range(30):
        call, at = call_at_random(random), UnaryStep(more=random.random() < 0.2)
        answers = list[Any]()
        for world, most in ((here, 1 << 30), (aside, -1)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(applying, "MOST_INLINE_NS", most)
                try:
                    answers.append(await world.do(call, at=at))
                except KvplaneError as error:
                    answers.append((type(error), error.field, str(error)))
        assert answers[0] == answers[1]
        assert here.digest == aside.digest
    assert [batch.events for batch in seen[0].take()] == [batch.events for batch in seen[1].take()]


def call_at_random(random):
    name, tokens = random.choice("abc"), random.choice((PROMPT, PROMPT[:20], PROMPT[::-1] * 2))
    appended = Appended(3, token_ids=tokens[:3])
    return random.choice((
        allocation(name, tokens),
        allocation(name, tokens),
        AllocateCall(name, appended=appended, victims=tuple(random.sample("abc", 2))),
        AllocateCall(name),
        CommitCall(name, appended=appended),
        FreeCall(name, random.choice(list(Ending))),
        EvictCall((random.randrange(30),)),
        ResetCall(),
        CommitCall(),
    ))  # fmt: skip


# ---- short calls


async def test_a_short_call_never_suspends(monkeypatch):
    monkeypatch.setattr(applying, "MOST_INLINE_NS", 1 << 30)
    world = World(forbidden)
    for call in (allocation(), AllocateCall("a", appended=Appended(1, token_ids=[1])), CommitCall(), FreeCall("a")):
        work = world.do(call)
        with pytest.raises(StopIteration):  # it returns at once: no other task runs before its answer is kept
            work.send(None)


# ---- once


@pytest.mark.parametrize("hash_inline_tokens", [0, 100])  # 0: the repeats wait while they are hashed, too
async def test_a_repeat_during_a_long_call_gets_its_answer(hash_inline_tokens):
    world = World(hand := Hand(), Config(hash_inline_tokens=hash_inline_tokens))
    first, repeat = world.begin(allocation(), "op"), world.begin(allocation(), "op")
    await turns()
    hand.may_begin.set()  # applied, and not returned: its answer is not there yet
    late = world.begin(allocation(), "op")
    await turns()
    assert not (first.done())
    assert not (repeat.done())
    assert not (late.done())
    hand.go()
    assert await first == await repeat == await late
    assert (world.host.seq, hand.num_begun) == (1, 2)  # one step: applied, and encoded


async def test_a_repeat_while_the_answer_is_encoded_gets_it():
    world = World(in_turn(slowly, hand := Hand()))
    first = world.begin(allocation(), "op")
    while world.host.seq == 0:
        await turns(1)
    repeat = world.begin(allocation(), "op")
    await turns()
    assert not repeat.done()
    hand.go()
    assert await first == await repeat
    assert world.host.seq == 1


async def cancelled_after(world, call, count):
    """Begin a call, cancel it after some turns of the loop, and wait until nothing of it is left."""
    work = world.begin(call, "op")
    await turns(count)
    was_done = work.done()
    work.cancel()
    with suppress(asyncio.CancelledError):
        await work
    return was_done


@pytest.mark.parametrize("has_left", [False, True])
async def test_a_call_cancelled_at_any_await_is_applied_once(has_left):
    for count in range(60):
        world = World()
        if has_left:
            await world.visit()
        was_done = await cancelled_after(world, allocation(), count)
        answer = await world.do(allocation(), "op")
        assert answer == await world.do(allocation(), "op")
        assert (world.host.seq, world.host.replica.num_running) == (1, 1), count
        assert world.host.epoch == (3 if has_left else 1)
        assert world.host.state is ReplicaState.IDLE
        assert world.digest
        await world.do(FreeCall("a"))
        if was_done:
            return
    raise AssertionError("the call is never done")


@given(seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_random_calls_cancellations_and_sessions_leave_each_call_applied_at_most_once(seed):
    asyncio.run(disturbed(Random(seed)))


async def disturbed(random):
    world, works, created = World(), list[Any](), Counter[tuple[int, str]]()

    def note(decision):
        if isinstance(decision, Decision):
            created.update((decision.step.epoch, name) for part in decision.step.parts for name in part.news.request_id)

    world.host.decisions.follow(note)
    for number in range(30):
        act = random.random()
        if act < 0.6:
            op_id = f"op{random.randrange(number + 1)}"
            works.append(world.begin(allocation(op_id), op_id))
        elif act < 0.8 and works:
            random.choice(works).cancel()
        elif act < 0.9:
            with suppress(KvplaneError):
                await world.visit()
        await turns(random.randrange(8))
    for work in works:
        with suppress(asyncio.CancelledError, OtherWriter):
            await work
    await world.host.idle()
    assert world.digest
    assert max(created.values(), default=1) == 1


# ---- in order, with other writers of the replica


async def test_other_calls_are_applied_after_a_long_one_in_order():
    world = World(hand := Hand())
    works = [world.begin(call) for call in (allocation(), FreeCall("a"), allocation("b"), FreeCall("b"))]
    await turns()
    assert hand.num_begun == 0
    hand.go()
    answers = await asyncio.gather(*works)
    assert [b"seq=%d" % seq in answer for seq, answer in enumerate(answers, 1)] == [True] * 4
    assert (world.host.seq, world.host.replica.num_running) == (4, 0)


async def test_a_session_opens_after_a_long_call_and_later_calls_are_refused():
    world = World(hand := Hand())
    first = world.begin(allocation())
    await turns()
    opened = world.begin_session()
    await turns()
    assert not opened.done()
    hand.may_begin.set()
    await turns()
    hand.go()
    assert b"GRANTED" in await first
    assert (await opened).epoch == 2
    with pytest.raises(OtherWriter):
        await world.do(allocation("b"))
    assert not world.host.replica.requests.slots()


async def test_calls_of_one_request_that_are_prepared_together_are_checked_again():
    world = World(config=Config(hash_inline_tokens=0))  # every content is hashed on a thread
    await world.do(allocation())
    call = AllocateCall("a", appended=Appended(1, token_ids=[7]))
    results = await asyncio.gather(world.do(call), world.do(call), return_exceptions=True)
    (refused,) = (one for one in results if isinstance(one, KvplaneError))  # the one whose thread ended later
    assert "changed while its tokens were hashed" in str(refused)


async def test_a_replica_removed_during_a_long_call_answers_it_and_refuses_those_that_wait():
    world = World(hand := Hand())
    first, waiting = world.begin(allocation(), "op"), world.begin(allocation("b"))
    await turns()
    world.host.retire(NotFound("r was deregistered"))
    hand.go()
    assert b"GRANTED" in await first  # it was applied before the removal
    with pytest.raises(NotFound, match="deregistered"):
        await waiting


# ---- refusals and failures


async def test_a_refused_long_call_changes_nothing_and_names_its_field():
    world = World()
    with world.refuses(InvalidArgument, field="block_ids[1]"):
        await world.do(EvictCall((3, 99)), "op")
    assert world.host.seq == 0
    await world.do(EvictCall((3,)), "op")


async def test_a_long_call_refused_as_busy_changes_nothing_and_can_be_repeated():
    world = World(full)
    with world.refuses(Busy):
        await world.do(allocation(), "op")
    world.offload = slowly
    assert b"seq=1" in await world.do(allocation(), "op")


async def test_an_applied_call_keeps_its_answer_when_the_thread_has_no_room_to_encode_it():
    world = World(in_turn(slowly, full))
    first = world.begin(allocation(), "op")
    assert await first == await world.do(allocation(), "op")
    assert world.host.seq == 1


async def test_a_core_that_failed_in_a_long_call_refuses_every_call(monkeypatch, caplog):
    world = World(hand := Hand())

    def fail(_):
        raise ZeroDivisionError

    monkeypatch.setattr(world.host.replica, "apply_concurrently", fail)
    work = world.begin(allocation())
    await turns()
    work.cancel()  # no caller is left to receive the error
    with caplog.at_level(logging.ERROR):
        hand.go()
        with suppress(asyncio.CancelledError):
            await work
        await turns()
    assert "unhandled exception in long work" in caplog.text
    with pytest.raises(InternalError, match="an earlier step broke"):
        await world.do(CommitCall())


# ---- the beginning of an engine life


class Ticking(World):
    """Every look at the clock takes longer than a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.host._clock = self.host._lives._clock = self.tick

    def tick(self) -> int:
        self.now_ns += 10_000_000
        return self.now_ns


LEAVES_KEYS = part_of(NewsRow(0, PROMPT), AdmitRow(0))


async def test_calls_wait_while_an_engine_life_begins_in_slices():
    world = Ticking()
    await world.visit(LEAVES_KEYS)
    works = [world.begin(allocation(name)) for name in "ab"]
    await turns(1)
    assert world.host.state is ReplicaState.OPENING
    with pytest.raises(Busy):
        world.host.check_readable()
    answers = await asyncio.gather(*works)
    assert [b"seq=%d" % seq in answer for seq, answer in enumerate(answers, 1)] == [True] * 2
    assert (world.host.epoch, world.host.state) == (3, ReplicaState.IDLE)
    assert world.digest


async def test_a_session_opens_after_the_life_that_a_call_began():
    world = Ticking()
    await world.visit(LEAVES_KEYS)
    work = world.begin(allocation())
    await turns(1)
    opened = world.begin_session()
    with suppress(OtherWriter):  # the call, when the session comes first
        await work
    assert (await opened).epoch == 4
    assert world.host.state is ReplicaState.LIVE


async def test_a_replica_removed_while_an_engine_life_begins_refuses_the_call():
    world = Ticking()
    await world.visit(LEAVES_KEYS)
    work = world.begin(allocation())
    await turns(1)
    world.host.retire(NotFound("r was deregistered"))
    with pytest.raises(NotFound, match="deregistered"):
        await work


async def test_a_call_for_the_engine_life_that_ended_begins_none():
    world = World()
    await world.visit(LEAVES_KEYS)
    with world.refuses(StaleEpoch, "which has ended"):
        await world.do(allocation(), at=UnaryStep(epoch=world.host.epoch))
    assert world.host.has_left
