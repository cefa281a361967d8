"""A network of streams and messages that delays, loses, repeats, reorders, and partitions.

    Server.streams   what a service answers, by method: the product's own handlers, bytes in and out
    Stream           one gRPC call: both directions keep their order, as TCP does, until the stream breaks
    Mailbox          messages between the processes of an engine: lost, repeated and reordered one by one

A broken stream loses the messages in transit. Each end notices independently; messages that had arrived are still read,
so a service may apply a step that its client has given up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc

from kvplane.base.errors import Unavailable
from kvplane.v1.allocation_pb2 import SessionResponse
from tests.sim.loop import Process, VirtualLoop, this_process

EOF = object()
_RETRANSMIT_S = 0.2
_LOOK_S = 0.05


@dataclass
class Weather:
    """Current properties of the network. Times in seconds, probabilities from 0 to 1.

    Attributes:
        cut_off: pairs of places between which nothing passes.
    """

    delay_s: float = 0.001
    jitter_s: float = 0.003
    lose: float = 0.0
    repeat: float = 0.0
    cut_off: set[frozenset[str]] = field(default_factory=set)


class Ended(Exception):
    """The stream has ended for this end: with the service's status, or without one."""

    def __init__(self, status: Any = None) -> None:
        super().__init__()
        self.status = status


class Aborted(Exception):
    """A handler has set its status."""


class Pipe:
    """One direction of a stream: items arrive in order, each a little later."""

    def __init__(self, network: Network, ends: frozenset[str]) -> None:
        self._network, self._ends = network, ends
        self._sent: deque[Any] = deque()
        self._on_the_way: deque[Any] = deque()
        self._arrived: deque[Any] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._last_s = 0.0
        self.broken = False

    def send(self, item: Any) -> None:
        loop = self._network.loop
        self._last_s = max(self._last_s, loop.time() + self._network.draw_delay())
        self._sent.append(item)
        loop.call_at(self._last_s, self._arrive)

    async def receive(self) -> Any:
        """The next item; raises Ended if the stream has ended."""
        while not self._arrived:
            if self.broken:
                raise Ended
            self._waiting = self._network.loop.create_future()
            await self._waiting
        return self._arrived.popleft()

    def break_off(self) -> None:
        """Drop all further items."""
        self.broken = True
        self._wake()

    def _arrive(self) -> None:
        self._on_the_way.append(self._sent.popleft())  # timers of one moment run in any order
        self._deliver()

    def _deliver(self) -> None:
        """Deliver in order; during a partition nothing, after it everything."""
        while self._on_the_way and not self.broken:
            if self._ends in self._network.weather.cut_off:
                self._network.loop.call_later(_RETRANSMIT_S, self._deliver)
                return
            self._arrived.append(self._on_the_way.popleft())
            self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class Stream:
    """One call of a method. `client` and `server` are the processes at its ends.

    Attributes:
        held: "reads": the handler gets no message; "writes": it can send none. The stream stays open.
    """

    def __init__(self, network: Network, client: Process, place: str, server: Server) -> None:
        ends = frozenset((place, server.address))
        self.network, self.client, self.server = network, client, server
        self.outward, self.inward = Pipe(network, ends), Pipe(network, ends)
        self.ends = ends
        self.handler: asyncio.Task[None] | None = None
        self.held = set[str]()

    async def may(self, what: str) -> None:
        """Wait until it is not held."""
        while what in self.held:  # noqa: ASYNC110 - all time is virtual
            await asyncio.sleep(_LOOK_S)

    @property
    def is_over(self) -> bool:
        return self.inward.broken and self.outward.broken

    def cut(self, *, client_s: float = 0.0, server_s: float = 0.0) -> None:
        """Break the stream; each end notices after its own delay."""
        loop = self.network.loop
        loop.call_later(client_s, self.inward.break_off)
        loop.call_later(server_s, self._cut_server)
        self.network.streams.pop(self, None)

    def _cut_server(self) -> None:
        self.outward.break_off()
        if self.handler is not None:
            self.handler.cancel()


class Context:
    """Replaces grpc.aio.ServicerContext for handlers."""

    def __init__(self, stream: Stream, request: bytes | None) -> None:
        self._stream, self._request = stream, request
        self._read_s = 0.0
        self._stuck_s = (0.0, 0.0)  # begin and end of the last write that was stuck

    async def read(self) -> Any:
        if self._request is not None:
            request, self._request = self._request, None
            return request
        try:
            item = await self._stream.outward.receive()
        except Ended:
            return EOF
        await self._stream.may("reads")
        self._read_s = self._stream.network.loop.time()
        return item

    async def write(self, raw: bytes) -> None:
        network = self._stream.network
        if SessionResponse.FromString(raw).WhichOneof("kind") in ("result", "error"):
            network.longest_answer_s = max(network.longest_answer_s, self._waited_s())
        began_s = network.loop.time()
        await self._stream.may("writes")
        if network.loop.time() > began_s:
            self._stuck_s = began_s, network.loop.time()
        self._stream.inward.send(raw)

    def _waited_s(self) -> float:
        """Time since the read, without that of an earlier write of the stream that was stuck: answers follow it."""
        stuck_s, free_s = self._stuck_s
        return max(0.0, stuck_s - self._read_s) + self._stream.network.loop.time() - max(free_s, self._read_s)

    async def abort_with_status(self, status: Any) -> None:
        self._stream.inward.send(Ended(status))
        raise Aborted


class Server:
    """A process that answers calls at an address; implements what service handlers are added to."""

    def __init__(self, network: Network, address: str, process: Process) -> None:
        self.network, self.address, self.process = network, address, process
        self._handlers: list[grpc.GenericRpcHandler] = []

    def add_generic_rpc_handlers(self, handlers: tuple[grpc.GenericRpcHandler, ...]) -> None:
        self._handlers.extend(handlers)

    def listen(self) -> None:
        """Answer calls at the address from now on, instead of the previous process."""
        self.network.servers[self.address] = self

    async def stop(self, grace_s: float) -> None:
        """Answer no further calls, and end those that take longer than this."""
        if self.network.servers.get(self.address) is self:
            del self.network.servers[self.address]
        await asyncio.sleep(grace_s)
        for stream in [one for one in self.network.streams if one.server is self]:
            stream.cut()
        await asyncio.sleep(0)

    def serve(self, stream: Stream, method: str, request: bytes | None) -> None:
        """Begin to answer a call."""
        stream.handler = self.process.spawn(self._answer(stream, method, request))

    async def _answer(self, stream: Stream, method: str, request: bytes | None) -> None:
        details: Any = _Call(method)
        handler: Any = next(filter(None, (one.service(details) for one in self._handlers)))
        context = Context(stream, request)
        try:
            if handler.stream_unary is None:
                await handler.stream_stream(EOF, context)
            else:
                stream.inward.send(await handler.stream_unary(EOF, context))
            stream.inward.send(Ended())
        except Aborted:
            return


@dataclass(frozen=True)
class _Call:
    """Details of a call, for generic handlers."""

    method: str
    invocation_metadata: tuple[tuple[str, str], ...] = ()


class Network:
    """Places, and the messages in transit between them."""

    def __init__(self, loop: VirtualLoop, rng: Random) -> None:
        self.loop, self.rng = loop, rng
        self.weather = Weather()
        self.servers: dict[str, Server] = {}
        self.streams: dict[Stream, None] = {}
        self.longest_answer_s = 0.0  # between a service's read and its answer

    def draw_delay(self) -> float:
        weather = self.weather
        return weather.delay_s + self.rng.random() ** 3 * weather.jitter_s

    async def probe(self, address: str, place: str) -> bool:
        """Whether no process listens there; a missing answer does not count."""
        await asyncio.sleep(self.draw_delay())
        server = self.servers.get(address)
        is_gone = server is None or not server.process.alive
        return is_gone and frozenset((place, address)) not in self.weather.cut_off

    async def call(self, address: str, place: str, method: str, request: bytes | None) -> Stream:
        """Start a call from a place; raises Unavailable if no process answers there."""
        await asyncio.sleep(self.draw_delay())
        server = self.servers.get(address)
        if server is None or not server.process.alive or frozenset((place, address)) in self.weather.cut_off:
            await asyncio.sleep(self.draw_delay())
            raise Unavailable(f"no process answers at {address}")
        stream = Stream(self, this_process(), place, server)
        self.streams[stream] = None
        server.serve(stream, method, request)
        return stream

    def note_death(self, process: Process) -> None:
        """Notify the other ends of the streams of a dead process, as its kernel does."""
        for stream in [one for one in self.streams if process in (one.client, one.server.process)]:
            stream.cut(client_s=self.draw_delay(), server_s=self.rng.choice([0.0, 0.002, 1.0]))

    def post(self, deliver: Callable[[], None]) -> None:
        """Send one message; it may get lost, arrive twice, or be overtaken."""
        weather, rng = self.weather, self.rng
        if rng.random() < weather.lose:
            return
        copies = 2 if rng.random() < weather.repeat else 1
        for _ in range(copies):
            self.loop.call_later(self.draw_delay(), deliver)
