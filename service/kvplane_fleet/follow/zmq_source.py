"""The sockets of one source: a subscriber to its publisher, and a dealer to its replay socket.

Everything runs on one event loop. Names are resolved here and not by ZeroMQ, whose thread would stand still for all
sockets while one name is not answered; a name of an engine that is not connected is asked for again. A lost connection
is found by TCP's keepalive, a lost last frame, an engine that was restarted behind a proxy, and one that hangs by a
check after a silence. ZeroMQ's heartbeats are off: with them libzmq 4.3.5 ends the process if a connection is lost
while its messages wait for a slow reader (libzmq issues 3937, 4767, 4841).

An engine may be hostile, and all share one process. What waits of its messages is bounded, it gets half of the event
loop at most, and one that costs more than CPU_SHARE of a core for long is given up by name: disconnected, its entries
forgotten, and connected again after GIVEN_UP_S.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket as socket_module
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from kvplane_fleet.faults import Fault
from kvplane_fleet.follow.inbox import Inbox
from kvplane_fleet.follow.order import SourceOrder
from kvplane_fleet.wire.frames import is_replay_end, parse_live, parse_replay, replay_request
from kvplane_fleet.wire.msgpack import MAX_PAYLOAD_BYTES

RECEIVE_QUEUE = 8  # messages that wait, of MAX_MESSAGE_BYTES each: more wait at the engine, or are lost and replayed
MAX_MESSAGE_BYTES = MAX_PAYLOAD_BYTES
CPU_SHARE = 0.25  # of a core that a place may cost
CPU_BURST_S, REPLAY_BURST_S = 5.0, 20.0  # that it may cost at once, by live messages and by a long replay
BYTE_S = 1e-9  # of ZeroMQ's thread, for each byte
GIVEN_UP_S = 60.0
KEEPALIVE_S, DEAD_AFTER_S = 1, 5
RECONNECT_MS, MAX_RECONNECT_MS = 50, 1000
FRAMES_PER_TURN = 64
TURN_S, LONG_S = 0.005, 0.02  # after which others have their turn; which only payloads of megabytes cost
RESOLVE_S, ASK_AGAIN_S = 5.0, 1.0


_log = logging.getLogger(__name__)


class CostsTooMuchError(Exception):
    """The engine has used up what it may cost."""


class Allowance:
    """The CPU time that a place may still cost."""

    def __init__(self, burst_s: float) -> None:
        self._burst_s = self.left_s = burst_s
        self._filled_s = time.monotonic()

    def spend(self, spent_s: float) -> None:
        """Count CPU time. Raises CostsTooMuchError if there is none left."""
        now_s = time.monotonic()
        self.left_s = min(self.left_s + CPU_SHARE * (now_s - self._filled_s), self._burst_s) - spent_s
        self._filled_s = now_s
        if self.left_s < 0:
            raise CostsTooMuchError


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a source waits.

    Attributes:
        replay_s: for the next message of a replay, before it counts as not answered.
        check_s: without a frame, before the replay socket is asked whether one was lost.
    """

    replay_s: float = 10.0
    check_s: float = 5.0


class ZmqSource:
    """Follows one publisher until its task is cancelled.

    Attributes:
        is_connected: whether the publisher's connection is up, and its engine answers replays as it did before.
        is_given_up: whether it costs too much, and is not followed for now.
        resolve: returns an address with numbers instead of a name.
    """

    def __init__(self, addresses: tuple[str, str | None], topic: str, order: SourceOrder, inbox: Inbox) -> None:
        """`addresses`: of the publisher, and of its replay socket, if it has one; `order` puts batches into `inbox`."""
        self._events, self._replay = addresses
        self._topic = topic.encode()
        self._order, self._inbox, self._faults = order, inbox, order.faults
        self._applying = asyncio.Lock()
        self.timing, self.resolve, self.given_up_s = Timing(), resolved, GIVEN_UP_S
        self.is_connected = self.is_given_up = False
        self._live, self._replayed = Allowance(CPU_BURST_S), Allowance(REPLAY_BURST_S)
        self._changed = asyncio.Event()  # a replay is wanted, or one ended
        self._frames, self._spent_s = 0, 0.0
        self._is_up = self._hangs = self._has_answered = False

    async def run(self, context: zmq.asyncio.Context) -> None:
        """Follow the publisher. Raises only what a wrong address raises (zmq.ZMQError)."""
        while True:
            try:
                await self._follow(context)
            except* CostsTooMuchError:
                self._faults.count(Fault.COSTS_TOO_MUCH)
                _log.warning("%s costs more than %g of a core and is given up for %g s", self._events, CPU_SHARE,
                             self.given_up_s)  # fmt: skip
            self.is_given_up = True
            self._order.given_up()
            await asyncio.sleep(self.given_up_s)
            self.is_given_up = False

    async def _follow(self, context: zmq.asyncio.Context) -> None:
        subscriber = context.socket(zmq.SUB)
        with closing(subscriber):
            _prepare(subscriber)
            subscriber.subscribe(self._topic)
            monitor = subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            try:
                address = await self._found(self._events)
                subscriber.connect(address)
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._follow_name(subscriber, address))
                    tasks.create_task(self._watch(monitor))
                    tasks.create_task(self._receive(subscriber))
                    if self._replay is not None:
                        tasks.create_task(self._replays(context, self._replay))
                        tasks.create_task(self._check())
            finally:
                subscriber.disable_monitor()
                self._note(is_up=False)

    async def _found(self, address: str) -> str:
        """Return the address with numbers, once its name is known."""
        while True:
            try:
                return await self.resolve(address)
            except (OSError, TimeoutError):
                await asyncio.sleep(ASK_AGAIN_S)

    async def _follow_name(self, subscriber: zmq.asyncio.Socket, address: str) -> None:
        """Connect to where the name of an engine that is not connected points now."""
        while True:
            await asyncio.sleep(self.timing.check_s)
            if not self.is_connected and (now := await self._found(self._events)) != address:
                subscriber.disconnect(address)
                subscriber.connect(now)
                address = now

    def learn_again(self) -> None:
        """See SourceOrder."""
        self._order.learn_again()
        self._changed.set()

    async def wait_until_current(self) -> None:
        """Wait until the connection is up and no replay is under way."""
        while not self.is_connected or self._order.replaying or self._inbox:
            self._changed.clear()
            await self._changed.wait()

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())["event"]
            self._note(is_up=event == zmq.EVENT_HANDSHAKE_SUCCEEDED)
            if self._is_up:
                self._order.connected()

    def _note(self, is_up: bool, hangs: bool = False) -> None:
        self._is_up, self._hangs = is_up, hangs
        self.is_connected = is_up and not hangs
        self._changed.set()

    async def _receive(self, subscriber: zmq.asyncio.Socket) -> None:
        while True:
            parts = await subscriber.recv_multipart()
            with self._measured(self._live, parts):
                frame = parse_live(parts, self._faults)
                if frame is not None:
                    self._order.live(frame)
            self._frames += 1
            if self._hangs:
                self._note(self._is_up)
            await self._apply(self._live, self._frames)
            if frame is not None:
                self._changed.set()

    async def _check(self) -> None:
        while True:
            before = self._frames
            await asyncio.sleep(self.timing.check_s)
            if self._frames == before and self._is_up:
                self._order.check()
                self._changed.set()

    # -- replays -----------------------------------------------------------------------------------------------------

    async def _replays(self, context: zmq.asyncio.Context, address: str) -> None:
        while True:
            while self._order.wanted is None:
                self._changed.clear()
                await self._changed.wait()
            start, self._order.wanted = self._order.wanted, None
            dealer = context.socket(zmq.DEALER)  # a new one for each replay: no answer of an earlier one arrives
            with closing(dealer):
                _prepare(dealer)
                try:
                    dealer.connect(await self.resolve(address))
                except (OSError, TimeoutError):
                    self._order.replay_failed()
                else:
                    await dealer.send_multipart(replay_request(start))
                    await self._take_replay(dealer)
            await self._apply(self._replayed, 0)
            self._changed.set()

    async def _take_replay(self, dealer: zmq.asyncio.Socket) -> None:
        taken = 0
        while self._order.replaying and self._order.wanted is None:
            try:
                # Not `wait_for`: before Python 3.12 it drops a cancellation that comes together with a message, and
                # the task group, which cancels its tasks once, would wait for this one indefinitely.
                async with asyncio.timeout(self.timing.replay_s):
                    parts = await dealer.recv_multipart()
            except TimeoutError:
                if self._order.wanted is None:  # otherwise another replay has taken its place
                    self._order.replay_failed()
                    self._note(self._is_up, hangs=self._has_answered)
                return
            self._has_answered = True
            if self._hangs:
                self._note(self._is_up)
            if is_replay_end(parts):
                with self._measured(self._replayed):
                    self._order.replay_ended()
                return
            with self._measured(self._replayed, parts):
                frame = parse_replay(parts, self._topic, self._faults)
                if frame is not None:
                    self._order.replayed(frame)
            taken += 1
            await self._apply(self._replayed, taken)

    async def _apply(self, allowance: Allowance, taken: int) -> None:
        """Apply what waits; other messages are received once it is, so that no more waits than the order permits."""
        async with self._applying:
            while self._inbox:
                with self._measured(allowance):
                    self._inbox.advance()
                await self._pause(taken)
            await self._pause(taken)

    @contextmanager
    def _measured(self, allowance: Allowance, parts: Sequence[bytes] = ()) -> Iterator[None]:
        """Count what a message costs. Raises CostsTooMuchError."""
        began_s = time.thread_time()
        yield
        spent_s = time.thread_time() - began_s
        spent_s += BYTE_S * sum(map(len, parts))
        self._spent_s += spent_s
        allowance.spend(spent_s)

    async def _pause(self, taken: int) -> None:
        """Leave the event loop to others: an engine that publishes without end gets half of it at most, and one whose
        messages take long a third, because a call of others waits for several turns.
        """
        if self._spent_s > TURN_S:
            spent_s, self._spent_s = self._spent_s, 0.0
            await asyncio.sleep(spent_s if spent_s < LONG_S else 2 * spent_s)
        elif taken % FRAMES_PER_TURN == 0:
            await asyncio.sleep(0)


async def resolved(address: str) -> str:
    """Return an address with numbers instead of a name. Raises OSError, TimeoutError."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://"):
        return address
    with suppress(ValueError):
        ipaddress.ip_address(host.strip("[]"))
        return address
    async with asyncio.timeout(RESOLVE_S):
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket_module.SOCK_STREAM)
    number = str(found[0][4][0])
    return f"tcp://[{number}]:{port}" if ":" in number else f"tcp://{number}:{port}"


def _prepare(socket: zmq.asyncio.Socket) -> None:
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.RCVHWM, RECEIVE_QUEUE),
        (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S),
        (zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S),
        (zmq.TCP_KEEPALIVE_CNT, DEAD_AFTER_S // KEEPALIVE_S),
        (zmq.TCP_MAXRT, 1000 * DEAD_AFTER_S),
        (zmq.RECONNECT_IVL, RECONNECT_MS),
        (zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS),
        (zmq.IPV6, 1),
    ):
        socket.setsockopt(option, value)
