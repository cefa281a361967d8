"""The session of a blocking engine loop: steps out, answers in, in order, through broken streams."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from kvplane.base.errors import FailedPrecondition
from kvplane.base.session import CLOSE_TIMEOUT_S, OpenRequest, SessionTransport
from kvplane.base.step import Part, StepResult
from kvplane.sansio.driver import Pause, drive
from kvplane.sansio.retry import RetryPolicy
from kvplane.session.known_requests import KnownRequests
from kvplane.session.machine import Action, Close, Doing, Heartbeat, Open, Receive, Send, SessionMachine
from kvplane.session.options import draw_nonce
from kvplane.session.reopening import Revival
from kvplane.session.view import BEATS_PER_LEASE, SessionView, aborted

_T = TypeVar("_T")


class Session(SessionView):
    """One engine life on one replica.

        with kvplane.Session(transport, OpenRequest("replica", nonce)) as session:
            answer = session.apply(part)                    # one whole step, and its answer

    A step that is refused raises its KvplaneError: nothing was changed, and the next step gets the same
    number. Steps submitted behind it were not applied either and must be submitted again.

    When the stream breaks, the session opens it again and sends again what was not answered; the service
    repeats the answers of what it had applied, so nothing is applied twice. If that fails for longer than
    `retry` allows, the call raises Unavailable; when no answer comes in the transport's time, DeadlineExceeded. The
    steps stay in flight then, and the engine has the choice:

    - try again: `receive` gets the answer when there is one;
    - `begin_new_life`, and `receive`: nothing was granted, and what runs is told to the service again;
    - launch without an answer what it had been granted before: see `Rank`; the session must begin a new life after it.

    StaleEpoch, OtherWriter, NotFound and SequenceError end the session; every later call raises the same.

    When the service itself was started anew, a session with a `revive` (`Client.session` always gives one) tells it
    the requests, and shows it the page memory where there are stamps; the answers to what was in flight then say that
    nothing was granted and who was preempted. The epoch is another one from then on, the numbers of steps go on. It
    does the same when the service goes and another one can be asked, as soon as nothing is in flight.

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
        revive: Callable[[], Revival] | KnownRequests | None = None,
    ) -> None:
        """Open the session; raises KvplaneError when the service refuses it or cannot be reached.

        Args:
            transport: carries it; the session closes it.
            request: the nonce is used for the first stream, `nonces` draws those of later ones.
            retry: how to go on when the stream breaks. None: ten seconds to open, a minute when it breaks, which
                is time enough for a service to be started anew.
            nonces: draws a u64.
            heartbeats: keep the lease by a thread; off when something else calls `beat`.
            revive: tells a service that was started anew what the engine has, and what it holds in memory; called
                within `apply` or `receive`. KnownRequests: what this session has seen of it. None: such a service ends
                the session.
        """
        self._transport = transport
        self._machine = SessionMachine(request, retry, nonces, time.monotonic, revive)
        self._revive = revive
        self._caller, self._link = (
            threading.Lock(),
            threading.Lock(),
        )  # the second is held by calls and by the heartbeat
        self._stop = threading.Event()
        self._pause = (retry.sleep if retry else None) or self._stop.wait
        self._carry_out(self._machine.open())
        if heartbeats:
            interval_s = self._machine.state.lease_ms / 1000 / BEATS_PER_LEASE
            name, facts = f"kvplane-lease-{request.replica}", (weakref.ref(self), self._stop, interval_s)
            threading.Thread(target=_keep_beating, args=facts, name=name, daemon=True).start()

    @property
    def draining(self) -> bool:
        """The service will go: finish what runs, close, and open a session elsewhere. A session with `revive` does so
        itself at its next step when it knows another service.
        """
        return self._transport.draining

    def apply(self, *parts: Part, executed_through: int | None = None) -> StepResult:
        """Send one whole step, or the last parts of one, and wait for the answer.

        Args:
            parts: applied in order.
            executed_through: all steps up to this one have finished on all ranks; None = all before this one.

        Raises:
            KvplaneError: the step is refused and nothing was changed; or see the class.
            FailedPrecondition: earlier answers are outstanding.
            Unavailable, DeadlineExceeded: the step is in flight, see the class.
        """
        return self._call(self._machine.apply(parts, executed_through, self._moving))

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
        return self._call(self._machine.submit(parts, last, executed_through, self._moving))

    def receive(self) -> StepResult:
        """Wait for the next answer, in the order of `submit`.

        Raises:
            KvplaneError: that step is refused; see the class.
            FailedPrecondition: nothing is in flight.
            Unavailable, DeadlineExceeded: the step stays in flight, see the class.
        """
        return self._call(self._machine.receive())

    def begin_new_life(self) -> None:
        """Take no further answer of this engine life: the next call begins another one, as after a restart.

        Raises FailedPrecondition when the session has no `revive`.
        """
        self._machine.check()
        self._machine.begin_new_life()

    def beat(self) -> None:
        """Keep the lease; open a broken stream again. Nothing is done during a call, which keeps it too."""
        if self.ended is None and self._link.acquire(blocking=False):
            try:
                self._carry_out(self._machine.beat())
            finally:
                self._link.release()

    def close(self) -> None:
        """Leave: the service frees what the engine still holds. Idempotent.

        Waits two seconds at most for a call that another thread has under way; that call is aborted then.
        """
        self._stop.set()
        if not self._link.acquire(timeout=CLOSE_TIMEOUT_S):
            self.abort()
            return
        try:
            self._carry_out(self._machine.close())
        finally:
            self._link.release()

    def abort(self) -> None:
        """End the session at once, from any thread; a call under way raises FailedPrecondition.

        The service is not told: to it the engine is gone, and its requests' blocks stay until the next session opens.
        """
        self._machine.end(aborted())
        self._stop.set()
        self._transport.abort()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _moving(self) -> bool:
        return self._transport.draining and self._transport.can_move

    def _call(self, work: Doing[_T]) -> _T:
        """Carry out one call of the engine."""
        if not self._caller.acquire(blocking=False):
            raise FailedPrecondition(
                "another thread is using this session", remedy="open a session, and use it from one thread"
            )
        try:
            with self._link:  # the heartbeat holds it for a moment, or while it tries once to open a broken stream
                self._machine.check()
                return self._carry_out(work)
        finally:
            self._caller.release()

    def _carry_out(self, work: Doing[_T]) -> _T:
        return drive(work, self._act)

    def _act(self, action: Action) -> object:
        if isinstance(action, Receive):
            return self._transport.receive()
        if isinstance(action, Send):
            self._transport.send(action.step)
        elif isinstance(action, Open):
            return self._transport.open(action.request)
        elif isinstance(action, Heartbeat):
            self._transport.heartbeat()
        elif isinstance(action, Close):
            self._transport.close()
        elif isinstance(action, Pause):
            self._pause(action.seconds)
        else:
            assert callable(self._revive), "the machine knows whether it is one"
            return self._revive()
        return None


def _keep_beating(ref: weakref.ref[Session], stop: threading.Event, interval_s: float) -> None:
    """Beat until the session is over or forgotten: no lease outlives the engine that dropped it."""
    while not stop.wait(interval_s):
        session = ref()
        if session is None or session.ended is not None:
            return
        session.beat()
        del session
