"""A resource that hangs delays a bounded number of its own callers and nothing else."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from functools import partial

import pytest

from kvplane_service.runtime import executors
from kvplane_service.runtime.executors import Executor, InOrder
from kvplane_service.runtime.rota import OWNER, Busy
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


def hold(begun, end):
    begun.set()
    end.wait()


async def as_owner(name, work):
    OWNER.set(name)
    return await work


async def test_owners_are_served_in_turn_however_many_calls_one_has():
    begun, end, order = threading.Event(), threading.Event(), list[str]()
    one = Executor("one")
    running = asyncio.create_task(one(lambda: hold(begun, end)))
    await asyncio.to_thread(begun.wait)
    calls = [
        (owner, f"{owner}{at}") for owner in ("bob", "alice", "carol") for at in range(40 if owner == "bob" else 2)
    ]
    tasks = [asyncio.create_task(as_owner(owner, one(partial(order.append, name)))) for owner, name in calls]
    await asyncio.sleep(0)
    end.set()
    await asyncio.gather(running, *tasks)
    assert order[:6] == ["bob0", "alice0", "carol0", "bob1", "alice1", "carol1"]
    assert order[6:] == [f"bob{at}" for at in range(2, 40)]


async def test_the_calls_of_one_owner_leave_places_to_others():
    end, one = threading.Event(), Executor("one", max_waiting=3)
    calls = [asyncio.create_task(as_owner("bob", one(end.wait))) for _ in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(Busy):
        await asyncio.create_task(as_owner("bob", one(int)))
    other = asyncio.create_task(as_owner("alice", one(lambda: 7)))
    await asyncio.sleep(0)
    end.set()
    assert await other == 7
    await asyncio.gather(*calls)


async def test_a_cancelled_call_keeps_its_place_until_it_is_taken_from_the_queue():
    end, one = threading.Event(), Executor("one", max_waiting=1)
    running = asyncio.create_task(one(end.wait))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(one(int))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0)
    with pytest.raises(Busy):  # what it holds is still in memory
        await one(int)
    end.set()
    await running
    assert await one(int) == 0


async def test_calls_of_a_resource_of_the_service_run_in_their_order():
    begun, end, order = threading.Event(), threading.Event(), list[str]()
    one = InOrder("the store")
    running = asyncio.create_task(one(lambda: hold(begun, end)))
    await asyncio.to_thread(begun.wait)
    names = ["bob"] * 3 + ["alice", "bob"]
    tasks = [asyncio.create_task(as_owner(name, one(partial(order.append, name)))) for name in names]
    await asyncio.sleep(0)
    end.set()
    await asyncio.gather(running, *tasks)
    assert order == names
