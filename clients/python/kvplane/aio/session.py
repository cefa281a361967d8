"""The session of an asyncio engine loop: `kvplane.Session`, awaited."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from types import TracebackType
from typing import Protocol, TypeVar

from kvplane.base.errors import (
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    KvplaneError,
    LimitExceeded,
    ServiceRestarted,
    Unavailable,
)
from kvplane.base.groups import ReplicaSpec
from kvplane.base.session import Opened, OpenRequest
from kvplane.base.step import Part, Step, StepResult
from kvplane.retry import RetryPolicy
from kvplane.revival import Revival
from kvplane.session import BEATS_PER_LEASE, FATAL, PATIENT_ATTEMPTS, draw_nonce
from kvplane.session_state import SessionState
from kvplane.tracing import current_traceparent

_T = TypeVar("_T")


class AsyncSessionTransport(Protocol):
    """SessionTransport, awaited; the contract is the same."""

    draining: bool
    can_move: bool

    async def open(self, request: OpenRequest) -> Opened:
        """Open a stream, in place of the one before if there was one."""
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
        """Say goodbye."""
        ...


class Session:
    """One engine life on one replica; made by `Session.open`. What `kvplane.Session` promises holds here too.

    One task at a time: a call while another one is under way raises FailedPrecondition. A call that is cancelled
    breaks the stream; the next one opens it again, and steps in flight stay in flight.
    """

    def __init__(
        self,
        transport: AsyncSessionTransport,
        request: OpenRequest,
        *,
        retry: RetryPolicy | None = None,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        nonces: Callable[[], int] = draw_nonce,
        revive: Callable[[], Revival] | None = None,
    ) -> None:
        """Not open yet: see `open`. `pause` waits so many seconds, in place of `retry.sleep`."""
        self._transport = transport
        self._request = request
        self._retry = retry or RetryPolicy()
        self._patience = retry or RetryPolicy(attempts=PATIENT_ATTEMPTS)
        self._revive = revive
        self._reviving = False
        self.resume_refused: KvplaneError | None = None  # why requests lost their blocks at the last revival
        self._pause = pause
        self._nonces = nonces
        self._link = asyncio.Lock()  # held while the transport is used, by a call or the heartbeat
        self._in_call = False
        self._ended: KvplaneError | None = None
        self._heart: asyncio.Task[None] | None = None
        self._state: SessionState

    async def open(self, *, heartbeats: bool = True) -> Session:
        """Open the session and return it; `heartbeats` keeps the lease by a task."""
        nonces = chain((self._request.nonce,), iter(self._nonces, None))
        requests = (replace(self._request, nonce=nonce) for nonce in nonces)
        opened = await self._retrying(lambda: self._transport.open(next(requests)), None, self._retry)
        self._state = SessionState(opened)
        if heartbeats:
            interval_s = self._state.lease_ms / 1000 / BEATS_PER_LEASE
            self._heart = asyncio.create_task(_keep_beating(weakref.ref(self), interval_s))
        return self

    @property
    def epoch(self) -> int:
        """The engine life that steps are sent under."""
        return self._state.epoch

    @property
    def spec(self) -> ReplicaSpec:
        """Of the replica."""
        return self._state.spec

    @property
    def free_blocks(self) -> int:
        """Exact after the last answer."""
        return self._state.free_blocks

    @property
    def kept_keys(self) -> int:
        """Cached keys that survived into this engine life."""
        return self._state.kept_keys

    @property
    def in_flight(self) -> int:
        """Steps submitted and not answered."""
        return self._state.in_flight

    @property
    def next_seq(self) -> int:
        """Number of the step that the next part belongs to."""
        return self._state.next_seq

    @property
    def draining(self) -> bool:
        """The service will go: finish what runs, close, and open a session elsewhere."""
        return self._transport.draining

    @property
    def ended(self) -> KvplaneError | None:
        """Why the session is over; None while it is not."""
        return self._ended

    async def apply(self, *parts: Part, executed_through: int | None = None) -> StepResult:
        """Send one whole step, or the last parts of one, and wait for the answer; see `kvplane.Session.apply`."""
        async with self._using():
            self._state.require_idle()
            await self._submit(parts, True, executed_through)
            return await self._receive()

    async def submit(self, *parts: Part, last: bool = True, executed_through: int | None = None) -> int:
        """Send a step, or some parts of one; returns its number. See `kvplane.Session.submit`."""
        async with self._using():
            return await self._submit(parts, last, executed_through)

    async def receive(self) -> StepResult:
        """Wait for the next answer, in the order of `submit`; see `kvplane.Session.receive`."""
        async with self._using():
            return await self._receive()

    async def beat(self) -> None:
        """Keep the lease; open a broken stream again. Nothing is done during a call, which keeps it too."""
        if self._link.locked() or self._ended is not None:
            return
        async with self._link:
            try:
                await self._transport.heartbeat()
            except Unavailable as error:
                await self._try_to_resume(error)
            except KvplaneError as error:
                self._ended = error

    async def close(self) -> None:
        """Leave: the service frees what the engine still holds. Idempotent."""
        if self._heart is not None:
            self._heart.cancel()
        async with self._link:
            if self._ended is None:
                self._ended = FailedPrecondition("the session is closed", remedy="open a new one")
            await self._transport.close()

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @asynccontextmanager
    async def _using(self) -> AsyncIterator[None]:
        if self._in_call:
            raise FailedPrecondition(
                "another task is using this session", remedy="open a session, and use it from one task"
            )
        self._in_call = True
        try:
            async with self._link:
                if self._ended is not None:
                    raise self._ended.with_traceback(None)
                yield
        finally:
            self._in_call = False

    async def _submit(self, parts: tuple[Part, ...], last: bool, executed_through: int | None) -> int:
        step = self._state.register(parts, last, executed_through)
        step.traceparent = current_traceparent()
        moving = self._transport.draining and self._transport.can_move and self._revive is not None
        if self._state.keeps_back(step, moving):
            return step.seq
        try:
            await self._transport.send(self._state.outward(step))
        except KvplaneError:
            self._state.withdraw(step)
            raise
        return step.seq

    async def _receive(self) -> StepResult:
        self._state.require_in_flight()
        answer = await self._next_answer()
        if isinstance(answer, StepResult):
            return self._state.answered(answer)
        await self._drain(self._state.refused())
        if isinstance(answer, FATAL):
            self._ended = answer
        raise answer

    async def _next_answer(self) -> StepResult | KvplaneError:
        while True:
            try:
                made = self._state.take_made()
                if made is not None:
                    return made
                if self._state.is_quiet:
                    await self._move()
                    continue
                answer = await self._transport.receive()
                return self._state.inward(answer) if isinstance(answer, StepResult) else answer
            except Unavailable as error:
                await self._resume(error)
            except KvplaneError as error:
                self._ended = error
                raise

    async def _drain(self, followers: int) -> None:
        """Take the refusals of what was submitted behind a refused step."""
        try:
            for _ in range(followers):
                answer = await self._transport.receive()
                if isinstance(answer, StepResult):
                    self._ended = InternalError(f"step {answer.seq} was applied though one before it was refused")
                    raise self._ended
        except Unavailable:
            return  # with the stream they are gone; the next call finds it broken

    async def _try_to_resume(self, cause: Unavailable) -> None:
        try:
            await self._retrying(partial(self._reopen, None), cause, self._retry)
        except KvplaneError:
            return  # the next beat or call of the engine tries again, or raises what ended the session

    async def _resume(self, cause: Unavailable) -> None:
        """Open the stream again and send what was not answered; raises Unavailable after the last attempt."""
        await self._retrying(partial(self._reopen, self._revive), cause, self._patience)

    async def _move(self) -> None:
        """Leave a service that goes, which lets another one take the replica, and go on there."""
        await self._transport.close()
        self._reviving = True
        await self._resume(Unavailable("the service goes, and no other one took the replica"))

    async def _reopen(self, revive: Callable[[], Revival] | None) -> None:
        """Without `revive` a session that can be revived is left to the engine's next call."""
        request = replace(self._request, epoch=self._state.epoch, nonce=self._nonces(), stamp_table=())
        try:
            if not self._reviving:
                opened = await self._transport.open(request)
                for step in self._state.resumed(opened):
                    await self._transport.send(self._state.outward(step))
        except Unavailable:
            raise
        except KvplaneError as error:
            self._reviving = self._revive is not None and isinstance(error, ServiceRestarted)
            if not self._reviving:
                self._ended = error
                raise
        if self._reviving:
            await self._begin_again(revive)

    async def _begin_again(self, revive: Callable[[], Revival] | None) -> None:
        """Tell a new service what the engine has. Until it has answered all of it, this is tried again."""
        if revive is None:
            raise ServiceRestarted("the service was started anew", remedy="the engine's next call goes on with it")
        revival = revive()
        try:
            opened = await self._transport.open(revival.open_request(self._request, self._nonces()))
            told = [await self._ask(step) for step in revival.first_steps(opened, self._state.unanswered())]
            revival = await self._tell_image(revival, opened, told)
        except Unavailable:
            raise
        except KvplaneError as error:
            self._ended = error
            raise
        self._state.restarted(opened, revival, told)
        self._reviving = False

    async def _tell_image(self, revival: Revival, opened: Opened, told: list[StepResult]) -> Revival:
        """Let requests run on with their blocks; when that is refused they are preempted. `resume_refused` says why."""
        step, self.resume_refused = revival.resume_step(opened, told), None
        if step is None:
            return revival
        try:
            told.append(await self._ask(step))
        except (InvalidArgument, LimitExceeded) as refusal:
            self.resume_refused = refusal
            return revival.without_resume()
        return revival

    async def _ask(self, step: Step) -> StepResult:
        await self._transport.send(step)
        answer = await self._transport.receive()
        if isinstance(answer, StepResult):
            return answer
        raise answer

    async def _retrying(
        self, act: Callable[[], Awaitable[_T]], failed: Unavailable | None, policy: RetryPolicy
    ) -> _T:
        """The outcome of the first attempt that is not Unavailable; `failed` is the attempt before."""
        delays = policy.delays_s()
        while True:
            if failed is not None:
                delay = next(delays, None)
                if delay is None:
                    raise failed
                await self._pause(delay)
            try:
                return await act()
            except Unavailable as error:
                failed = error


async def _keep_beating(ref: weakref.ref[Session], interval_s: float) -> None:
    """Beat until the session is over or forgotten: no lease outlives the engine that dropped it."""
    while True:
        await asyncio.sleep(interval_s)
        session = ref()
        if session is None or session.ended is not None:
            return
        await session.beat()
        del session
