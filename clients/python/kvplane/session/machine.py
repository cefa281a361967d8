"""A session as a machine without I/O, for the blocking and the asyncio session.

Each call of a session is a generator (`kvplane.sansio.driver`): it yields actions on the transport and receives their
outcomes. It does not wait and has no clock, thread or loop, so that a test can try every order of events.

    down ──open──▶ up ──────── a step is sent, an answer received, the lease kept
     ▲ ▲            │ broken, timed out, interrupted: the next call (or beat) opens again, and sends what is unanswered
     │ └────────────┘
     └─ new life: the service was started anew or goes, or the engine asks for it: the next call asks the engine what it
        has (`Revive`), opens a new engine life and tells it; steps in flight are answered with "nothing granted"

    ended: closed, aborted, or refused for good; every call raises why
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TypeAlias, TypeVar

from kvplane.base.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    KvplaneError,
    LimitExceeded,
    OtherWriter,
    ServiceRestarted,
    StaleEpoch,
    Unavailable,
)
from kvplane.base.session import NEW_EPOCH, Opened, OpenRequest
from kvplane.base.step import Part, Step, StepResult
from kvplane.sansio.driver import Pause, Work
from kvplane.sansio.retry import Attempts, RetryPolicy
from kvplane.sansio.tracing import current_traceparent
from kvplane.session.known_requests import KnownRequests
from kvplane.session.reopening import Revival
from kvplane.session.state import SessionState

T = TypeVar("T")

OPENING = RetryPolicy(within_s=10.0)  # a few seconds
PATIENCE = RetryPolicy(attempts=None)  # a minute: a service may be started anew in it
FATAL = (StaleEpoch, OtherWriter)  # refusals of a step that no later step can escape
BROKEN = (Unavailable, DeadlineExceeded)  # say nothing of the session, only of its stream


@dataclass(slots=True)
class Open:
    """Open a stream, in place of the one before; comes to an Opened."""

    request: OpenRequest


@dataclass(slots=True)
class Send:
    """Hand a step to the stream."""

    step: Step


@dataclass(slots=True)
class Receive:
    """Wait for the next answer; comes to a StepResult or to the refusal of the step."""


RECEIVE = Receive()


@dataclass(slots=True)
class Heartbeat:
    """Keep the lease."""


@dataclass(slots=True)
class Close:
    """Say goodbye."""


@dataclass(slots=True)
class Revive:
    """Ask the engine what it has; comes to a Revival."""


Action: TypeAlias = Open | Send | Receive | Heartbeat | Close | Revive | Pause
Doing: TypeAlias = Work[Action, T]


class SessionMachine:
    """One session. One piece of work at a time, `end` at any time.

    Attributes:
        ended: why the session is over; None while it is not.
        resume_refused: why requests lost their blocks at the last revival; None when none did.
    """

    def __init__(
        self,
        request: OpenRequest,
        retry: RetryPolicy | None,
        nonces: Callable[[], int],
        clock: Callable[[], float],
        revive: Callable[[], Revival] | KnownRequests | None,
    ) -> None:
        """See kvplane.Session; `clock` counts seconds."""
        self._request = request
        self._opening, self._patience = retry or OPENING, retry or PATIENCE
        self._nonces, self._clock, self._can_revive = nonces, clock, revive is not None
        self._known = revive if isinstance(revive, KnownRequests) else None
        self._state: SessionState | None = None
        self.ended: KvplaneError | None = None
        self.resume_refused: KvplaneError | None = None
        self._is_up = False
        self._begun_by = 0  # nonce of the stream that began the present life, 0 = none of this session's
        self._broken_by: KvplaneError = Unavailable("no stream is open")
        self._is_new_life = False  # the next call begins one
        self._is_silent = False  # it did not answer in time, nor take a stream since: a call tries once
        self._refusal: KvplaneError | None = None  # of the oldest step, until its followers' were taken as well

    @property
    def state(self) -> SessionState:
        """Numbers of steps, and what the service said at `open`. Raises FailedPrecondition before that has returned."""
        if self._state is None:
            raise FailedPrecondition("the session is not open", remedy="use it once `open` has returned")
        return self._state

    def check(self) -> None:
        """Raise why the session is over."""
        if self.ended is not None:
            raise self.ended.with_traceback(None)

    def end(self, reason: KvplaneError) -> None:
        """It is over; from any thread. What is being done ends with its next action."""
        if self.ended is None:
            self.ended = reason

    def begin_new_life(self) -> None:
        """Continue the present one no more. Raises FailedPrecondition for a session that cannot be revived."""
        if not self._can_revive:
            raise FailedPrecondition("the session has no revive", remedy="close it, and open another one")
        self._leave("the engine begins a new life")

    def open(self) -> Doing[None]:
        """Begin an engine life; each attempt has a nonce of its own: the service may know the last one."""
        attempts, request = Attempts(self._opening, self._clock), self._request
        while True:
            try:
                opened: Opened = yield from self._use(Open(request))
            except BROKEN as error:
                yield Pause(attempts.pause_s(error))
                request = replace(request, nonce=self._nonces())
            else:
                self._state, self._is_up = SessionState(opened), True
                self._begun_by = request.nonce if request.epoch == NEW_EPOCH else 0
                return

    def apply(self, parts: Sequence[Part], executed_through: int | None, moving: bool) -> Doing[StepResult]:
        """A step, and its answer."""
        self.state.require_idle()
        yield from self.submit(parts, True, executed_through, moving)
        return (yield from self.receive())

    def submit(self, parts: Sequence[Part], last: bool, executed_through: int | None, moving: bool) -> Doing[int]:
        """A step, or some parts of it. `moving`: the service goes, and another one can be asked."""
        step = self.state.register(parts, last, executed_through)
        step.traceparent = current_traceparent()
        if not (self.state.keeps_back(step, moving and self._can_revive) or self._is_new_life):
            with _Sending(self, step):
                yield Send(self.state.outward(step))
        return step.seq

    def receive(self) -> Doing[StepResult]:
        """The next answer. Unavailable, DeadlineExceeded: not now; the step stays in flight."""
        self.state.require_in_flight()
        attempts: Attempts | None = None
        while True:
            made = self.state.take_made()
            if made is not None:
                return self.state.answered(made)
            if self._refusal is not None:
                yield from self._refuse()
            if self.state.is_quiet:
                yield from self._use(Close())
                self._leave("the service goes, and no other one took the replica")
            if not self._is_up:
                attempts = attempts or Attempts(self._patience, self._clock)
                yield from self._resume(attempts)
                continue
            try:
                answer: StepResult | KvplaneError = yield from self._use(RECEIVE)
            except Unavailable:
                continue
            except DeadlineExceeded:
                raise
            except KvplaneError as error:
                self.end(error)
                raise
            if isinstance(answer, StepResult):
                return self._take(answer)
            self._refusal = answer

    def beat(self) -> Doing[None]:
        """Keep the lease, or try once to open a broken stream; never raises a KvplaneError."""
        with suppress(KvplaneError):
            with suppress(*BROKEN):
                if self._is_up:
                    yield from self._ending(self._use(Heartbeat()))
            if not (self._is_up or self._is_new_life):
                yield from self._ending(self._reopen())

    def close(self) -> Doing[None]:
        """Leave."""
        self.end(FailedPrecondition("the session is closed", remedy="open a new one"))
        yield from self._use(Close())

    def interrupted(self) -> None:
        """The stream is in doubt."""
        self._is_up = False

    def _use(self, action: Action) -> Doing[T]:
        """One action on the stream, which is broken unless it succeeds; when the session is over, only the goodbye."""
        if not isinstance(action, Close):
            self.check()
        was_up, self._is_up = self._is_up, False
        try:
            outcome: T = yield action
        except BROKEN as error:
            self._broken_by = error
            self._is_silent = self._is_silent or isinstance(error, DeadlineExceeded)
            raise
        self._is_up = was_up
        return outcome

    def _ending(self, work: Doing[T]) -> Doing[T]:
        """What is refused in this work ends the session."""
        try:
            return (yield from work)
        except BROKEN:
            raise
        except KvplaneError as error:
            self.end(error)
            raise

    def _take(self, answer: StepResult) -> StepResult:
        step = self.state.oldest
        try:
            result = self.state.answered(self.state.inward(answer))
        except InternalError as error:
            self.end(error)
            raise
        if self._known is not None:
            self._known.note(step, result)
        return result

    def _refuse(self) -> Doing[None]:
        """Raise the refusal of the oldest step, behind which the service refuses what was sent after it."""
        assert self._refusal is not None
        with suppress(*BROKEN):
            for _ in range(self.state.followers * self._is_up):
                answer: StepResult | KvplaneError = yield from self._ending(self._use(RECEIVE))
                if isinstance(answer, StepResult):
                    self.end(InternalError(f"step {answer.seq} was applied though one before it was refused"))
                    self.check()
        refusal, self._refusal = self._refusal, None
        self.state.refused()
        if isinstance(refusal, FATAL):
            self.end(refusal)
        raise refusal

    def _resume(self, attempts: Attempts) -> Doing[None]:
        """Open a stream again, here or in a new engine life; raises Unavailable after the last attempt."""
        while True:
            self.check()
            yield Pause(attempts.pause_s(self._broken_by))
            self.check()
            try:
                if not self._is_new_life:
                    yield from self._ending(self._reopen())
                if self._is_new_life and self._known is None:
                    revival: Revival = yield Revive()
                    yield from self._ending(self._begin_again(revival))
                elif self._is_new_life and self._known is not None:
                    yield from self._ending(self._tell_known(self._known))
            except Unavailable as error:
                self.check()
                self._broken_by = error
                if self._is_silent:
                    raise
            else:
                attempts.succeeded()
                self._is_silent = False
                return

    def _reopen(self) -> Doing[None]:
        """Go on in this engine life: send what was not answered."""
        begun = replace(self._request, stamp_table=(), busy_blocks=(), owner_epoch=0)  # what only a new life needs
        request = replace(begun, epoch=self.state.epoch, nonce=self._nonces(), begun_by=self._begun_by)
        try:
            opened: Opened = yield from self._use(Open(request))
        except ServiceRestarted:
            if not self._can_revive:
                raise
            self._leave("the service was started anew")
            return
        self._refusal = None  # it is told again
        for step in self.state.resumed(opened):
            yield from self._use(Send(self.state.outward(step)))
        self._is_up = True

    def _tell_known(self, known: KnownRequests) -> Doing[None]:
        """Begin a new life with what this session has seen of the engine."""
        known = known.after(self.state.unanswered())
        yield from self._begin_again(known.revival(self.state.epoch))
        known.running.clear()  # as the answers that were made say
        self._known = known

    def _begin_again(self, revival: Revival) -> Doing[None]:
        """Tell a service what the engine has. Until it has answered all of it, this is tried again."""
        request = revival.open_request(self._request, self._nonces(), self.state.still_busy())
        opened: Opened = yield from self._use(Open(request))
        told: list[StepResult] = []
        for step in revival.first_steps(opened, self.state.unanswered()):
            told.append((yield from self._ask(step)))
        image, self.resume_refused = revival.resume_step(opened, told), None
        if image is not None:
            try:
                told.append((yield from self._ask(image)))
            except (InvalidArgument, LimitExceeded) as refusal:  # it costs what it would have saved
                self.resume_refused = refusal
                revival = revival.without_resume()
        self.state.restarted(opened, revival, told)
        self._begun_by = request.nonce
        self._refusal, self._is_new_life, self._is_up = None, False, True

    def _ask(self, step: Step) -> Doing[StepResult]:
        yield from self._use(Send(step))
        answer: StepResult | KvplaneError = yield from self._use(RECEIVE)
        if isinstance(answer, StepResult):
            return answer
        raise answer

    def _leave(self, why: str) -> None:
        self._is_new_life, self._is_up, self._broken_by = True, False, Unavailable(why)


class _Sending:
    """Around the sending of a new step: as if it never was when it cannot be sent, in flight when that is in doubt."""

    def __init__(self, machine: SessionMachine, step: Step) -> None:
        self._machine, self._step = machine, step

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        is_broken = isinstance(error, BROKEN)  # which `receive` tells
        if isinstance(error, Exception) and not is_broken:
            self._machine.state.withdraw(self._step)
        elif error is not None:  # Ctrl-C, a cancelled task
            self._machine.interrupted()
        return is_broken
