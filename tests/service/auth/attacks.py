"""Attacks of clients on the ports of a service, over hand-made HTTP/2.

    python -m tests.service.auth.attacks KIND HOST:PORT SECONDS [TOKEN [MAX_MESSAGE_BYTES]]

runs one attack, and prints the number of bytes sent, of connections, and of the streams and connections that the
service ended. Every call has a wrong token, or TOKEN.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import random
import struct
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from grpc_health.v1 import health_pb2

from kvplane.base.session import OpenRequest
from kvplane.wire.stream import open_message
from tests.service import http2
from tests.service.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PING,
    RST_STREAM,
    SETTINGS,
    WINDOW_BYTES,
    WINDOW_UPDATE,
    frame,
)

LOOK_UP = "/kvplane.v1.Allocation/FindCacheHit"
WATCH = "/grpc.health.v1.Health/Watch"
SESSION = "/kvplane.v1.Allocation/Session"
LONG = 31 << 20
BOMB = http2.message(gzip.compress(bytes(LONG), 9), compressed=True)
PARTIAL_SESSIONS = 40
WRONG_TOKEN = "kvp_wrong"


@dataclass
class Tally:
    """What an attack has done so far."""

    token: str = WRONG_TOKEN
    part_bytes: int = LONG
    sent_bytes: int = 0
    connections: int = 0
    ended: Counter[str] = field(default_factory=Counter)


class Connection:
    """A connection that keeps HTTP/2's rules on flow control, so that the service has no reason to close it."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._token = {"authorization": f"Bearer {tally.token}"}
        self._window, self._windows = WINDOW_BYTES, Counter[int]()
        self._initial = WINDOW_BYTES
        self._next, self.open = 1, set[int]()
        self._changed = asyncio.Event()
        self.is_over = False

    async def connect(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._reader, self._writer = await asyncio.open_connection(host, int(port))
        self._tally.connections += 1
        self._write(http2.PREFACE + frame(SETTINGS, 0, 0))
        self._reading = asyncio.create_task(self._read())

    def call(self, path: str, *, finish: bool = True, **headers: str) -> int:
        """Begin a stream; without `finish` its headers are never complete."""
        stream, self._next = self._next, self._next + 2
        self._windows[stream] = self._initial
        self.open.add(stream)
        self._write(frame(HEADERS, END_HEADERS * finish, stream, http2.call_headers(path, **self._token, **headers)))
        return stream

    def dribble(self, stream: int) -> None:
        """Send another header of headers that are not complete."""
        self._write(frame(CONTINUATION, 0, stream, http2.literal(b"x", b"y" * 100)))

    async def send(self, stream: int, body: bytes, end: bool = True) -> None:
        """Send data, as far as the service lets it."""
        left = memoryview(body)
        while len(left) and not self.is_over and stream in self.open:
            count = min(self._window, self._windows[stream], 16_384, len(left))
            if count <= 0:
                self._changed.clear()
                await self._changed.wait()
                continue
            self._window -= count
            self._windows[stream] -= count
            is_last = end and count == len(left)
            self._write(frame(DATA, END_STREAM * is_last, stream, bytes(left[:count])))
            left = left[count:]
            await self._writer.drain()

    async def ended(self, stream: int) -> None:
        """Wait until the service has ended a stream."""
        while stream in self.open and not self.is_over:
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        self._reading.cancel()
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def _write(self, raw: bytes) -> None:
        self._tally.sent_bytes += len(raw)
        self._writer.write(raw)

    async def _read(self) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                header = await self._reader.readexactly(http2.HEADER_BYTES)
                body = await self._reader.readexactly(int.from_bytes(header[:3], "big"))
                self._take(header[3], header[4], int.from_bytes(header[5:], "big"), body)
                self._changed.set()
        self.is_over = True
        self._tally.ended["ended_connections"] += 1
        self._changed.set()

    def _take(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            for name, value in struct.iter_unpack(">HI", body):
                if name == INITIAL_WINDOW_SIZE:
                    for one in self.open:
                        self._windows[one] += value - self._initial
                    self._initial = value
            self._write(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self._write(frame(PING, ACK, 0, body))
        elif kind == WINDOW_UPDATE and stream:
            self._windows[stream] += int.from_bytes(body, "big")
        elif kind == WINDOW_UPDATE:
            self._window += int.from_bytes(body, "big")
        elif kind == GOAWAY:
            self.is_over = True
        elif (kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM)) and stream in self.open:
            self.open.remove(stream)
            self._tally.ended["ended_streams"] += 1


Attack = Callable[[str, Tally], Awaitable[None]]


async def _connected(address: str, tally: Tally, count: int) -> list[Connection]:
    connections = [Connection(tally) for _ in range(count)]
    for one in connections:
        with contextlib.suppress(OSError):
            await one.connect(address)
    return [one for one in connections if not one.is_over]


async def bombs(address: str, tally: Tally) -> None:
    """Compressed messages of 31 KB that are 31 MB, as many as the service takes."""

    async def throw(one: Connection) -> None:
        while not one.is_over:
            await one.send(one.call(LOOK_UP, grpc_encoding="gzip"), BOMB)
            await asyncio.sleep(0)

    await asyncio.gather(*map(throw, await _connected(address, tally, 100)))


async def held_messages(address: str, tally: Tally) -> None:
    """Messages of 31 MB that lack their last 64 bytes, two per connection; a new one for each that the service ends."""
    body = struct.pack(">BI", 0, LONG) + bytes(LONG - 64)

    async def hold(one: Connection) -> None:
        while not one.is_over:
            stream = one.call(LOOK_UP)
            await one.send(stream, body, end=False)
            await one.ended(stream)

    await asyncio.gather(*(hold(one) for one in await _connected(address, tally, 20) for _ in range(2)))


async def silent_streams(address: str, tally: Tally) -> None:
    """4,000 streams on which no message comes, on 4 connections; a new one for each that the service ends."""

    async def hold(one: Connection) -> None:
        while not one.is_over:
            for _ in range(1000 - len(one.open)):
                one.call(SESSION)
            await asyncio.sleep(0.05)

    await asyncio.gather(*map(hold, await _connected(address, tally, 4)))


async def watches(address: str, tally: Tally) -> None:
    """4,000 calls of Health.Watch of unknown names of 60 KB, on 4 connections."""
    request = http2.message(health_pb2.HealthCheckRequest(service="x" * 60_000).SerializeToString())

    async def watch(one: Connection) -> None:
        while not one.is_over:
            if len(one.open) < 1000:
                await one.send(one.call(WATCH), request)
            await asyncio.sleep(0 if len(one.open) < 1000 else 0.05)

    await asyncio.gather(*map(watch, await _connected(address, tally, 4)))


async def slow_headers(address: str, tally: Tally) -> None:
    """400 connections whose headers never end."""
    connections = await _connected(address, tally, 400)
    streams = [(one, one.call(LOOK_UP, finish=False)) for one in connections]
    while True:
        for one, stream in streams:
            if not one.is_over:
                one.dribble(stream)
        await asyncio.sleep(1)


async def reconnects(address: str, tally: Tally) -> None:
    """Connections that make one call each, 50 at a time."""

    async def storm() -> None:
        while True:
            one = Connection(tally)
            try:
                await one.connect(address)
                one.call(LOOK_UP)
                await one.ended(1)
                await one.close()
            except OSError:
                await asyncio.sleep(0.01)

    await asyncio.gather(*(storm() for _ in range(50)))


async def partial_sessions(address: str, tally: Tally) -> None:
    """Sessions of an owner, of the replicas acme/0 to acme/39, which send the longest message without its last 64
    bytes; another session for each that the service ends.
    """
    body = struct.pack(">BI", 0, tally.part_bytes) + bytes(tally.part_bytes - 64)

    async def hold(one: Connection, replica: str) -> None:
        while not one.is_over:
            stream = one.call(SESSION)
            opening = OpenRequest(replica, random.getrandbits(60))
            await one.send(stream, http2.message(open_message(opening).SerializeToString()), end=False)
            await one.send(stream, body, end=False)
            await one.ended(stream)

    connections = await _connected(address, tally, PARTIAL_SESSIONS)
    await asyncio.gather(*(hold(one, f"acme/{number}") for number, one in enumerate(connections)))


ATTACKS: dict[str, Attack] = {
    one.__name__: one for one in (bombs, held_messages, silent_streams, watches, slow_headers, reconnects)
}
OF_OWNERS: dict[str, Attack] = {partial_sessions.__name__: partial_sessions}


async def run(kind: str, address: str, seconds: float, tally: Tally) -> None:
    """Run an attack for this time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await {**ATTACKS, **OF_OWNERS}[kind](address, tally)
            await asyncio.sleep(seconds)  # every connection was closed


def main() -> None:
    """Run the attack of the command line."""
    kind, address, seconds, *more = sys.argv[1:]
    tally = Tally(more[0] if more else WRONG_TOKEN, int(more[1]) if len(more) > 1 else LONG)
    asyncio.run(run(kind, address, float(seconds), tally))
    sys.stdout.write(json.dumps({"sent": tally.sent_bytes, "connections": tally.connections, **tally.ended}) + "\n")


if __name__ == "__main__":
    main()
