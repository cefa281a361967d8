"""The parts of the simulation: virtual time, processes, network, store."""

from __future__ import annotations

import asyncio
from functools import partial
from random import Random

import pytest

from kvplane.base.errors import Unavailable
from kvplane.v1 import allocation_pb2 as pb
from kvplane.v1.step_pb2 import StepResult
from kvplane_service.store.errors import StoreUnavailable
from kvplane_service.store.interface import LogName, StoredChunk
from tests.sim.loop import Killed, Process, VirtualLoop
from tests.sim.network import Context, Ended, Network, Pipe, Server, Stream
from tests.sim.store import WildStore

LOG = LogName("a", b"n" * 16, 7)


def run(work, seed=1):
    """Result of a coroutine on a virtual loop, and its virtual duration."""
    loop = VirtualLoop(Random(seed))
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(work(loop)), loop.time()
    finally:
        asyncio.set_event_loop(None)


def test_virtual_time_passes_without_waiting_and_in_order():
    async def wait(loop):
        said = list[str]()
        loop.call_later(3600, said.append, "late")
        loop.call_later(10, said.append, "early")
        await asyncio.sleep(3601)
        return said, await asyncio.to_thread(lambda: "threaded")

    (said, threaded), took_s = run(wait)
    assert (said, threaded) == (["early", "late"], "threaded")
    assert 3601 <= took_s < 3602


async def _work(said):
    try:
        for number in range(10):
            said.append(number)
            await asyncio.sleep(1)
    finally:
        said.append("last word")


@pytest.mark.parametrize("how", ["kill", "crash", "stop"])
def test_killed_process_runs_no_finally(how):
    async def live(_):
        said, process = list[object](), Process("p", 1)
        process.spawn(_work(said))
        await asyncio.sleep(2.5)
        if how == "kill":
            process.kill()
        elif how == "crash":
            process.crash_in = 0
        else:
            process.pause()
        await asyncio.sleep(5)
        return list(said), process.has_exited()

    (said, exited), _ = run(live)
    assert said == [0, 1, 2]
    assert exited == (how != "stop")


def test_paused_process_continues():
    async def live(_):
        said, process = list[object](), Process("p", 1)
        process.spawn(_work(said))
        await asyncio.sleep(2.5)
        process.pause()
        await asyncio.sleep(100)
        process.resume()
        await asyncio.sleep(1.5)
        return list(said)

    assert run(live)[0] == [0, 1, 2, 3, 4]


def test_process_dies_inside_a_function():
    async def live(_):
        said, process = list[object](), Process("p", 1)

        async def crash():
            said.append("before")
            with pytest.raises(Killed):
                process.die_here()
            await asyncio.sleep(1)
            said.append("after")

        process.spawn(crash())
        await asyncio.sleep(5)
        return said, process.bugs

    assert run(live)[0] == (["before"], [])


def test_unexpected_exception_of_a_process_is_recorded():
    async def live(_):
        process = Process("p", 1)

        async def fail():
            raise ValueError("a bug")

        process.spawn(fail())
        await asyncio.sleep(1)
        return process.bugs

    assert [str(bug) for bug in run(live)[0]] == ["a bug"]


def test_messages_held_by_a_partition_arrive_in_order():
    async def send(loop):
        network = Network(loop, Random(3))
        ends = frozenset(("here", "there"))
        pipe = Pipe(network, ends)
        pipe.send(0)
        await asyncio.sleep(1)
        network.weather.cut_off.add(ends)
        for number in range(1, 9):
            pipe.send(number)
            await asyncio.sleep(0.1)
        network.weather.cut_off.discard(ends)
        pipe.send(9)
        arrived = [await pipe.receive() for _ in range(10)]
        pipe.break_off()
        with pytest.raises(Ended):
            await pipe.receive()
        return arrived

    assert run(send)[0] == list(range(10))


def test_mailbox_loses_repeats_and_reorders_messages():
    async def send(loop):
        network, arrived = Network(loop, Random(3)), list[int]()
        network.weather.lose, network.weather.repeat, network.weather.jitter_s = 0.2, 0.3, 1.0
        for number in range(50):
            network.post(partial(arrived.append, number))
        await asyncio.sleep(5)
        return arrived

    arrived = run(send)[0]
    assert len(set(arrived)) < 50
    assert len(arrived) > len(set(arrived))
    assert arrived != sorted(arrived)


def test_call_to_an_address_without_a_server_is_unavailable():
    async def call(loop):
        with pytest.raises(Unavailable):
            await Network(loop, Random(1)).call("nowhere", "here", "/kvplane.v1.Allocation/Session", None)

    run(call)


@pytest.mark.parametrize("works_s", [0.0, 0.25])
def test_answer_that_follows_a_stuck_write_counts_with_the_work_on_it(works_s):
    """A client that reads nothing delays the answers of its own stream only."""

    async def answer(loop):
        network = Network(loop, Random(1))
        service, client = Process("service", 1), Process("client", 2)
        stream = Stream(network, client, "here", Server(network, "there", service))
        context = Context(stream, None)
        stream.outward.send(b"step")
        await context.read()
        await asyncio.sleep(works_s)
        stream.held.add("writes")
        notice = asyncio.create_task(context.write(pb.SessionResponse(draining=pb.Draining()).SerializeToString()))
        await asyncio.sleep(1.0)
        stream.held.clear()
        await notice
        await context.write(pb.SessionResponse(result=StepResult()).SerializeToString())
        return network.longest_answer_s

    assert run(answer)[0] == pytest.approx(works_s)


def filled() -> WildStore:
    store = WildStore(Random(5), lambda: 0)
    for seq in range(1, 9):
        store.append(LOG, StoredChunk(seq, bytes([seq]) * 20), 0)
    store.put_record("a", b"record")
    return store


def test_store_loses_its_tail_flips_bits_and_restores_a_backup():
    store = filled()
    store.back_up()
    before = dict(store.logs[LOG])
    store.lose_tail()
    assert list(store.logs[LOG]) == list(before)[: len(store.logs[LOG])]
    assert len(store.logs[LOG]) < 8
    store.restore()
    assert store.logs[LOG] == before
    store.flip_bits()
    assert sum(store.logs[LOG][seq] != raw for seq, raw in before.items()) == 2
    assert store.records_by_name["a"] != b"record"
    store.restore()
    store.reorder()
    assert store.logs[LOG] != before
    assert sorted(store.logs[LOG].values()) == sorted(before.values())


def test_unavailable_store_fails_and_torn_write_keeps_a_part():
    store = filled()
    store.tears = 1.0
    store.append(LOG, StoredChunk(9, b"x" * 20), 0)
    assert len(store.logs[LOG][9]) < 20
    store.tears, store.loses_answers = 0.0, 1.0
    with pytest.raises(StoreUnavailable):
        store.append(LOG, StoredChunk(10, b"x"), 0)
    assert 10 in store.logs[LOG], "the write was done, and only its answer was lost"
    store.away = True
    with pytest.raises(StoreUnavailable):
        list(store.records())
