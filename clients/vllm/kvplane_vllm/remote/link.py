"""The connection of an engine to the service that decides: a session, opened again when it is lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

from kvplane.base.errors import (
    DeadlineExceeded,
    InternalError,
    KvplaneError,
    LimitExceeded,
    Moved,
    NotFound,
    PermissionDenied,
    ServiceRestarted,
    Unauthenticated,
    Unavailable,
)
from kvplane.base.groups import ReplicaSpec
from kvplane.base.step import Orders, Part, StepResult
from kvplane.blocking.client import connect
from kvplane.blocking.registering import EngineInfo, register_engine
from kvplane.blocking.session import Session
from kvplane.sansio.owners import Addresses
from kvplane.sansio.retry import RetryPolicy
from kvplane_vllm.remote.settings import Settings

logger = logging.getLogger("vllm.kvplane")  # with the handlers of vLLM

AWAY = (Unavailable, DeadlineExceeded)
MOVES = "the running requests are computed again in a new session"
# The service has nothing of this session. A new one is opened when the service accepts it.
GONE = (ServiceRestarted, NotFound, Moved)
# What can be fixed outside of the engine, such as an expired token or a limit of its owner. Each new session computes
# the running requests again, and may be refused again: the pause before it doubles. All other errors are faults of the
# engine, which a new session would only repeat.
REFUSED = (Unauthenticated, PermissionDenied, LimitExceeded, InternalError)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
NAP_S = 0.05


class Away(Exception):
    """The service does not answer now, or opens no session."""


class Lost(Exception):
    """The session ended: the service knows no request of this engine any more."""


class Memory(Protocol):
    """Page memory that outlives the engine, and with it the keys that its stamps prove."""

    def terms(self) -> dict[str, Any]:
        """Return the options with which a session begins a new engine life on this memory."""

    def own(self, epoch: int) -> None:
        """Make the engine life of this epoch the only one whose orders the ranks accept."""

    def write_stamps(self, orders: Orders) -> None:
        """Write the stamps of orders before the ranks do."""

    def invalidate(self) -> None:
        """Let the stamps prove no key any more."""


class Link:
    """A session with one replica.

    Attributes:
        life: number of sessions opened so far; step numbers belong to one of them.
        answered: number of the last step that was answered in this life.
        num_messages: steps sent.
        waited_s: how long the engine's thread waited for answers.
        epoch, kept_keys: of the session opened last; how many keys of earlier engine lives are still valid.
    """

    def __init__(
        self,
        settings: Settings,
        spec: ReplicaSpec,
        memory: Memory | None = None,
        *,
        with_events: bool = False,
        say: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Register the replica and open a session. Raises KvplaneError if the service cannot be reached or refuses.

        Args:
            settings: which service, and how it is asked.
            spec: the settings of the replica.
            memory: of the pages; None: they end with this process, and prove nothing to a new engine life.
            with_events: whether answers contain cache events.
            say: called with the reason why nothing is scheduled, whenever it changes; "" if there is none.
        """
        self._memory, self._with_events, self._say = memory, with_events, say
        self._settings, self._spec = settings, spec
        self._has_others = len(Addresses(settings.target.address).services) > 1
        retry = RetryPolicy(attempts=None, within_s=settings.step_timeout_s)
        address, access = settings.target.address, settings.target.access
        options = {"timeout_s": settings.step_timeout_s, "retry": retry}
        self._client = connect(address, tls=access.tls, token=access.token, **options)  # type: ignore[arg-type]
        self._session: Session | None = None
        self.life = self.answered = self.num_messages = 0
        self.waited_s = 0.0
        self._away_by = ""  # the reason of the error that was logged last
        self._pause_s, self._opened_s, self._not_before_s = 0.0, 0.0, 0.0
        self._thread = ThreadPoolExecutor(1, f"kvplane-{settings.target.replica}")
        self._ahead: Future[StepResult] | None = None
        self._opening: Future[Session] | None = None
        self._begin(self._open())

    @property
    def in_flight(self) -> bool:
        """Whether a step that was sent has no answer yet."""
        return self._ahead is not None or (self._session is not None and self._session.in_flight > 0)

    @property
    def is_open(self) -> bool:
        """Whether there is a session."""
        return self._session is not None

    @property
    def max_rows(self) -> int:
        """The most rows of a step that the service accepts."""
        assert self._session is not None, "the first session was opened"
        return self._session.max_rows

    @property
    def max_steps(self) -> int:
        """The most steps that may be sent and not executed."""
        assert self._session is not None, "a step is going to be sent"
        return self._session.max_steps_in_flight

    def reopen(self, within_s: float | None = None) -> None:
        """Open a session, if there is none. Raises Away; or Lost, if the service drains and another one is available.

        No step may be in flight. `within_s`: how long to wait; a later call continues.
        """
        if self._session is not None and self._session.draining and self._has_others:
            logger.warning("the service drains: %s", MOVES)
            self._session.close()
            self._session = None
            raise Lost
        if self._session is None:
            if self._opening is None:
                if (left_s := self._not_before_s - time.monotonic()) > 0:
                    if within_s is None:
                        time.sleep(min(left_s, NAP_S))  # vLLM asks again at once
                    raise Away
                self._opening = self._thread.submit(self._open)
            opening, self._opening = self._opening, None
            try:
                self._begin(opening.result(within_s))
            except TimeoutError as error:
                self._opening = opening
                raise Away from error
            except KvplaneError as error:  # whatever it is, requests that run may not end for it
                raise self._away(error) from error

    def send(self, parts: Sequence[Part], executed: int) -> None:
        """Send a step, on another thread, which also waits for its answer. `receive` raises its errors."""
        assert self._session is not None, "the session is opened before a step is sent"
        self.num_messages += 1
        self._ahead = self._thread.submit(_exchange, self._session, parts, executed)

    def receive(self, within_s: float | None = None) -> StepResult:
        """Wait for the answer of the step in flight. Raises Away, after which the step is still in flight, or Lost.

        `within_s`: how long to wait at most, if that is shorter than the step timeout.
        """
        session, ahead, self._ahead = self._session, self._ahead, None
        assert session is not None, "a step is in flight"
        if ahead is None and within_s is not None:
            ahead = self._thread.submit(session.receive)
        try:
            return self._answer_of(session.receive if ahead is None else partial(ahead.result, within_s))
        except TimeoutError as error:
            self._ahead = ahead
            raise Away from error

    def exchange(self, parts: Sequence[Part], executed: int, within_s: float | None = None) -> StepResult:
        """Send a step and wait for its answer, as `send` and `receive`."""
        if within_s is not None:
            self.send(parts, executed)
            return self.receive(within_s)
        assert self._session is not None, "the session is opened before a step is sent"
        self.num_messages += 1
        return self._answer_of(partial(_exchange, self._session, parts, executed))

    def _answer_of(self, wait: Callable[[], StepResult]) -> StepResult:
        begin = time.monotonic()
        try:
            result = wait()
        except AWAY as error:
            raise self._away(error) from error
        except (*GONE, *REFUSED) as error:
            raise self._lost(error) from error
        finally:
            self.waited_s += time.monotonic() - begin
        return self._answered(result)

    def _answered(self, result: StepResult) -> StepResult:
        if self._away_by:
            self._away_by = ""
            self._say("")
            logger.info("the service answers again")
        self.answered = result.seq
        return result

    def report_waiting(self, count: int) -> None:
        """Report how many requests wait for admission."""
        if self._session is not None:
            self._session.waiting_requests = count

    def write_stamps(self, orders: Orders) -> None:
        """Write the stamps of orders into the page memory, if it outlives the engine."""
        if self._memory is not None:
            self._memory.write_stamps(orders)

    def abandon(self) -> None:
        """End the session without waiting, and let its keys not be known to the next one: its pages prove nothing."""
        self._ahead = None
        if self._session is not None:
            self._session.abort()
            self._session = None
        if self._memory is not None:
            self._memory.invalidate()

    def close(self) -> None:
        """End the session."""
        self._say("")
        self._thread.shutdown(wait=False)
        if self._session is not None:
            self._session.close()
        self._client.close()

    def _open(self) -> Session:
        """Register the replica and open a session; called on the thread too. Changes nothing."""
        name, wait_s = self._settings.target.replica, self._settings.step_timeout_s
        register_engine(self._client, name, self._spec, EngineInfo(self._settings.target.model_name))
        retry = RetryPolicy(attempts=None, within_s=wait_s)
        options = {"step_timeout_s": wait_s, "open_timeout_s": wait_s, "retry": retry}
        if self._memory is not None:
            options |= self._memory.terms()
        return self._client.session(
            name,
            with_events=self._with_events,
            client="vllm",
            session_socket=self._settings.session_socket,
            remember=False,  # the requests are sent again from vLLM's queues
            **options,  # type: ignore[arg-type]
        )

    def _begin(self, session: Session) -> None:
        self._session, self._opened_s = session, time.monotonic()
        self.epoch, self.kept_keys = self._session.epoch, self._session.kept_keys
        if self._memory is not None:
            self._memory.own(self.epoch)
            logger.info("epoch %d: %d keys kept", self.epoch, self.kept_keys)
        self.life += 1
        self.answered = self._session.next_seq - 1

    def _away(self, error: KvplaneError) -> Away:
        if self._away_by != error.reason:
            logger.warning("nothing is scheduled until the service accepts a step: %s", error)
        self._away_by = error.reason
        self._explain(error)
        return Away()

    def _explain(self, error: KvplaneError) -> None:
        self._say(f"kvplane's service {self._settings.target.address} accepts no step: {error}")

    def _lost(self, error: KvplaneError) -> Lost:
        assert self._session is not None, "it ended now"
        now = time.monotonic()
        if isinstance(error, REFUSED):
            lasted = now - self._opened_s > LONGEST_PAUSE_S
            self._pause_s = FIRST_PAUSE_S if lasted else min(max(FIRST_PAUSE_S, 2 * self._pause_s), LONGEST_PAUSE_S)
            self._not_before_s = now + self._pause_s
            logger.error("the service refuses a step; %s, in %.0f s: %s", MOVES, self._pause_s, error)
        else:
            logger.warning("the session ended: %s; %s", error.message, MOVES)
        self._away_by = error.reason
        self._explain(error)
        self._session.abort()
        self._session = None
        return Lost()


def _exchange(session: Session, parts: Sequence[Part], executed: int) -> StepResult:
    session.submit(*parts, executed_through=executed)
    return session.receive()
