"""A long unary call whose caller stops waiting is applied once: by a deadline, and by cancellation."""

from __future__ import annotations

import asyncio
from contextlib import closing

import pytest

import kvplane
from kvplane import Allocate, At, Content, aio
from kvplane.base.errors import DeadlineExceeded
from kvplane.sansio.retry import RetryPolicy
from kvplane_service.replicas import applying
from tests.service.rig import held_thread

REQUEST, AT = Allocate("a", Content(token_ids=range(40))), At(op_id="op")


@pytest.fixture(autouse=True)
def every_call_is_long(monkeypatch):
    monkeypatch.setattr(applying, "MOST_INLINE_NS", -1)


def granted(answer) -> tuple[int, int]:
    """Granted tokens, and the number of the step."""
    return answer.granted_tokens, answer.result.seq


def test_a_repeat_after_the_deadline_gets_the_answer(world, name):
    once = RetryPolicy(attempts=1)
    with closing(kvplane.connect(world.service.address, timeout_s=0.2, retry=once)) as impatient, held_thread() as held:
        with pytest.raises(DeadlineExceeded):
            impatient.allocate_slots(name, REQUEST, AT)
        assert held.began.is_set()
        held.go_on.set()
        assert granted(world.client.allocate_slots(name, REQUEST, AT)) == (40, 1)
    assert world.client.describe_replica(name).seq == 1


def test_a_repeat_after_a_cancelled_call_gets_the_answer(world, name):
    async def cancel_and_repeat(held) -> tuple[int, int]:
        async with aio.connect(world.service.address) as client:
            first = asyncio.ensure_future(client.allocate_slots(name, REQUEST, AT))
            await asyncio.to_thread(held.began.wait)
            first.cancel()
            await asyncio.wait([first])
            assert first.cancelled()
            held.go_on.set()
            return granted(await client.allocate_slots(name, REQUEST, AT))

    with held_thread() as held:
        assert asyncio.run(cancel_and_repeat(held)) == (40, 1)
    assert world.client.describe_replica(name).seq == 1
