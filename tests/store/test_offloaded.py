"""A blocking store whose calls hang: callers time out, and nothing queues after such a call."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvplane_service.runtime.executors import Executor
from kvplane_service.runtime.rota import Busy
from kvplane_service.store.errors import StoreDenied, StoreUnavailable
from kvplane_service.store.memory import MemoryStore
from kvplane_service.store.offloaded import Offloaded
from tests.store.contract import LOG, chunk

WAIT_S = 30


class HangingStore(MemoryStore):
    """Answers when the test permits."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.num_calls = 0

    def append(self, log, chunk, trim_below):
        self.num_calls += 1
        assert self.may_answer.wait(WAIT_S)
        return super().append(log, chunk, trim_below)

    def drop(self, log):
        assert self.may_answer.wait(WAIT_S)
        raise StoreDenied("not yours")


@pytest.fixture
def hanging():
    store = HangingStore()
    yield store
    store.may_answer.set()


def offloaded(make, timeout_s=0.5):
    return Offloaded(make, Executor("the store"), timeout_s)


async def until_answered(call):
    while True:
        try:
            return await call()
        except StoreUnavailable:
            await asyncio.sleep(0.01)


async def test_a_store_is_closed_once_its_thread_takes_the_call():
    """A service that drains while many calls wait for its store closes it still."""
    refusals, closed = [Busy("1025 calls run or wait for the store, the most allowed")] * 3, list[bool]()

    class Closing(MemoryStore):
        def close(self):
            closed.append(True)

    async def offload(call):
        if call.__name__ == "close" and refusals:
            raise refusals.pop()
        return call()

    store = Offloaded(Closing, offload)
    await store.open()
    await store.close()
    await store.close()
    assert closed == [True]
    assert not refusals


async def test_a_hanging_call_times_out_and_no_further_call_starts(hanging):
    store = offloaded(lambda: hanging)
    await store.open()
    hanging.may_answer.clear()
    with pytest.raises(StoreUnavailable, match=r"the call did not end within 0\.5 s"):
        await store.append(LOG, chunk(1), 0)
    for number in range(3000):  # more than an executor accepts
        with pytest.raises(StoreUnavailable, match="an earlier call has not ended"):
            await store.append(LOG, chunk(2 + number), 0)
    assert hanging.num_calls == 1
    hanging.may_answer.set()
    assert await until_answered(lambda: store.append(LOG, chunk(2), 0)) == 2, "the first one was carried out late"


async def test_a_call_that_the_executor_refuses_fails_as_unavailable(hanging):
    async def refuse(call):
        raise Busy("1025 calls run or wait for the store, the most allowed")

    with pytest.raises(StoreUnavailable, match="1025 calls run or wait for the store"):
        await Offloaded(lambda: hanging, refuse).open()


async def test_a_store_opened_after_the_timeout_is_open(hanging):
    made = []

    def make():
        made.append(hanging)
        assert hanging.may_answer.wait(WAIT_S)
        return hanging

    hanging.may_answer.clear()
    store = offloaded(make)
    with pytest.raises(StoreUnavailable):
        await store.open()
    hanging.may_answer.set()
    await until_answered(store.open)
    assert await store.append(LOG, chunk(1), 0) == 1
    assert len(made) == 1


async def test_a_late_failure_of_a_call_is_logged(hanging, caplog):
    store = offloaded(lambda: hanging)
    await store.open()
    hanging.may_answer.clear()
    with caplog.at_level("INFO"):
        with pytest.raises(StoreUnavailable):
            await store.drop(LOG)
        hanging.may_answer.set()
        assert await until_answered(lambda: store.append(LOG, chunk(1), 0)) == 1
    assert "a call of the store failed after its timeout: not yours" in caplog.text


async def test_cancelling_the_caller_cancels_a_call_that_has_not_started(hanging):
    store = offloaded(lambda: hanging, timeout_s=WAIT_S)
    await store.open()
    hanging.may_answer.clear()
    first, second = (asyncio.create_task(store.append(LOG, chunk(seq), 0)) for seq in (1, 2))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    hanging.may_answer.set()
    await first
    assert await store.append(LOG, chunk(3), 0) == 2
