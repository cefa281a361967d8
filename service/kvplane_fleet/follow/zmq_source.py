"""The sockets of one source: a subscriber to its publisher, and a dealer to its replay socket.

Everything runs on one event loop. A lost connection is found by ZeroMQ's heartbeats, a lost last frame and an engine
that was restarted behind a proxy by a check after a silence.
"""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import dataclass

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from kvplane_fleet.faults import Faults
from kvplane_fleet.follow.order import SourceOrder
from kvplane_fleet.wire.frames import is_replay_end, parse_live, parse_replay, replay_request

RECEIVE_QUEUE = 100_000
MAX_MESSAGE_BYTES = 256 << 20
HEARTBEAT_MS, DEAD_AFTER_MS = 1000, 5000
RECONNECT_MS, MAX_RECONNECT_MS = 50, 1000
FRAMES_PER_TURN = 64


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
        is_connected: whether the publisher's connection is up.
    """

    def __init__(self, addresses: tuple[str, str | None], topic: str, order: SourceOrder, faults: Faults) -> None:
        """`addresses`: of the publisher, and of its replay socket, if it has one."""
        self._events, self._replay = addresses
        self._topic = topic.encode()
        self._order, self._faults = order, faults
        self.timing = Timing()
        self.is_connected = False
        self._changed = asyncio.Event()  # a replay is wanted, or one ended
        self._frames = 0

    async def run(self, context: zmq.asyncio.Context) -> None:
        """Follow the publisher. Raises only what a wrong address raises (zmq.ZMQError)."""
        subscriber = context.socket(zmq.SUB)
        with closing(subscriber):
            _prepare(subscriber)
            subscriber.subscribe(self._topic)
            monitor = subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            try:
                subscriber.connect(self._events)
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._watch(monitor))
                    tasks.create_task(self._receive(subscriber))
                    if self._replay is not None:
                        tasks.create_task(self._replays(context, self._replay))
                        tasks.create_task(self._check())
            finally:
                subscriber.disable_monitor()
                self.is_connected = False

    def learn_again(self) -> None:
        """See SourceOrder."""
        self._order.learn_again()
        self._changed.set()

    async def wait_until_current(self) -> None:
        """Wait until the connection is up and no replay is under way."""
        while not self.is_connected or self._order.replaying:
            self._changed.clear()
            await self._changed.wait()

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())["event"]
            self.is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if self.is_connected:
                self._order.connected()
            self._changed.set()

    async def _receive(self, subscriber: zmq.asyncio.Socket) -> None:
        while True:
            parts = await subscriber.recv_multipart()
            frame = parse_live(parts, self._faults)
            if frame is not None:
                self._order.live(frame)
                self._changed.set()
            self._frames += 1
            if self._frames % FRAMES_PER_TURN == 0:
                await asyncio.sleep(0)  # the other sources' turn

    async def _check(self) -> None:
        while True:
            before = self._frames
            await asyncio.sleep(self.timing.check_s)
            if self._frames == before and self.is_connected:
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
                dealer.connect(address)
                await dealer.send_multipart(replay_request(start))
                await self._take_replay(dealer)
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
                return
            if is_replay_end(parts):
                self._order.replay_ended()
                return
            frame = parse_replay(parts, self._topic, self._faults)
            if frame is not None:
                self._order.replayed(frame)
            taken += 1
            if taken % FRAMES_PER_TURN == 0:
                await asyncio.sleep(0)


def _prepare(socket: zmq.asyncio.Socket) -> None:
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.RCVHWM, RECEIVE_QUEUE),
        (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
        (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
        (zmq.HEARTBEAT_TIMEOUT, DEAD_AFTER_MS),
        (zmq.RECONNECT_IVL, RECONNECT_MS),
        (zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS),
        (zmq.IPV6, 1),
    ):
        socket.setsockopt(option, value)
