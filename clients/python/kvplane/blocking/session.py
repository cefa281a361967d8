"""The session of a blocking engine loop: steps out, answers in, in order, over one stream after another."""

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

    A refused step raises its KvplaneError: nothing was changed, and the next step gets the same number. Steps
    submitted after it were not applied either and must be submitted again.

    When the stream breaks, the session reopens it and resends the unanswered steps. The service repeats the answers of
    steps that it has applied, so no step is applied twice. If reopening fails for longer than `retry` allows, the call
    raises Unavailable; if no answer arrives within the transport's timeout, DeadlineExceeded. The steps then stay in
    flight, and the engine can

    - retry: `receive` returns the answer once there is one;
    - call `begin_new_life` and `receive`: nothing is granted, and the requests are sent to the service again;
    - launch with the blocks granted so far, without an answer: see `Rank`. The session must begin a new life after it.

    StaleEpoch, OtherWriter, NotFound and SequenceError end the session; every later call raises the same error.

    When the service restarts, a session with a `revive` (`Client.session` always provides one) sends it the requests,
    and the stamps of the page memory if there are any. The answers to steps in flight then grant nothing and list the
    preempted requests. The epoch changes; step numbers continue. The same happens when the service drains and another
    service is available, as soon as nothing is in flight.

    Do not modify a part before it is answered. One thread at a time may call: a call during another call raises
    FailedPrecondition. A daemon thread keeps the lease while the engine is busy.
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
            transport: carries the session, which closes it.
            request: its nonce is used for the first stream; `nonces` draws those of later streams.
            retry: how to reopen a broken stream. None: for ten seconds when the session opens, for a minute later,
                so that a service has time to restart.
            nonces: draws a random u64.
            heartbeats: keep the lease by a thread; False when the engine calls `beat` itself.
            revive: returns the engine's requests and memory for a restarted service; called within `apply` or
                `receive`. KnownRequests: the session records its requests itself. None: a restart of the service ends
                the session.
        """
        self._transport = transport
        self._machine = SessionMachine(request, retry, nonces, time.monotonic, revive)
        self._revive = revive
        self._caller = threading.Lock()  # held by a call of the engine
        self._link = threading.Lock()  # held while the transport is used, by a call or a heartbeat
        self._stop = threading.Event()
        self._pause = (retry.sleep if retry else None) or self._stop.wait
        self._carry_out(self._machine.open())
        if heartbeats:
            interval_s = self._machine.state.lease_ms / 1000 / BEATS_PER_LEASE
            name, facts = f"kvplane-lease-{request.replica}", (weakref.ref(self), self._stop, interval_s)
            threading.Thread(target=_keep_beating, args=facts, name=name, daemon=True).start()

    @property
    def draining(self) -> bool:
        """Whether the service drains: finish running steps, close, and open a session at another service. A session
        with a `revive` moves by itself at its next step when another service is available.
        """
        return self._transport.draining

    def apply(self, *parts: Part, executed_through: int | None = None) -> StepResult:
        """Send one whole step, or the last parts of one, and wait for the answer.

        Args:
            parts: applied in order.
            executed_through: all steps up to this one have finished on all ranks; None = all earlier steps.

        Raises:
            KvplaneError: the step is refused and nothing was changed; or see the class.
            FailedPrecondition: an earlier step is unanswered.
            Unavailable, DeadlineExceeded: the step is in flight, see the class.
        """
        return self._call(self._machine.apply(parts, executed_through, self._moving))

    def submit(self, *parts: Part, last: bool = True, executed_through: int | None = None) -> int:
        """Send a step, or some parts of one, without waiting. Returns its number.

        Args:
            parts: applied in order.
            last: whether these are the last parts of the step.
            executed_through: as in `apply`; required while earlier steps are in flight.

        Raises:
            LimitExceeded: the maximum number of steps is in flight; receive an answer first.
            InvalidArgument: a value that cannot be encoded.
        """
        return self._call(self._machine.submit(parts, last, executed_through, self._moving))

    def receive(self) -> StepResult:
        """Wait for the next answer, in the order of `submit`.

        Raises:
            KvplaneError: that step is refused; see the class.
            FailedPrecondition: no step is in flight.
            Unavailable, DeadlineExceeded: the step stays in flight, see the class.
        """
        return self._call(self._machine.receive())

    def begin_new_life(self) -> None:
        """Abandon this engine life and its answers: the next call begins a new one, as after a restart.

        Raises FailedPrecondition when the session has no `revive`.
        """
        self._machine.check()
        self._machine.begin_new_life()

    def beat(self) -> None:
        """Keep the lease; reopen a broken stream. Does nothing during a call, which keeps the lease itself."""
        if self.ended is None and self._link.acquire(blocking=False):
            try:
                self._carry_out(self._machine.beat())
            finally:
                self._link.release()

    def close(self) -> None:
        """End the session: the service frees the blocks of its requests. Idempotent.

        Waits up to two seconds for a call in another thread, then aborts it.
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
        """End the session immediately, from any thread; a call under way raises FailedPrecondition.

        The service is not notified: it treats the engine as lost and keeps the blocks of its requests until the next
        session opens.
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
        """Run one call of the engine."""
        if not self._caller.acquire(blocking=False):
            raise FailedPrecondition(
                "another thread is using this session", remedy="open a session, and use it from one thread"
            )
        try:
            with self._link:  # a heartbeat holds it briefly, or for one attempt to reopen a broken stream
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
            assert callable(self._revive), "the machine yields Revive only with a callable revive"
            return self._revive()
        return None


def _keep_beating(ref: weakref.ref[Session], stop: threading.Event, interval_s: float) -> None:
    """Send heartbeats until the session ends or is garbage collected, so that no lease outlives its engine."""
    while not stop.wait(interval_s):
        session = ref()
        if session is None or session.ended is not None:
            return
        session.beat()
        del session
