"""A resource that hangs delays a bounded number of its own callers and nothing else."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from functools import partial

import pytest

from kvplane_service.runtime import executors
from kvplane_service.runtime.executors import Busy, Executor
from tests.store.servers import wait_until


async def test_a_full_executor_is_busy_and_others_answer():
    end = threading.Event()
    hung, neighbour = Executor("the store", max_waiting=3), Executor("hashing")
    calls = [asyncio.create_task(hung(end.wait)) for _ in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(Busy, match="4 calls run or wait for the store"):
        await hung(int)
    assert await neighbour(lambda: 7) == 7
    end.set()
    assert await asyncio.gather(*calls) == [True] * 4
    assert await hung(int) == 0


async def test_calls_run_in_order_with_bounded_concurrency():
    one, order = Executor("one"), list[int]()
    await asyncio.gather(*(one(partial(order.append, at)) for at in range(100)))
    assert order == list(range(100))
    together = threading.Barrier(3)
    many = Executor("many", threads=3)
    await asyncio.gather(*(many(lambda: together.wait(20)) for _ in range(3)))


async def test_exceptions_are_raised_in_the_caller():
    one = Executor("one")
    with pytest.raises(ZeroDivisionError):
        await one(lambda: 1 // 0)
    assert await one(lambda: 1) == 1


async def test_cancelled_waiting_calls_do_not_run():
    begun, end, ran = threading.Event(), threading.Event(), list[int]()
    one = Executor("one")

    def hang() -> None:
        begun.set()
        end.wait()

    running = asyncio.create_task(one(hang))
    waiting = asyncio.create_task(one(lambda: ran.append(1)))
    await asyncio.to_thread(begun.wait)
    for task in (running, waiting):
        task.cancel()
    assert [type(error) for error in await asyncio.gather(running, waiting, return_exceptions=True)] == [
        asyncio.CancelledError
    ] * 2
    end.set()
    await one(int)
    assert ran == []


async def test_threads_end_when_there_is_nothing_to_do_and_begin_again(monkeypatch):
    monkeypatch.setattr(executors, "_IDLE_S", 0.01)
    one = Executor("a resource of this test")

    def threads() -> int:
        return sum("a resource of this test" in thread.name for thread in threading.enumerate())

    for _ in range(3):
        assert await one(lambda: 3) == 3
        await asyncio.to_thread(wait_until, lambda: threads() == 0, "the thread ended")
    assert all(not thread.name.startswith("kvplane a resource") or thread.daemon for thread in threading.enumerate())


async def test_results_are_not_kept_in_memory():
    class Large:
        pass

    one = Executor("one")
    seen = weakref.ref(await one(Large))
    deadline = time.monotonic() + 20
    while seen() is not None:
        assert time.monotonic() < deadline, "the thread keeps the outcome of its last call"
        await asyncio.sleep(0.01)
