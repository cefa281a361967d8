"""What an engine, a network or another tenant could do to a router, and must not."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import zmq.asyncio

from kvplane_fleet.decisions import Ask
from kvplane_fleet.faults import Fault, Faults
from kvplane_fleet.fleet import Fleet, Prompt
from kvplane_fleet.follow import zmq_source
from kvplane_fleet.follow.inbox import Inbox
from kvplane_fleet.follow.order import SourceOrder
from kvplane_fleet.follow.zmq_source import ZmqSource, resolved
from kvplane_fleet.settings import PlaceSettings
from kvplane_fleet.wire import msgpack
from kvplane_fleet.wire.msgpack import BatchDecoder
from tests.router.engine import batches
from tests.router.fleets import DOMAIN, Scene, finished, tokens
from tests.router.publisher import Publisher
from tests.store.servers import free_port

WITHIN_S = 30
PROMPT = tokens(1, 8)


def test_costs_depend_on_no_place_that_the_caller_may_not_know_of():
    """Otherwise a tenant could ask whether another one has a prompt cached, or how busy it is."""

    def asked(others_have_it, visible=frozenset("a")):
        scene = Scene("a", "b")
        scene.stores("a", PROMPT[: len(PROMPT) // 2])
        scene.book(PROMPT, candidates=frozenset("a"))
        if others_have_it:
            scene.stores("b", PROMPT)
            for seed in range(20, 30):
                scene.book(tokens(seed, 4), candidates=frozenset("b"))
        ask = Ask("m", Prompt([*PROMPT, 1]), visible=visible)
        return scene.decisions.score(ask, {DOMAIN: ask.prompt.keys_of(DOMAIN)})

    assert asked(True).places == asked(False).places
    assert [one.claim.place for one in asked(True).places] == ["a"]
    assert asked(True, None).places[-1] != asked(False, None).places[-1]


def source(address="tcp://127.0.0.1:1", replay=None):
    class Sink:
        def __init__(self):
            self.payloads = list[bytes]()

        def applying(self, payload):
            self.payloads.append(payload)
            yield from ()

        def clear(self, life_ended):
            del life_ended
            self.payloads.clear()

    faults, sink = Faults(), Sink()
    inbox = Inbox(sink)
    order = SourceOrder(inbox, faults, can_replay=replay is not None)
    return ZmqSource((address, replay), "", order, inbox), sink


async def test_an_engine_that_publishes_without_end_leaves_half_of_the_loop(monkeypatch):
    one, slept = source()[0], list[float]()

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    for spent_s, taken in ((0.5, 1), (0.001, 1), (0.001, 64), (0.0045, 64)):
        one._spent_s += spent_s
        await one._pause(taken)
    assert slept == [1.0, 0, pytest.approx(0.0065)]
    with one._measured(one._live):
        pass
    assert 0 < one._spent_s < WITHIN_S


def test_a_batch_of_too_many_hashes_is_not_read(monkeypatch):
    monkeypatch.setattr(msgpack, "MAX_HASHES_OF_BATCH", 5)
    faults = Faults()
    removed = {"type": "BlockRemoved", "block_hashes": [1, 2, 3], "medium": "GPU", "group_idx": 0}
    events = [removed, {"type": "AllBlocksCleared"}, removed]
    assert finished(BatchDecoder(faults).decoding(msgspec.msgpack.encode([1.0, events, 0]))) is None
    assert faults.counts == {Fault.TOO_MANY_HASHES: 1}
    assert finished(BatchDecoder(faults).decoding(msgspec.msgpack.encode([1.0, events[:2], 0]))) is not None


async def test_a_name_that_is_not_answered_delays_no_other_engine(monkeypatch):
    events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    never = asyncio.Event()

    async def resolve(address):
        if "nowhere" in address:
            await never.wait()
        return address

    fleet, context = Fleet(), zmq.asyncio.Context()
    with Publisher(context, events, replay) as publisher:
        serving = asyncio.create_task(publisher.serve_replays())
        for name, address in (("slow", "tcp://nowhere.example:5557"), ("good", events)):
            followed = fleet.add(PlaceSettings(name, events=address, replay=replay, model="m")).source
            assert isinstance(followed, ZmqSource)
            followed.resolve = resolve
        tasks = [asyncio.create_task(fleet.follow(name, context)) for name in ("slow", "good")]
        for _, batch in zip(range(5), batches(1), strict=False):
            await publisher.publish(1.0, batch)
        await asyncio.wait_for(fleet.followed["good"].wait_until_current(), WITHIN_S)
        assert fleet.followed["good"].place.entries
        assert fleet.followed["slow"].state == "not connected"
        for task in (*tasks, serving):
            task.cancel()
        await asyncio.gather(*tasks, serving, return_exceptions=True)
    context.destroy(linger=0)


async def test_an_engine_that_moves_to_another_address_is_found_by_its_name():
    ports, context = [free_port() for _ in range(2)], zmq.asyncio.Context()
    one, sink = source("tcp://engine.example:1")
    one.timing = zmq_source.Timing(check_s=0.05)
    answers = iter([OSError(), f"tcp://127.0.0.1:{ports[0]}"])

    async def resolve(_):
        answer = next(answers, f"tcp://127.0.0.1:{ports[1]}")
        if isinstance(answer, OSError):
            raise answer
        return answer

    one.resolve = resolve
    following = asyncio.create_task(one.run(context))
    publisher = context.socket(zmq.PUB)
    publisher.bind(f"tcp://127.0.0.1:{ports[1]}")
    async with asyncio.timeout(WITHIN_S):
        await one.wait_until_current()
        while not sink.payloads:
            await publisher.send_multipart([b"", (7).to_bytes(8, "big"), b"x"])
            await asyncio.sleep(0.02)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    publisher.close(linger=0)
    context.destroy(linger=0)


async def test_addresses_without_a_name_are_taken_as_they_are():
    for address in ("tcp://127.0.0.1:5", "tcp://[::1]:5", "ipc://folder/x", "inproc://x"):
        assert await resolved(address) == address
    assert await resolved("tcp://localhost:5") in ("tcp://127.0.0.1:5", "tcp://[::1]:5")
    with pytest.raises((OSError, TimeoutError)):
        await resolved("tcp://no-such-host.invalid:5")
