"""The state machine of a session, without I/O; the blocking and the asyncio session run it.

Each call of a session is a generator (`kvplane.sansio.driver`): it yields actions on the transport and receives their
outcomes. It does not wait and has no clock, thread or loop, so that a test can try every order of events.

    down ──open──▶ up ──────── a step is sent, an answer received, the lease kept
     ▲ ▲            │ broken, timed out, interrupted: the next call or heartbeat reopens, and resends unanswered steps
     │ └────────────┘
     └─ new life: the service restarted or drains, or the engine requests it: the next call asks the engine for its
        requests (`Revive`), opens a new engine life and sends them; steps in flight are answered with "nothing granted"

    ended: closed, aborted, or refused permanently; every call raises the reason
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

OPENING = RetryPolicy(within_s=10.0)
PATIENCE = RetryPolicy(attempts=None)  # a minute: time for a service to restart
FATAL = (StaleEpoch, OtherWriter)  # every later step would be refused too
BROKEN = (Unavailable, DeadlineExceeded)  # the stream is broken; the session is not


@dataclass(slots=True)
class Open:
    """Open a stream, which replaces the previous one. Outcome: an Opened."""

    request: OpenRequest


@dataclass(slots=True)
class Send:
    """Write a step to the stream."""

    step: Step


@dataclass(slots=True)
class Receive:
    """Wait for the next answer. Outcome: a StepResult, or the refusal of the step."""


RECEIVE = Receive()


@dataclass(slots=True)
class Heartbeat:
    """Keep the lease."""


@dataclass(slots=True)
class Close:
    """Close the stream, so that the service frees the session's requests."""


@dataclass(slots=True)
class Revive:
    """Ask the engine for its requests and memory. Outcome: a Revival."""


Action: TypeAlias = Open | Send | Receive | Heartbeat | Close | Revive | Pause
Doing: TypeAlias = Work[Action, T]


class SessionMachine:
    """One session. At most one call runs at a time; `end` may be called at any time, from any thread.

    Attributes:
        ended: why the session ended; None while it is open.
        resume_refused: why requests lost their blocks when the session was last reopened; None when none did.
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
        self._life_nonce = 0  # nonce of the stream that began this engine life, 0 = another session began it
        self._broken_by: KvplaneError = Unavailable("no stream is open")
        self._is_new_life = False  # the next call begins a new engine life
        self._is_silent = False  # a deadline passed, and no stream was opened since: each call tries once
        self._refusal: KvplaneError | None = None  # of the oldest step, until those of the steps behind it are received

    @property
    def state(self) -> SessionState:
        """Step numbers, and the service's answer to `open`. Raises FailedPrecondition before `open` has returned."""
        if self._state is None:
            raise FailedPrecondition("the session is not open", remedy="use it once `open` has returned")
        return self._state

    def check(self) -> None:
        """Raise the reason why the session ended, if it ended."""
        if self.ended is not None:
            raise self.ended.with_traceback(None)

    def end(self, reason: KvplaneError) -> None:
        """End the session; from any thread. A call under way ends at its next action."""
        if self.ended is None:
            self.ended = reason

    def begin_new_life(self) -> None:
        """Abandon the current engine life. Raises FailedPrecondition for a session without a `revive`."""
        if not self._can_revive:
            raise FailedPrecondition("the session has no revive", remedy="close it, and open another one")
        self._leave("the engine begins a new life")

    def open(self) -> Doing[None]:
        """Begin an engine life. Each attempt draws a nonce, since the service may have seen that of the last one."""
        attempts, request = Attempts(self._opening, self._clock), self._request
        while True:
            try:
                opened: Opened = yield from self._use(Open(request))
            except BROKEN as error:
                yield Pause(attempts.pause_s(error))
                request = replace(request, nonce=self._nonces())
            else:
                self._state, self._is_up = SessionState(opened), True
                self._life_nonce = request.nonce if request.epoch == NEW_EPOCH else 0
                return

    def apply(self, parts: Sequence[Part], executed_through: int | None, moving: bool) -> Doing[StepResult]:
        """Send a step and receive its answer."""
        self.state.require_idle()
        yield from self.submit(parts, True, executed_through, moving)
        return (yield from self.receive())

    def submit(self, parts: Sequence[Part], last: bool, executed_through: int | None, moving: bool) -> Doing[int]:
        """Send a step, or some parts of it. `moving`: the service drains, and another one is available."""
        step = self.state.register(parts, last, executed_through)
        step.traceparent = current_traceparent()
        if not (self.state.holds_back(step, moving and self._can_revive) or self._is_new_life):
            with _Sending(self, step):
                yield Send(self.state.to_service(step))
        return step.seq

    def receive(self) -> Doing[StepResult]:
        """Receive the next answer. After Unavailable or DeadlineExceeded the step stays in flight."""
        self.state.require_in_flight()
        attempts: Attempts | None = None
        while True:
            made = self.state.take_synthesized()
            if made is not None:
                return self.state.answered(made)
            if self._refusal is not None:
                yield from self._refuse()
            if self.state.is_drained:
                yield from self._use(Close())
                self._leave("the service drains, and no other service has taken the replica")
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
        """Keep the lease, or try once to reopen a broken stream. Raises no KvplaneError."""
        with suppress(KvplaneError):
            with suppress(*BROKEN):
                if self._is_up:
                    yield from self._ending(self._use(Heartbeat()))
            if not (self._is_up or self._is_new_life):
                yield from self._ending(self._reopen())

    def close(self) -> Doing[None]:
        """End the session and close its stream."""
        self.end(FailedPrecondition("the session is closed", remedy="open a new one"))
        yield from self._use(Close())

    def interrupted(self) -> None:
        """The caller was interrupted: the stream's state is unknown, so the next call reopens it."""
        self._is_up = False

    def _use(self, action: Action) -> Doing[T]:
        """Perform one action on the stream, which is broken unless it succeeds. An ended session may only close."""
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
        """Run a call; a refusal in it ends the session."""
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
            result = self.state.answered(self.state.to_engine(answer))
        except InternalError as error:
            self.end(error)
            raise
        if self._known is not None:
            self._known.note(step, result)
        return result

    def _refuse(self) -> Doing[None]:
        """Raise the refusal of the oldest step, after the refusals of the steps behind it were received."""
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
        """Open a stream again, in this engine life or in a new one. Raises Unavailable after the last attempt."""
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
                    yield from self._ending(self._begin_again_from(self._known))
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
        """Continue this engine life: open a stream and resend the unanswered steps."""
        begun = replace(self._request, stamp_table=(), busy_blocks=(), owner_epoch=0)  # only a new life sends these
        request = replace(begun, epoch=self.state.epoch, nonce=self._nonces(), life_nonce=self._life_nonce)
        try:
            opened: Opened = yield from self._use(Open(request))
        except ServiceRestarted:
            if not self._can_revive:
                raise
            self._leave("the service restarted")
            return
        self._refusal = None  # the service repeats it
        for step in self.state.resumed(opened):
            yield from self._use(Send(self.state.to_service(step)))
        self._is_up = True

    def _begin_again_from(self, known: KnownRequests) -> Doing[None]:
        """Begin a new engine life with the requests that this session has recorded."""
        known = known.after(self.state.unanswered())
        yield from self._begin_again(known.revival(self.state.epoch))
        known.running.clear()  # the synthesized answers preempt them
        self._known = known

    def _begin_again(self, revival: Revival) -> Doing[None]:
        """Begin a new engine life and send what the engine has. A failure before the last answer repeats all of it."""
        request = revival.open_request(self._request, self._nonces(), self.state.still_busy())
        opened: Opened = yield from self._use(Open(request))
        results: list[StepResult] = []
        for step in revival.first_steps(opened, self.state.unanswered()):
            results.append((yield from self._exchange(step)))
        image, self.resume_refused = revival.resume_step(opened, results), None
        if image is not None:
            try:
                results.append((yield from self._exchange(image)))
            except (InvalidArgument, LimitExceeded) as refusal:  # safe to drop: all requests are preempted instead
                self.resume_refused = refusal
                revival = revival.without_resume()
        self.state.restarted(opened, revival, results)
        self._life_nonce = request.nonce
        self._refusal, self._is_new_life, self._is_up = None, False, True

    def _exchange(self, step: Step) -> Doing[StepResult]:
        yield from self._use(Send(step))
        answer: StepResult | KvplaneError = yield from self._use(RECEIVE)
        if isinstance(answer, StepResult):
            return answer
        raise answer

    def _leave(self, why: str) -> None:
        self._is_new_life, self._is_up, self._broken_by = True, False, Unavailable(why)


class _Sending:
    """Wraps the sending of a new step: withdraws a step that was not sent, keeps one in flight that may have been."""

    def __init__(self, machine: SessionMachine, step: Step) -> None:
        self._machine, self._step = machine, step

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        is_broken = isinstance(error, BROKEN)  # suppressed: `receive` raises it
        if isinstance(error, Exception) and not is_broken:
            self._machine.state.withdraw(self._step)
        elif error is not None:  # Ctrl-C, a cancelled task
            self._machine.interrupted()
        return is_broken
