"""The state machine of a session, without I/O; the blocking and the asyncio session run it.

Each method of a session is a generator (`kvplane.sansio.driver`): it yields actions on the transport and receives their
outcomes. It does not wait and has no clock, thread or loop, so that a test can try every order of events.

    down ──open──▶ up ──────── a step is sent, an answer received, the lease kept
     ▲ ▲            │ broken, timed out, interrupted: the next call or heartbeat reopens, and resends unanswered steps
     │ └────────────┘
     └─ new life: the service restarted or drains, or the engine requests it: the next call asks the engine for its
        requests (`Revive`), opens a new epoch and sends them; steps in flight are answered with "nothing granted"

    ended: closed, aborted, or refused permanently; every call raises the reason
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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
from kvplane.base.trace import current_traceparent
from kvplane.sansio.driver import Pause, Work
from kvplane.sansio.retry import Attempts, RetryPolicy
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
    """The action to open a stream instead of the previous one. Its outcome is an Opened."""

    request: OpenRequest


@dataclass(slots=True)
class Send:
    """The action to write a step to the stream."""

    step: Step


@dataclass(slots=True)
class Receive:
    """The action to wait for the next answer. Its outcome is a StepResult, or the refusal of the step."""


RECEIVE = Receive()


@dataclass(slots=True)
class Heartbeat:
    """The action to send a heartbeat, so that the lease does not expire.

    Attributes:
        waiting_requests: as `SessionView.waiting_requests`.
    """

    waiting_requests: int | None = None


@dataclass(slots=True)
class Close:
    """The action to close the stream, so that the service frees the session's requests."""


@dataclass(slots=True)
class Revive:
    """The action to ask the engine for its requests and the stamps (version numbers) of its pages. Its outcome is a
    Revival.
    """


Action: TypeAlias = Open | Send | Receive | Heartbeat | Close | Revive | Pause
Doing: TypeAlias = Work[Action, T]


class SessionMachine:
    """The state of one session. At most one call runs at a time; any thread may call `end` at any time.

    Attributes:
        ended: why the session ended; None while it is open.
        resume_refused: why the service refused the image (the blocks of running requests, see `Resume`) when the
            session was last reopened, so that requests lost their blocks; None if it did not refuse one.
    """

    def __init__(
        self,
        request: OpenRequest,
        retry: RetryPolicy | None,
        nonces: Callable[[], int],
        clock: Callable[[], float],
        revive: Callable[[], Revival] | KnownRequests | None,
    ) -> None:
        """Start with a session that is not open. The arguments are those of kvplane.Session; `clock` returns
        seconds.
        """
        self._request = request
        self._opening, self._patience = retry or OPENING, retry or PATIENCE
        self._nonces, self._clock, self._can_revive = nonces, clock, revive is not None
        self._known = revive if isinstance(revive, KnownRequests) else None
        self._state: SessionState | None = None
        self.ended: KvplaneError | None = None
        self.resume_refused: KvplaneError | None = None
        self.waiting_requests: int | None = None
        self._is_up = False
        self.life_nonce = 0  # nonce of the stream that began this epoch
        self._broken_by: KvplaneError = Unavailable("no stream is open")
        self._is_new_life = False  # the next call begins a new epoch
        self._is_silent = False  # a deadline passed, and no stream was opened since: each call tries once
        self._refusal: KvplaneError | None = None  # of the oldest step, until those of the steps behind it are received

    @property
    def state(self) -> SessionState:
        """The step numbers and the service's first answer. Raises FailedPrecondition until `open` has returned."""
        if self._state is None:
            raise FailedPrecondition(
                "the session is not open yet", remedy="call open first and wait until it has returned"
            )
        return self._state

    def check(self) -> None:
        """If the session has ended, raise the error with which it ended."""
        if self.ended is not None:
            raise self.ended.with_traceback(None)

    def end(self, reason: KvplaneError) -> None:
        """End the session; later calls raise `reason`. Any thread may call it; a running call ends at its
        next action.
        """
        if self.ended is None:
            self.ended = reason

    def begin_new_life(self) -> None:
        """End the current epoch, so that the next call begins a new epoch.

        Raises FailedPrecondition if the session has no `revive`.
        """
        if not self._can_revive:
            raise FailedPrecondition(
                "the session has no revive, which returns the engine's requests for a new epoch",
                remedy="close the session, and open another one",
            )
        self._leave("the engine begins a new life")

    def open(self) -> Doing[None]:
        """Open the session and begin an epoch. Each attempt has a new nonce, since the service may have
        received the previous attempt's nonce.
        """
        attempts, request = Attempts(self._opening, self._clock), self._request
        while True:
            try:
                opened: Opened = yield from self._use(Open(request))
            except BROKEN as error:
                yield Pause(attempts.pause_s(error))
                request = replace(request, nonce=self._nonces())
            else:
                self._state, self._is_up = SessionState(opened), True
                self.life_nonce = request.nonce if request.epoch == NEW_EPOCH else request.life_nonce
                return

    def apply(self, parts: Sequence[Part], executed_through: int | None, moving: bool) -> Doing[StepResult]:
        """Send a step and receive its result."""
        self.state.require_idle()
        yield from self.submit(parts, True, executed_through, moving)
        return (yield from self.receive())

    def submit(self, parts: Sequence[Part], last: bool, executed_through: int | None, moving: bool) -> Doing[int]:
        """Send a step, or some parts of a step, and return the step's number.

        With `moving` (the service drains and another service is available), the session does not send a new step but
        keeps it for that other service.
        """
        step, to_send = self.register(parts, last, executed_through, moving)
        with Sending(self, step):
            if to_send is not None:
                yield Send(to_send)
        return step.seq

    def register(
        self, parts: Sequence[Part], last: bool, executed_through: int | None, moving: bool
    ) -> tuple[Step, Step | None]:
        """Return the next step, and that step with the service's number, or None if it is kept for another service. The
        caller sends it within `Sending`.
        """
        state = self._state or self.state
        step = state.register(parts, last, executed_through)
        step.traceparent = current_traceparent()
        holds = (moving or state.num_unsent > 0) and state.holds_back(step, moving and self._can_revive)
        if holds or self._is_new_life:
            return step, None
        return step, state.numbers.to_service(step) if state.numbers.has_restarted else step

    def sending_failed(self, step: Step, error: BaseException) -> None:
        """Withdraw a step if it was certainly not sent; otherwise it stays in flight."""
        if isinstance(error, Exception):
            self.state.withdraw(step)
        else:  # Ctrl-C, a cancelled task
            self.interrupted()

    def take_ready(self, ready: Callable[[], StepResult | None]) -> StepResult | None:
        """Return the next result if the stream is in order and `ready` has it; None otherwise: then call `receive`."""
        state = self._state
        if not self._is_up or self._refusal is not None or state is None or state.synthesized:
            return None
        if len(state.waiting) <= state.num_unsent:
            return None  # no step awaits the service
        self._is_up = False  # an interrupted call may lose an answer
        answer = ready()
        self._is_up = True
        return None if answer is None else self._take(answer)

    def receive(self) -> Doing[StepResult]:
        """Receive the next result. After Unavailable or DeadlineExceeded the step stays in flight."""
        self.state.require_in_flight()
        attempts: Attempts | None = None
        while True:
            made = self.state.take_synthesized()
            if made is not None:
                self.state.answered(made)
                return made
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
        """Send a heartbeat, or try once to reopen a broken stream. Raises no KvplaneError."""
        with suppress(KvplaneError):
            with suppress(*BROKEN):
                if self._is_up:
                    yield from self._ending(self._use(Heartbeat(self.waiting_requests)))
            if not (self._is_up or self._is_new_life):
                yield from self._ending(self._reopen())

    def close(self) -> Doing[None]:
        """End the session and close its stream."""
        self.end(FailedPrecondition("the session is closed", remedy="open a new one"))
        yield from self._use(Close())

    def interrupted(self) -> None:
        """Record that a call was interrupted. The state of the stream is unknown, so the next call reopens it."""
        self._is_up = False

    def _use(self, action: Action) -> Doing[T]:
        """Carry out one action on the stream. If the action fails, the stream counts as broken.

        After the session's end only `Close` is carried out; any other action raises the error with which the session
        ended.
        """
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
        """Run a part of a call. Every error except that of a broken stream ends the session."""
        try:
            return (yield from work)
        except BROKEN:
            raise
        except KvplaneError as error:
            self.end(error)
            raise

    def _take(self, answer: StepResult) -> StepResult:
        state = self._state
        assert state is not None, "steps are sent when the session is open"
        try:
            result = state.numbers.to_engine(answer) if state.numbers.has_restarted else answer
            step = state.answered(result)
        except InternalError as error:
            self.end(error)
            raise
        if self._known is not None:
            self._known.note(step, result)
        return result

    def _refuse(self) -> Doing[None]:
        """Raise the refusal of the oldest step in flight, after receiving the refusals of all steps after it."""
        assert self._refusal is not None
        with suppress(*BROKEN):
            for _ in range(self.state.followers * self._is_up):
                answer: StepResult | KvplaneError = yield from self._ending(self._use(RECEIVE))
                if isinstance(answer, StepResult):
                    self.end(
                        InternalError(
                            f"the service applied step {answer.seq} although it refused a step before it",
                            remedy="open a new session, and report this bug",
                        )
                    )
                    self.check()
        refusal, self._refusal = self._refusal, None
        self.state.refused()
        if isinstance(refusal, FATAL):
            self.end(refusal)
        raise refusal

    def _resume(self, attempts: Attempts) -> Doing[None]:
        """Open a stream again, in this epoch or in a new one. Raises Unavailable when
        no attempt is left.
        """
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
        """Continue this epoch: open a stream and send the unanswered steps again."""
        begun = replace(self._request, stamp_table=(), busy_blocks=(), owner_epoch=0)  # only a new life sends these
        request = replace(begun, epoch=self.state.epoch, nonce=self._nonces(), life_nonce=self.life_nonce)
        try:
            opened: Opened = yield from self._use(Open(request))
        except ServiceRestarted:
            if not self._can_revive:
                raise
            self._leave("the service restarted")
            return
        self._refusal = None  # the service repeats it
        for step in self.state.resumed(opened):
            yield from self._use(Send(self.state.numbers.to_service(step)))
        self._is_up = True

    def _begin_again_from(self, known: KnownRequests) -> Doing[None]:
        """Begin a new epoch with the requests that this session has recorded."""
        known = known.after(self.state.unanswered())
        yield from self._begin_again(known.revival(self.state.epoch, self.state.spec.hash_block_size))
        known.running.clear()  # the synthesized answers preempt them
        self._known = known

    def _begin_again(self, revival: Revival) -> Doing[None]:
        """Begin a new epoch and send the engine's requests. After a failure, the next attempt sends all
        requests again.
        """
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
        self.life_nonce = request.nonce
        self._refusal, self._is_new_life, self._is_up = None, False, True

    def _exchange(self, step: Step) -> Doing[StepResult]:
        yield from self._use(Send(step))
        answer: StepResult | KvplaneError = yield from self._use(RECEIVE)
        if isinstance(answer, StepResult):
            return answer
        raise answer

    def _leave(self, why: str) -> None:
        self._is_new_life, self._is_up, self._broken_by = True, False, Unavailable(why)


class Sending:
    """While a registered step is sent: an error of a broken stream is left to the next `receive`, since the step is in
    flight; the machine learns of any other.
    """

    __slots__ = ("_machine", "_step")

    def __init__(self, machine: SessionMachine, step: Step) -> None:
        self._machine, self._step = machine, step

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if error is None or isinstance(error, BROKEN):
            return True
        self._machine.sending_failed(self._step, error)
        return False
