"""The asyncio session of an engine: the methods of `kvplane.Session` as coroutines."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import TypeVar

from kvplane.aio.interface import AsyncSessionTransport
from kvplane.base.errors import FailedPrecondition
from kvplane.base.session import CLOSE_TIMEOUT_S, OpenRequest
from kvplane.base.step import Part, StepResult
from kvplane.sansio.driver import Pause, drive_async
from kvplane.sansio.retry import RetryPolicy
from kvplane.session.known_requests import KnownRequests
from kvplane.session.machine import Action, Close, Doing, Heartbeat, Open, Receive, Send, SessionMachine
from kvplane.session.options import draw_nonce
from kvplane.session.reopening import Revival
from kvplane.session.view import BEATS_PER_LEASE, SessionView, aborted, looked_at

_T = TypeVar("_T")


class Session(SessionView):
    """The session of an engine with one replica, for asyncio. It behaves as `kvplane.Session`.

    Only one task at a time may call a session: a second call at the same time raises FailedPrecondition. A cancelled
    call breaks the stream, and the next call reopens it. Steps stay in flight (submitted and not answered), also a step
    whose `submit` was cancelled; `in_flight` and `next_seq` show whether the session accepted that step.
    """

    def __init__(
        self,
        transport: AsyncSessionTransport,
        request: OpenRequest,
        *,
        retry: RetryPolicy | None = None,
        pause: Callable[[float], Awaitable[object]] | None = None,
        nonces: Callable[[], int] = draw_nonce,
        revive: Callable[[], Revival] | KnownRequests | None = None,
    ) -> None:
        """Create the session without opening it; call `open`. `pause` is a coroutine function that waits for a number
        of seconds; it replaces `retry.sleep`.
        """
        self._transport = transport
        self._revive = revive
        self._pause = pause
        self._replica = request.replica
        self._machine = SessionMachine(request, retry, nonces, lambda: asyncio.get_running_loop().time(), revive)
        self._link = asyncio.Lock()  # held while the transport is used, by a call or a heartbeat
        self._stop = asyncio.Event()
        self._in_call = False
        self._looking = looked_at(transport)

    async def open(self, *, heartbeats: bool = True) -> Session:
        """Open the session and return it. With `heartbeats`, start a task that renews the session's lease until the
        session ends.
        """
        await self._carry_out(self._machine.open())
        if heartbeats:
            interval_s = self._machine.state.lease_ms / 1000 / BEATS_PER_LEASE
            work = _keep_beating(weakref.ref(self), self._stop, interval_s)
            self._heart = asyncio.create_task(work, name=f"kvplane-lease-{self._replica}")
        return self

    @property
    def draining(self) -> bool:
        """Whether the service is draining; see `kvplane.Session.draining`."""
        return self._transport.draining

    async def apply(self, *parts: Part, executed_through: int | None = None) -> StepResult:
        """Send one whole step, or the last parts of a step, and wait for its result; see `kvplane.Session.apply`."""
        return await self._call(self._machine.apply(parts, executed_through, self._moving))

    async def submit(self, *parts: Part, last: bool = True, executed_through: int | None = None) -> int:
        """Send a step, or some parts of one, and return the step's number; see `kvplane.Session.submit`."""
        return await self._call(self._machine.submit(parts, last, executed_through, self._moving))

    async def receive(self) -> StepResult:
        """Wait for the next result, in the order in which the steps were submitted; see `kvplane.Session.receive`."""
        if self._looking is not None and not (self._in_call or self._link.locked() or self.ended):
            taken = self._machine.take_ready(self._looking.ready)  # does not give the loop to others
            if taken is not None:
                return taken
        return await self._call(self._machine.receive())

    def begin_new_life(self) -> None:
        """End this epoch, so that the next call starts a new one; see
        `kvplane.Session.begin_new_life`.
        """
        self._machine.check()
        self._machine.begin_new_life()

    async def beat(self) -> None:
        """Send a heartbeat, and reopen the stream if it is broken. Does nothing while another call runs, since that
        call keeps the lease.
        """
        if not self._link.locked() and self.ended is None:
            async with self._link:
                await self._carry_out(self._machine.beat())

    async def close(self) -> None:
        """End the session, so that the service frees the blocks of its requests. A second call is harmless.

        If another task is in a call, waits up to two seconds for it and then cancels the stream.
        """
        self._stop.set()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._link.acquire()
        except TimeoutError:
            self.abort()
            return
        try:
            await self._carry_out(self._machine.close())
        finally:
            self._link.release()

    def abort(self) -> None:
        """End the session immediately by cancelling its stream. Call it on the event loop's thread. See
        `kvplane.Session.abort`.
        """
        self._machine.end(aborted())
        self._stop.set()
        self._transport.abort()

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def _moving(self) -> bool:
        return self._transport.draining and self._transport.can_move

    async def _call(self, work: Doing[_T]) -> _T:
        """Run one method of the session. Raises FailedPrecondition while another task runs a method."""
        if self._in_call:
            raise FailedPrecondition(
                "another task is using this session", remedy="open a session, and use it from one task"
            )
        self._in_call = True
        try:
            async with self._link:
                self._machine.check()
                return await self._carry_out(work)
        finally:
            self._in_call = False

    async def _carry_out(self, work: Doing[_T]) -> _T:
        return await drive_async(work, self._act)

    async def _act(self, action: Action) -> object:
        if isinstance(action, Receive):
            return await self._transport.receive()
        if isinstance(action, Send):
            await self._transport.send(action.step)
        elif isinstance(action, Open):
            return await self._transport.open(action.request)
        elif isinstance(action, Heartbeat):
            await self._transport.heartbeat(action.waiting_requests)
        elif isinstance(action, Close):
            await self._transport.close()
        elif isinstance(action, Pause):
            await (self._pause or self._pause_unless_stopped)(action.seconds)
        else:
            assert callable(self._revive), "the machine yields Revive only with a callable revive"
            return self._revive()
        return None

    async def _pause_unless_stopped(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()


async def _keep_beating(ref: weakref.ref[Session], stop: asyncio.Event, interval_s: float) -> None:
    """Send heartbeats until the session ends or is garbage collected, so that a lost engine's lease expires."""
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(interval_s):
                await stop.wait()
        session = ref()
        if stop.is_set() or session is None or session.ended is not None:
            return
        await session.beat()
        del session
