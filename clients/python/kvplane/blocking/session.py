"""The blocking session of an engine. It sends steps and receives their results in order, and reopens a broken
stream.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import TypeVar

from kvplane.base.errors import FailedPrecondition
from kvplane.base.session import CLOSE_TIMEOUT_S, OpenRequest, SessionTransport
from kvplane.base.step import Part, StepResult
from kvplane.sansio.driver import Pause, drive
from kvplane.sansio.retry import RetryPolicy
from kvplane.session.known_requests import KnownRequests
from kvplane.session.machine import Action, Close, Doing, Heartbeat, Open, Receive, Send, Sending, SessionMachine
from kvplane.session.options import draw_nonce
from kvplane.session.reopening import Revival
from kvplane.session.view import BEATS_PER_LEASE, SessionView, aborted, looked_at

_T = TypeVar("_T")


class Session(SessionView):
    """The session of an engine with one replica, through which the engine sends steps and receives their results.

        with kvplane.Session(transport, OpenRequest("replica", nonce)) as session:
            answer = session.apply(part)                    # one whole step, and its answer

    If the service refuses a step, the call raises its KvplaneError: nothing has changed, and the next step gets the
    same number. Steps that were submitted after a refused one were not applied either and must be submitted again.

    If the stream breaks, the session reopens it and sends the unanswered steps again. The service repeats the answers
    of steps that it has applied, so no step is applied twice. If reopening fails for longer than `retry` allows, the
    call raises Unavailable; if no answer arrives within the transport's timeout, DeadlineExceeded. The steps then stay
    in flight, and the engine can

    - retry: `receive` returns the answer once there is one; - call `begin_new_life` and `receive`: these steps are
    granted nothing, and the session sends all requests to the service again; - launch with the blocks that earlier
    answers granted: see `Rank.invalidate`. After such a launch the session must begin a new epoch.

    StaleEpoch, OtherWriter, NotFound and SequenceError end the session; every later call raises the same error.

    If the service restarts, a session with a `revive` (`Client.session` always provides one) sends the new process the
    requests, and the stamps of the page memory if `revive` returns any. The answers to steps in flight then grant
    nothing and list the preempted requests. The epoch changes; step numbers continue. The same happens if the service
    drains and another service is available, as soon as nothing is in flight.

    Do not modify a part before it is answered. One thread at a time may call: a call during another call raises
    FailedPrecondition. A daemon thread keeps the lease while the engine is busy, and another one takes answers as they
    arrive.
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
        """Open the session. Raises KvplaneError if the service refuses it or cannot be reached.

        Args:
            transport: carries the messages; the session closes it.
            request: the first message; its nonce is used for the first stream, `nonces` provides those of later
                streams.
            retry: how to retry opening the stream. None: for ten seconds when the session opens first, for a minute
                when a broken stream is reopened, so that a service has time to restart.
            nonces: returns a random u64.
            heartbeats: whether a thread keeps the lease; False if the engine calls `beat` itself.
            revive: a function that returns the engine's requests and page memory for a restarted service; called within
                `apply` or `receive`. KnownRequests: the session records its requests itself. None: a restart of the
                service ends the session.
        """
        self._transport = transport
        self._machine = SessionMachine(request, retry, nonces, time.monotonic, revive)
        self._looking = looked_at(transport)
        self._revive = revive
        # Who takes the only entry of the queue uses the machine and the transport, and puts it back: a call or a
        # heartbeat. A queue, because locks are called too rarely to be in the processor's caches, and queues are not.
        self._turn: SimpleQueue[None] = SimpleQueue()
        self._turn.put(None)
        self._beating = threading.Lock()  # held by a heartbeat: briefly, or for one attempt to reopen a broken stream
        self._stop = threading.Event()
        self._pause = (retry.sleep if retry else None) or self._stop.wait
        self._carry_out(self._machine.open())
        self._state = self._machine.state
        if heartbeats:
            interval_s = self._state.lease_ms / 1000 / BEATS_PER_LEASE
            name, facts = f"kvplane-lease-{request.replica}", (weakref.ref(self), self._stop, interval_s)
            threading.Thread(target=_keep_beating, args=facts, name=name, daemon=True).start()

    @property
    def draining(self) -> bool:
        """Whether the service drains: then finish the running steps, close, and open a session at another service.

        A session with a `revive` moves by itself at its next step, if another service is available.
        """
        return self._transport.draining

    def apply(self, *parts: Part, executed_through: int | None = None) -> StepResult:
        """Send one whole step, or the last parts of a step, and wait for its result.

        Args:
            parts: applied in order.
            executed_through: number of a step; it and all earlier steps have finished on all ranks; None = all steps
                before this one have finished.

        Raises:
            KvplaneError: the step is refused and nothing was changed, or the session ended; see the class.
            FailedPrecondition: an earlier step has no answer yet.
            Unavailable: the service cannot be reached; the step is in flight, see the class.
            DeadlineExceeded: no answer arrived in time; the step is in flight, see the class.
        """
        try:
            self._turn.get_nowait()
        except Empty:
            self._begin_call()
        try:
            if self._machine.ended is not None:
                self._machine.check()
            if self._state.waiting:
                self._state.require_idle()
            self._send(parts, True, executed_through)
            return self._receive()
        finally:
            self._turn.put(None)

    def submit(self, *parts: Part, last: bool = True, executed_through: int | None = None) -> int:
        """Send a step, or some parts of a step, without waiting for the answer. Returns the step's number.

        Args:
            parts: applied in order.
            last: whether these are the last parts of the step.
            executed_through: as in `apply`; required while earlier steps are in flight.

        Raises:
            LimitExceeded: the maximum number of steps is in flight; receive an answer first.
            InvalidArgument: a value cannot be encoded.
        """
        try:
            self._turn.get_nowait()
        except Empty:
            self._begin_call()
        try:
            if self._machine.ended is not None:
                self._machine.check()
            return self._send(parts, last, executed_through)
        finally:
            self._turn.put(None)

    def receive(self) -> StepResult:
        """Wait for the next result, in the order in which the steps were submitted.

        Raises:
            KvplaneError: that step is refused; see the class.
            FailedPrecondition: no step is in flight.
            Unavailable: the service cannot be reached; the step stays in flight, see the class.
            DeadlineExceeded: no answer arrived in time; the step stays in flight, see the class.
        """
        try:
            self._turn.get_nowait()
        except Empty:
            self._begin_call()
        try:
            if self._machine.ended is not None:
                self._machine.check()
            return self._receive()
        finally:
            self._turn.put(None)

    def begin_new_life(self) -> None:
        """End this epoch and ignore the answers that are still missing. The next call
        begins a new life, as after a restart of the service.

        Raises FailedPrecondition if the session has no `revive`.
        """
        self._machine.check()
        self._machine.begin_new_life()

    def beat(self) -> None:
        """Send a heartbeat, and reopen the stream if it is broken. Does nothing while another call runs, since that
        call keeps the lease.
        """
        if self.ended is not None:
            return
        with self._beating:
            try:
                self._turn.get_nowait()
            except Empty:
                return
            try:
                self._carry_out(self._machine.beat())
            finally:
                self._turn.put(None)

    def close(self) -> None:
        """End the session, so that the service frees the blocks of its requests. A second call is harmless.

        If another thread is in a call, waits up to two seconds for it and then cancels the stream.
        """
        self._stop.set()
        try:
            self._turn.get(timeout=CLOSE_TIMEOUT_S)
        except Empty:
            self.abort()
            return
        try:
            self._carry_out(self._machine.close())
        finally:
            self._turn.put(None)

    def abort(self) -> None:
        """End the session immediately by cancelling its stream. Any thread may call `abort`; a call that runs in
        another thread raises FailedPrecondition.

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

    def _begin_call(self) -> None:
        """Take the turn; wait for a heartbeat that has it. Raises FailedPrecondition while another thread is in a
        call.
        """
        with self._beating:
            try:
                self._turn.get_nowait()
            except Empty:
                raise FailedPrecondition(
                    "another thread is using this session", remedy="open a session, and use it from one thread"
                ) from None

    def _send(self, parts: Sequence[Part], last: bool, executed_through: int | None) -> int:
        """Send a step as `SessionMachine.submit` does."""
        machine, transport = self._machine, self._transport
        moving = transport.draining and transport.can_move
        step, to_send = machine.register(parts, last, executed_through, moving)
        with Sending(machine, step):
            if to_send is not None:
                transport.send(to_send)
        return step.seq

    def _receive(self) -> StepResult:
        taken = self._machine.take_ready(self._looking.ready) if self._looking is not None else None
        return taken or self._carry_out(self._machine.receive())

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
            self._transport.heartbeat(action.waiting_requests)
        elif isinstance(action, Close):
            self._transport.close()
        elif isinstance(action, Pause):
            self._pause(action.seconds)
        else:
            assert callable(self._revive), "the machine yields Revive only with a callable revive"
            return self._revive()
        return None


def _keep_beating(ref: weakref.ref[Session], stop: threading.Event, interval_s: float) -> None:
    """Send heartbeats until the session ends or is garbage collected, so that a lost engine's lease expires."""
    while not stop.wait(interval_s):
        session = ref()
        if session is None or session.ended is not None:
            return
        session.beat()
        del session
