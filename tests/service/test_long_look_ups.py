"""Long look-ups run on a thread of their own: the result is the same, and only their replica waits."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from kvplane.base.errors import KvplaneError, OtherWriter
from kvplane.base.step import Part, Step
from kvplane.session.rows import AdmitRow, NewsRow, part_of
from kvplane_service.replicas import applying
from kvplane_service.replicas.host import ReplicaState
from kvplane_service.rpc import lookups
from kvplane_service.runtime.rota import Busy
from kvplane_service.unary.calls import (
    Content,
)
from kvplane_service.unary.hashing import hash_tokens
from tests.service.long_work import PROMPT, World, full, slowly
from tests.service.rig import WAIT_S
from tests.service.test_applying import Hand, session_of, turns


@pytest.fixture(autouse=True)
def every_call_is_long(monkeypatch):
    monkeypatch.setattr(applying, "MOST_INLINE_NS", -1)


async def forbidden(_):
    raise AssertionError("a short call took a thread")


class LookingUp:
    """A session whose prompt a reader looks up, on a thread that waits for the test."""

    async def start(self):
        self.world, self.hand = World(), Hand()
        self.host = self.world.host
        self.opened = await self.world.begin_session()
        self.nonce = session_of(self.host).nonce
        await self.step(1, part_of(NewsRow(0, PROMPT, request_id="a"), AdmitRow(0)))
        await self.step(2, Part())
        self.lookups = lookups.LookUps()
        self.use(self.hand)
        return self

    def use(self, offload: Any) -> None:
        """Run later look-ups with this executor."""
        self.lookups._reads._offload = offload

    def step(self, seq, part, offload=slowly):
        step = Step(self.opened.epoch, seq, [part], executed_through=seq - 1)
        return self.host.step_aside(self.nonce, step, b"%d" % seq, offload)

    def find(self, name=""):
        hashed = hash_tokens(self.host.scheme, PROMPT, Content(0, b"", 0).extra_keys, None)
        content = Content(len(PROMPT), hashed.hashes, 4)

        def plan(replica):
            return lookups.of_request(name, True, replica) if name else lookups.of_content(content, True, replica)

        return asyncio.ensure_future(self.lookups.find(self.host, plan))


@pytest.mark.parametrize("name", ["", "a"])
async def test_a_long_look_up_has_the_same_result_as_on_the_loop(name, monkeypatch):
    one = await LookingUp().start()
    one.hand.go()
    aside = await one.find(name)
    monkeypatch.setattr(applying, "MOST_INLINE_NS", 1 << 30)
    one.use(forbidden)
    assert await one.find(name) == aside
    assert (aside.hit_tokens, aside.num_tokens, aside.num_hashes) == (48, 64, 4)
    assert len(aside.blocks[0].block_ids) == 3


@pytest.mark.parametrize("name", ["", "a"])
async def test_a_look_up_is_long_by_its_keys_and_by_the_blocks_of_its_answer(name):
    """Their conversion to a message takes longer than the look-up."""
    one = await LookingUp().start()
    content, replica = Content(len(PROMPT), b"", 4), one.host.replica
    plan = partial(lookups.of_request, name) if name else partial(lookups.of_content, content)
    without, with_blocks = (plan(answered, replica).effort_ns for answered in (False, True))
    assert without == replica.look_up_effort(len(PROMPT))
    assert with_blocks - without == 80 * 4 * len(replica.spec.groups)


async def test_steps_wait_for_a_long_look_up_and_heartbeats_do_not():
    one = await LookingUp().start()
    found = one.find()
    await turns()
    step = asyncio.ensure_future(one.step(3, Part()))
    await turns(20)
    assert not step.done()
    one.world.pass_lease()
    one.host.heartbeat(one.nonce)
    assert one.host.lease_left_ns
    with pytest.raises(OtherWriter):
        one.host.heartbeat(one.nonce + 1)
    one.hand.go()
    assert (await found).hit_tokens == 48
    assert (await step).seq == 3


async def test_an_engine_does_not_lapse_before_its_step_that_waits_for_a_long_look_up():
    one = await LookingUp().start()
    found = one.find()
    await turns()
    step = asyncio.ensure_future(one.step(3, Part()))
    await turns()
    one.world.pass_lease()
    one.hand.go()
    while not step.done():
        await turns(1)
        one.host.expire()  # also between the end of the look-up and the step
    assert one.host.events.num_withdrawals == 0
    await asyncio.gather(found, step)


async def test_a_close_waits_for_a_long_look_up():
    one = await LookingUp().start()
    found = one.find()
    await turns()
    closing = asyncio.ensure_future(one.host.close_aside(one.nonce, slowly))
    await turns()
    assert not closing.done()
    one.hand.go()
    assert (await found).hit_tokens == 48
    await closing
    assert one.host.state is ReplicaState.IDLE


async def test_a_look_up_that_waits_for_the_thread_does_not_take_the_replica():
    one, other = await LookingUp().start(), await LookingUp().start()
    other.lookups = one.lookups
    first = one.find()
    await turns()
    second = other.find()
    await turns()
    assert (await other.step(3, Part())).seq == 3  # it does not wait for the look-up on the first replica
    one.hand.go()
    assert (await first).hit_tokens == (await second).hit_tokens == 48


async def test_a_look_up_that_waits_for_its_replica_leaves_the_thread_to_others():
    one, other, third = [await LookingUp().start() for _ in range(3)]
    other.lookups = third.lookups = one.lookups
    first = third.find()
    await turns()
    second = one.find()  # waits for the thread
    await turns()
    step_hand = Hand()
    step = asyncio.ensure_future(one.step(3, Part(), step_hand))
    await turns()
    one.hand.go()
    assert (await first).hit_tokens == 48
    assert (await asyncio.wait_for(other.find(), WAIT_S)).hit_tokens == 48
    assert not step.done()
    assert not second.done()
    step_hand.go()
    assert (await step).seq == 3
    assert (await second).hit_tokens == 48


async def test_a_cancelled_look_up_keeps_the_thread_until_it_ends():
    one, other = await LookingUp().start(), await LookingUp().start()
    other.lookups = one.lookups
    first = one.find()
    await turns()
    first.cancel()
    await asyncio.wait([first])
    second = other.find()
    await turns()
    step = await asyncio.wait_for(other.step(3, Part()), WAIT_S)  # the look-up waits for the thread without its replica
    assert step.seq == 3
    assert not second.done()
    one.hand.go()
    assert (await second).hit_tokens == 48


async def test_a_look_up_cancelled_before_it_begins_does_not_run():
    one, other = await LookingUp().start(), await LookingUp().start()
    other.lookups = one.lookups
    first = one.find()
    await turns()
    waiting = [other.find() for _ in range(3)]
    await turns()
    for find in waiting[:2]:
        find.cancel()
    one.hand.go()
    await first
    assert (await waiting[2]).hit_tokens == 48
    assert all(find.cancelled() for find in waiting[:2])
    assert one.hand.num_begun == 2


async def test_a_look_up_that_the_thread_refuses_gives_back_the_turn():
    one = await LookingUp().start()
    one.use(full)
    with pytest.raises(Busy):
        await one.find()
    one.use(slowly)
    assert (await asyncio.wait_for(one.find(), WAIT_S)).hit_tokens == 48


async def test_a_cancelled_look_up_leaves_the_replica_and_the_thread_usable():
    one = await LookingUp().start()
    for count in range(12):
        found = one.find()
        await turns(count)
        found.cancel()
        with suppress(asyncio.CancelledError):
            await found
        one.hand.go()
        assert (await one.find()).hit_tokens == 48
        one.hand = Hand()
        one.use(one.hand)
    assert (await one.step(3, Part())).seq == 3


async def test_a_request_that_ends_before_its_look_up_begins_is_not_found():
    one, other = await LookingUp().start(), await LookingUp().start()
    other.lookups = one.lookups
    first = one.find()
    await turns()
    second = other.find("a")
    await turns()
    await other.host.close_aside(other.nonce, slowly)
    one.hand.go()
    await first
    with pytest.raises(KvplaneError, match="is gone"):
        await second
    assert (await asyncio.wait_for(one.find(), WAIT_S)).hit_tokens == 48, "it gave back the turn"
