"""The session of a blocking engine loop: steps out, answers in, in order, through broken streams."""

from __future__ import annotations

import secrets
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from types import TracebackType
from typing import TypeVar

from kvplane.base.errors import (
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
from kvplane.base.groups import ReplicaSpec
from kvplane.base.session import Opened, OpenRequest, SessionTransport
from kvplane.base.step import Part, Step, StepResult
from kvplane.retry import RetryPolicy
from kvplane.revival import Revival
from kvplane.session_state import SessionState
from kvplane.tracing import current_traceparent
from kvplane.turn import Turn

BEATS_PER_LEASE = 3
PATIENT_ATTEMPTS = 80
FATAL = (StaleEpoch, OtherWriter)  # refusals of a step that no later step can escape
_T = TypeVar("_T")


def draw_nonce() -> int:
    """A u64 that names one stream."""
    return secrets.randbits(64)


class Session:
    """One engine life on one replica.

        with kvplane.Session(transport, OpenRequest("replica", nonce)) as session:
            answer = session.apply(part)                    # one whole step, and its answer

    A step that is refused raises its KvplaneError: nothing was changed, and the next step gets the same
    number. Steps submitted behind it were not applied either and must be submitted again.

    When the stream breaks, the session opens it again and sends again what was not answered; the service
    repeats the answers of what it had applied, so nothing is applied twice. If that fails for longer than
    `retry` allows, the call raises Unavailable and the steps stay in flight: `receive` tries again.
    StaleEpoch, OtherWriter, NotFound and SequenceError end the session; every later call raises the same.

    When the service itself was started anew, a session that was given `revive` shows it the page memory and tells it
    the requests; the answers to what was in flight then say that nothing was granted and who was preempted. The epoch
    is another one from then on, the numbers of steps go on. It does the same when the service goes and another one can
    be asked, as soon as nothing is in flight.

    Parts belong to the session until they are answered: build new ones for the next step. One thread at a
    time: a call while another one is under way raises FailedPrecondition. A daemon thread keeps the lease
    while the engine is busy elsewhere.
    """

    def __init__(
        self,
        transport: SessionTransport,
        request: OpenRequest,
        *,
        retry: RetryPolicy | None = None,
        nonces: Callable[[], int] = draw_nonce,
        heartbeats: bool = True,
        revive: Callable[[], Revival] | None = None,
    ) -> None:
        """Open the session; raises KvplaneError when the service refuses it or cannot be reached.

        Args:
            transport: carries it; the session closes it.
            request: the nonce is used for the first stream, `nonces` draws those of later ones.
            retry: how to go on when the stream breaks. None: a few seconds to open, a minute when it breaks, which
                is time enough for a service to be started anew.
            nonces: draws a u64.
            heartbeats: keep the lease by a thread; off when something else calls `beat`.
            revive: tells a service that was started anew what the engine has, and what it holds in memory; called
                within `apply` or `receive`. None: such a service ends the session.
        """
        self._transport = transport
        self._request = request
        self._retry = retry or RetryPolicy()
        self._patience = retry or RetryPolicy(attempts=PATIENT_ATTEMPTS)
        self._nonces = nonces
        self._revive = revive
        self._reviving = False
        self.resume_refused: KvplaneError | None = None  # why requests lost their blocks at the last revival
        self._turn = Turn()
        self._stop = threading.Event()
        self._state = SessionState(self._open())
        if heartbeats:
            self._start_beating()

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
    def draining(self) -> bool:
        """The service will go: finish what runs, close, and open a session elsewhere. A session with `revive` does so
        itself at its next step when it knows another service.
        """
        return self._transport.draining

    @property
    def ended(self) -> KvplaneError | None:
        """Why the session is over; None while it is not."""
        return self._turn.ended

    @property
    def next_seq(self) -> int:
        """Number of the step that the next part belongs to."""
        return self._state.next_seq

    def apply(self, *parts: Part, executed_through: int | None = None) -> StepResult:
        """Send one whole step, or the last parts of one, and wait for the answer.

        Args:
            parts: applied in order.
            executed_through: all steps up to this one have finished on all ranks; None = all before this one.

        Raises:
            KvplaneError: the step is refused and nothing was changed; or see the class.
            FailedPrecondition: earlier answers are outstanding.
        """
        with self._turn:
            self._state.require_idle()
            self._submit(parts, True, executed_through)
            return self._receive()

    def submit(self, *parts: Part, last: bool = True, executed_through: int | None = None) -> int:
        """Send a step, or some parts of one, without waiting. Returns its number.

        Args:
            parts: applied in order.
            last: no more parts of this step follow.
            executed_through: as in `apply`; must be given while earlier steps are in flight.

        Raises:
            LimitExceeded: the service takes no more steps in flight; receive an answer first.
            InvalidArgument: a value that cannot be sent.
        """
        with self._turn:
            return self._submit(parts, last, executed_through)

    def receive(self) -> StepResult:
        """Wait for the next answer, in the order of `submit`.

        Raises:
            KvplaneError: that step is refused; see the class.
            FailedPrecondition: nothing is in flight.
        """
        with self._turn:
            return self._receive()

    def beat(self) -> None:
        """Keep the lease; open a broken stream again. Nothing is done during a call, which keeps it too."""
        if not self._turn.try_between_calls():
            return
        try:
            self._beat()
        finally:
            self._turn.leave()

    def close(self) -> None:
        """Leave: the service frees what the engine still holds. Idempotent."""
        self._stop.set()
        self._turn.wait()
        try:
            if self._turn.ended is None:
                self._turn.ended = FailedPrecondition("the session is closed", remedy="open a new one")
            self._transport.close()
        finally:
            self._turn.leave()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit(self, parts: tuple[Part, ...], last: bool, executed_through: int | None) -> int:
        step = self._state.register(parts, last, executed_through)
        step.traceparent = current_traceparent()
        moving = self._transport.draining and self._transport.can_move and self._revive is not None
        if self._state.keeps_back(step, moving):
            return step.seq
        try:
            self._transport.send(self._state.outward(step))
        except KvplaneError:
            self._state.withdraw(step)
            raise
        return step.seq

    def _receive(self) -> StepResult:
        self._state.require_in_flight()
        answer = self._next_answer()
        if isinstance(answer, StepResult):
            return self._state.answered(answer)
        self._drain(self._state.refused())
        if isinstance(answer, FATAL):
            self._turn.ended = answer
        raise answer

    def _next_answer(self) -> StepResult | KvplaneError:
        while True:
            try:
                made = self._state.take_made()
                if made is not None:
                    return made
                if self._state.is_quiet:
                    self._move()
                    continue
                answer = self._transport.receive()
                return self._state.inward(answer) if isinstance(answer, StepResult) else answer
            except Unavailable as error:
                self._resume(error)
            except KvplaneError as error:
                self._turn.ended = error
                raise

    def _drain(self, followers: int) -> None:
        """Take the refusals of what was submitted behind a refused step."""
        try:
            for _ in range(followers):
                answer = self._transport.receive()
                if isinstance(answer, StepResult):
                    self._turn.ended = InternalError(f"step {answer.seq} was applied though one before it was refused")
                    raise self._turn.ended
        except Unavailable:
            return  # with the stream they are gone; the next call finds it broken

    def _beat(self) -> None:
        try:
            self._transport.heartbeat()
        except Unavailable as error:
            self._try_to_resume(error)
        except KvplaneError as error:
            self._turn.ended = error  # the next call of the engine raises it

    def _try_to_resume(self, cause: Unavailable) -> None:
        try:
            self._retrying(partial(self._reopen, None), cause, self._retry)
        except KvplaneError:
            return  # the next beat or call of the engine tries again, or raises what ended the session

    def _open(self) -> Opened:
        """Begin the engine life; each attempt has a nonce of its own: the service may know the last one."""
        nonces = chain((self._request.nonce,), iter(self._nonces, None))
        requests = (replace(self._request, nonce=nonce) for nonce in nonces)
        return self._retrying(lambda: self._transport.open(next(requests)), None, self._retry)

    def _resume(self, cause: Unavailable) -> None:
        """Open the stream again and send what was not answered; raises Unavailable after the last attempt."""
        self._retrying(partial(self._reopen, self._revive), cause, self._patience)

    def _move(self) -> None:
        """Leave a service that goes, which lets another one take the replica, and go on there."""
        self._transport.close()
        self._reviving = True
        self._resume(Unavailable("the service goes, and no other one took the replica"))

    def _reopen(self, revive: Callable[[], Revival] | None) -> None:
        """Without `revive` a session that can be revived is left to the engine's next call."""
        request = replace(self._request, epoch=self._state.epoch, nonce=self._nonces(), stamp_table=())
        try:
            if not self._reviving:
                opened = self._transport.open(request)
                for step in self._state.resumed(opened):
                    self._transport.send(self._state.outward(step))
        except Unavailable:
            raise
        except KvplaneError as error:
            self._reviving = self._revive is not None and isinstance(error, ServiceRestarted)
            if not self._reviving:
                self._turn.ended = error
                raise
        if self._reviving:
            self._begin_again(revive)

    def _begin_again(self, revive: Callable[[], Revival] | None) -> None:
        """Tell a new service what the engine has. Until it has answered all of it, this is tried again."""
        if revive is None:
            raise ServiceRestarted("the service was started anew", remedy="the engine's next call goes on with it")
        revival = revive()
        try:
            opened = self._transport.open(revival.open_request(self._request, self._nonces()))
            told = [self._ask(step) for step in revival.first_steps(opened, self._state.unanswered())]
            revival = self._tell_image(revival, opened, told)
        except Unavailable:
            raise
        except KvplaneError as error:
            self._turn.ended = error
            raise
        self._state.restarted(opened, revival, told)
        self._reviving = False

    def _tell_image(self, revival: Revival, opened: Opened, told: list[StepResult]) -> Revival:
        """Let requests run on with their blocks; when that is refused they are preempted. `resume_refused` says why."""
        step, self.resume_refused = revival.resume_step(opened, told), None
        if step is None:
            return revival
        try:
            told.append(self._ask(step))
        except (InvalidArgument, LimitExceeded) as refusal:
            self.resume_refused = refusal
            return revival.without_resume()
        return revival

    def _ask(self, step: Step) -> StepResult:
        self._transport.send(step)
        answer = self._transport.receive()
        if isinstance(answer, StepResult):
            return answer
        raise answer

    def _retrying(self, act: Callable[[], _T], failed: Unavailable | None, policy: RetryPolicy) -> _T:
        """The outcome of the first attempt that is not Unavailable; `failed` is the attempt before."""
        delays = policy.delays_s()
        while True:
            if failed is not None:
                delay = next(delays, None)
                if delay is None:
                    raise failed
                policy.sleep(delay)
            try:
                return act()
            except Unavailable as error:
                failed = error

    def _start_beating(self) -> None:
        interval_s = self._state.lease_ms / 1000 / BEATS_PER_LEASE
        threading.Thread(
            target=_keep_beating,
            args=(weakref.ref(self), self._stop, interval_s),
            name=f"kvplane-lease-{self._request.replica}",
            daemon=True,
        ).start()


def _keep_beating(ref: weakref.ref[Session], stop: threading.Event, interval_s: float) -> None:
    """Beat until the session is over or forgotten: no lease outlives the engine that dropped it."""
    while not stop.wait(interval_s):
        session = ref()
        if session is None or session.ended is not None:
            return
        session.beat()
        del session
