"""What an engine, a network or another tenant could do to a router, and must not."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress

import msgspec
import pytest
import zmq.asyncio

from kvplane_fleet.decisions import Ask
from kvplane_fleet.faults import Fault, Faults
from kvplane_fleet.fleet import Fleet, Prompt, following
from kvplane_fleet.follow import zmq_source
from kvplane_fleet.follow.inbox import Inbox
from kvplane_fleet.follow.order import SourceOrder
from kvplane_fleet.follow.zmq_source import Timing, ZmqSource, resolved
from kvplane_fleet.settings import PlaceSettings
from kvplane_fleet.wire import msgpack
from kvplane_fleet.wire.msgpack import BatchDecoder
from tests.router.engine import EngineProcess, batches
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


SLOW_READER = """
import sys, time, zmq
from kvplane_fleet.follow.zmq_source import _prepare
reader = zmq.Context().socket(zmq.SUB)
_prepare(reader)
reader.subscribe(b"")
reader.connect(sys.argv[1])
taken, end_s = 0, time.monotonic() + 8
while time.monotonic() < end_s:
    if reader.poll(100):
        reader.recv_multipart()
        taken += 1
        if taken % 20 == 0:
            time.sleep(2.2)  # behind, for longer than a period of heartbeats
print(taken)
"""


def floods_and_closes(listener: socket.socket) -> None:
    """Act as a publisher of ZMTP that sends more than a reader takes, and resets the connection."""

    def frame(body: bytes, flags: int = 0) -> bytes:
        return bytes([flags, len(body)]) + body

    ready = frame(b"\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB", flags=4)
    message = frame(b"", 1) + frame(bytes(8), 1) + frame(bytes(200))
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection, suppress(OSError):
            connection.settimeout(0.3)
            connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
            connection.recv(64, socket.MSG_WAITALL)
            connection.sendall(ready)
            connection.recv(4096)
            with suppress(TimeoutError):
                while True:
                    connection.sendall(message * 100)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_an_engine_that_floods_and_resets_its_connection_ends_no_router():
    """With ZeroMQ's heartbeats libzmq aborts: the connection is lost while its messages wait."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=floods_and_closes, args=(listener,), daemon=True).start()
        command = [sys.executable, "-c", SLOW_READER, f"tcp://127.0.0.1:{listener.getsockname()[1]}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) >= 40


async def test_an_engine_that_hangs_is_not_connected_until_it_answers_again(monkeypatch):
    monkeypatch.setattr(zmq_source, "Timing", lambda: Timing(replay_s=0.5, check_s=0.2))
    fleet, events, replay = Fleet(), f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"
    process = EngineProcess(events, replay, 0)
    place = PlaceSettings("a", events=events, replay=replay)
    try:
        await asyncio.to_thread(process.publish, 5)
        async with following(fleet, [place]):
            source = fleet.followed["a"].source
            assert isinstance(source, ZmqSource)

            async def until(is_connected: bool) -> None:
                async with asyncio.timeout(WITHIN_S):
                    while source.is_connected is not is_connected:  # noqa: ASYNC110
                        await asyncio.sleep(0.02)

            await asyncio.wait_for(fleet.wait_until_current(), WITHIN_S)
            for _ in range(2):
                await until(True)
                os.kill(process._process.pid, signal.SIGSTOP)
                await until(False)
                os.kill(process._process.pid, signal.SIGCONT)
            await until(True)
    finally:
        process.kill()
