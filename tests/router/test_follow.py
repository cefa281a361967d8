"""A fleet that followed engines through losses, kills and cut networks equals one that follows them freshly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from itertools import count

import msgspec
import pytest
import zmq.asyncio

from kvplane_fleet import fleet as fleet_module
from kvplane_fleet.faults import Fault
from kvplane_fleet.fleet import Fleet, Prompt
from kvplane_fleet.follow.zmq_source import Timing, ZmqSource
from kvplane_fleet.settings import PlaceSettings
from tests.client.proxy import CuttingProxy
from tests.router.engine import DOMAIN, EngineProcess, batches
from tests.router.fleets import content as content_of
from tests.store.servers import free_port

WITHIN_S = 60


def address(port):
    return f"tcp://127.0.0.1:{port}"


class Engine:
    """An engine process at fixed addresses, over its lives."""

    def __init__(self):
        self.events, self.replay = free_port(), free_port()
        self.lives = 0
        self.start()

    def start(self):
        self.process = EngineProcess(address(self.events), address(self.replay), self.lives)
        self.lives += 1

    def restart(self):
        self.process.kill()
        self.start()

    async def publish(self, count):
        await asyncio.to_thread(self.process.publish, count)


@pytest.fixture
def engine():
    one = Engine()
    yield one
    one.process.kill()


@asynccontextmanager
async def following(*places: PlaceSettings) -> AsyncIterator[Fleet]:
    fleet = Fleet()
    async with fleet_module.following(fleet, places):
        for one in fleet.followed.values():
            assert isinstance(one.source, ZmqSource)
            one.source.timing = Timing(check_s=0.2)
        await asyncio.wait_for(fleet.wait_until_current(), WITHIN_S)
        yield fleet


def settings(engine, name="a", events=None, replay=None):
    return PlaceSettings(name, events=address(events or engine.events), replay=address(replay or engine.replay))


def order_of(fleet, name="a"):
    order = fleet.followed[name].order
    assert order is not None
    return order


def content(fleet, name="a"):
    return content_of(fleet.followed[name].place)


async def until(condition):
    async with asyncio.timeout(WITHIN_S):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.02)


async def equal_to_fresh(fleet, engine):
    """Wait until the fleet equals one that begins now."""
    async with asyncio.timeout(WITHIN_S):
        async with following(settings(engine)) as fresh:
            wanted = content(fresh)
            await until(lambda: content(fleet) == wanted and not order_of(fleet).partial)
    assert any(wanted.values())


async def test_a_fleet_learns_all_that_the_engine_has(engine):
    await engine.publish(150)
    async with following(settings(engine)) as fleet:
        place = fleet.followed["a"].place
        assert place.domain == DOMAIN
        assert place.batches == 150
        await engine.publish(150)
        await equal_to_fresh(fleet, engine)
        assert place.batches == 300
        assert not place.faults.counts
        last = next(reversed([one for _, one in zip(range(300), batches(0), strict=False)]))[0]
        await until(lambda: not order_of(fleet).replaying)  # it looks whether it lacks something from time to time
        (claim,) = fleet.claims("", Prompt([*last["token_ids"], 1]))
        assert claim.tokens == len(last["token_ids"])
        assert claim.inexact == ""
        assert fleet.claims("another model", Prompt([1])) == []


async def test_a_killed_engine_is_learned_again(engine):
    await engine.publish(100)
    async with following(settings(engine)) as fleet:
        engine.restart()
        await engine.publish(30)
        await equal_to_fresh(fleet, engine)
        assert order_of(fleet).lives == 2


async def test_a_killed_engine_without_further_events_is_forgotten(engine):
    await engine.publish(100)
    async with following(settings(engine)) as fleet:
        engine.restart()
        await until(lambda: not any(content(fleet).values()))


async def test_five_percent_of_lost_frames_change_nothing(engine, monkeypatch):
    async with following(settings(engine)) as fleet:
        order = order_of(fleet)
        live, number = order.live, 0

        def lossy(frame):
            nonlocal number
            number += 1
            if number % 20:
                live(frame)

        monkeypatch.setattr(order, "live", lossy)
        for _ in range(20):
            await engine.publish(50)
        await equal_to_fresh(fleet, engine)
        assert fleet.followed["a"].place.faults.counts[Fault.FRAMES_LOST] > 0
        assert order.lives == 1


async def test_a_cut_network_loses_nothing(engine):
    await engine.publish(50)
    proxies = [CuttingProxy(f"127.0.0.1:{port}") for port in (engine.events, engine.replay)]
    with closing(proxies[0]) as events, closing(proxies[1]) as replay:
        ports = [int(one.address.rpartition(":")[2]) for one in (events, replay)]
        async with following(settings(engine, events=ports[0], replay=ports[1])) as fleet:
            for _ in range(3):
                events.cut()
                replay.cut()
                await engine.publish(50)
            await equal_to_fresh(fleet, engine)
            assert order_of(fleet).lives == 1


async def test_a_source_that_is_cancelled_within_a_replay_ends():
    """The engine's replay has always another frame, so that most cancellations come together with one."""
    addresses = [address(free_port()) for _ in range(2)]
    place = PlaceSettings("a", events=addresses[0], replay=addresses[1])
    frame, engine = msgspec.msgpack.encode([0.0, [], 0]), zmq.asyncio.Context()
    with closing(engine.socket(zmq.PUB)) as publisher, closing(engine.socket(zmq.ROUTER)) as replays:
        for socket, at in zip((publisher, replays), addresses, strict=True):
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(at)

        async def answer_without_end():
            who, *_ = await replays.recv_multipart()
            for number in count():
                await replays.send_multipart([who, b"", b"", number.to_bytes(8, "big"), frame])
                if number % 100 == 0:
                    await asyncio.sleep(0)

        for _ in range(5):
            answering = asyncio.create_task(answer_without_end())
            async with asyncio.timeout(WITHIN_S):
                fleet = Fleet()
                async with fleet_module.following(fleet, [place]):
                    await until(lambda: fleet.followed["a"].place.batches > 100)  # noqa: B023 - within the loop
            answering.cancel()
    engine.destroy(linger=0)


async def test_an_engine_cannot_touch_the_entries_of_another(engine):
    other = Engine()
    try:
        await engine.publish(50)
        await other.publish(50)  # equal events: both engines are of the first seed
        async with following(settings(engine), settings(other, "b")) as fleet:
            assert content(fleet, "a") == content(fleet, "b")
            other.restart()
            await until(lambda: not any(content(fleet, "b").values()))
            await equal_to_fresh(fleet, engine)
    finally:
        other.process.kill()
