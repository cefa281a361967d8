"""The session of an asyncio engine loop: `kvplane.Session`, awaited."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Protocol, TypeVar

from kvplane.base.errors import FailedPrecondition, KvplaneError
from kvplane.base.session import CLOSE_TIMEOUT_S, Opened, OpenRequest
from kvplane.base.step import Part, Step, StepResult
from kvplane.sansio.driver import Pause, drive_async
from kvplane.sansio.retry import RetryPolicy
from kvplane.session.known_requests import KnownRequests
from kvplane.session.machine import Action, Close, Doing, Heartbeat, Open, Receive, Send, SessionMachine
from kvplane.session.options import draw_nonce
from kvplane.session.reopening import Revival
from kvplane.session.view import BEATS_PER_LEASE, SessionView, aborted

_T = TypeVar("_T")


class AsyncSessionTransport(Protocol):
    """The contract of SessionTransport, with awaited methods. `abort` is called on the event loop's thread."""

    draining: bool
    can_move: bool

    async def open(self, request: OpenRequest) -> Opened:
        """Open a stream, which replaces the previous one."""
        ...

    async def send(self, step: Step) -> None:
        """Send without waiting for the answer."""
        ...

    async def receive(self) -> StepResult | KvplaneError:
        """Wait for the next answer."""
        ...

    async def heartbeat(self) -> None:
        """Keep the lease."""
        ...

    async def close(self) -> None:
        """Close the stream, so that the service frees the session's requests."""
        ...

    def abort(self) -> None:
        """Cancel the stream; the service treats the engine as lost."""
        ...


class Session(SessionView):
    """One engine life on one replica, opened by `Session.open`. The contract of `kvplane.Session` holds here too.

    One task at a time may call: a call during another call raises FailedPrecondition. A cancelled call breaks the
    stream; the next call reopens it. Steps stay in flight, including the one whose `submit` was cancelled: `in_flight`
    and `next_seq` show whether it was accepted.
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
        """The session is not open before `open`. `pause` replaces `retry.sleep`: it waits for a number of seconds."""
        self._transport = transport
        self._revive = revive
        self._pause = pause
        self._replica = request.replica
        self._machine = SessionMachine(request, retry, nonces, lambda: asyncio.get_running_loop().time(), revive)
        self._link = asyncio.Lock()  # held while the transport is used, by a call or a heartbeat
        self._stop = asyncio.Event()
        self._in_call = False

    async def open(self, *, heartbeats: bool = True) -> Session:
        """Open the session and return it; `heartbeats` keeps the lease by a task."""
        await self._carry_out(self._machine.open())
        if heartbeats:
            interval_s = self._machine.state.lease_ms / 1000 / BEATS_PER_LEASE
            work = _keep_beating(weakref.ref(self), self._stop, interval_s)
            self._heart = asyncio.create_task(work, name=f"kvplane-lease-{self._replica}")
        return self

    @property
    def draining(self) -> bool:
        """Whether the service drains; see `kvplane.Session.draining`."""
        return self._transport.draining

    async def apply(self, *parts: Part, executed_through: int | None = None) -> StepResult:
        """Send one whole step, or the last parts of one, and await the answer; see `kvplane.Session.apply`."""
        return await self._call(self._machine.apply(parts, executed_through, self._moving))

    async def submit(self, *parts: Part, last: bool = True, executed_through: int | None = None) -> int:
        """Send a step, or some parts of one. Returns its number; see `kvplane.Session.submit`."""
        return await self._call(self._machine.submit(parts, last, executed_through, self._moving))

    async def receive(self) -> StepResult:
        """Await the next answer, in the order of `submit`; see `kvplane.Session.receive`."""
        return await self._call(self._machine.receive())

    def begin_new_life(self) -> None:
        """Abandon this engine life; see `kvplane.Session.begin_new_life`."""
        self._machine.check()
        self._machine.begin_new_life()

    async def beat(self) -> None:
        """Keep the lease; reopen a broken stream. Does nothing during a call, which keeps the lease itself."""
        if not self._link.locked() and self.ended is None:
            async with self._link:
                await self._carry_out(self._machine.beat())

    async def close(self) -> None:
        """End the session: the service frees the blocks of its requests. Idempotent.

        Waits up to two seconds for a call in another task, then aborts it.
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
        """End the session immediately, on the event loop's thread; see `kvplane.Session.abort`."""
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
        """Run one call of the engine."""
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
            await self._transport.heartbeat()
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
    """Send heartbeats until the session ends or is garbage collected, so that no lease outlives its engine."""
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(interval_s):
                await stop.wait()
        session = ref()
        if stop.is_set() or session is None or session.ended is not None:
            return
        await session.beat()
        del session
