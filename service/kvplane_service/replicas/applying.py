"""Apply a step to the core, then publish its decision and its events.

Long work on the core runs *aside*: in a separate asyncio task, which is the only user of the replica until the work
ends. Callers on the event loop meanwhile wait (`idle`) or are refused (`check`). A step that is estimated to take long
is applied on a thread by such a task, so that the event loop serves other replicas; long look-ups and the beginning of
an engine life run aside too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from kvplane.base.errors import InternalError, KvplaneError
from kvplane.base.groups import Medium
from kvplane.base.step import Part, Step, StepResult
from kvplane_core.face.interface import ReadStep, ReplicaCore
from kvplane_service.decisions.log import Decision, DecisionLog
from kvplane_service.decisions.packing import HEAD
from kvplane_service.decisions.sent import OfParts, Record, SentResult, SentStep, answered
from kvplane_service.replicas.engine_lives import Clock, Opening
from kvplane_service.replicas.events import EventLog, PublicationHold
from kvplane_service.runtime.executors import Offload
from kvplane_service.runtime.rota import Busy

MOST_INLINE_NS = 2_000_000  # estimated; above this a step is applied on a thread

_T = TypeVar("_T")
Done = Callable[[StepResult], _T]  # called when a step was applied, before any waiting caller resumes
Check = Callable[[StepResult], None]  # called before a result is published; raises KvplaneError if it must not be

_log = logging.getLogger(__name__)


class Applying:
    """Applies the steps of one replica, and runs other long work on the replica, one piece of work at a time.

    Attributes:
        in_core: whether the core is working, or has raised an unexpected exception, which leaves its state undefined.
        changes: number of calls that may have changed the core, counted at the start of each call.
        on_lent: called with the events of the memory that peers read (the tiers, or a pool in host memory) of each part
            of a step that was applied; None = not needed.
    """

    def __init__(
        self, replica: ReplicaCore, decisions: DecisionLog, events: EventLog, hold: PublicationHold, clock: Clock
    ) -> None:
        self.in_core = False
        self.changes = 0
        self.on_lent: Callable[[OfParts], None] | None = None
        self._lends_pool = replica.spec.pool is Medium.HOST
        self._replica = replica
        # A compiled core reads messages, and packs its own decisions.
        self._reader: Callable[[bytes], ReadStep | None] | None = getattr(replica, "read_step", None)
        self._pack: Callable[[Step, bytes], bytes | None] | None = getattr(replica, "pack_applied", None)
        self._decisions = decisions
        self._events = events
        self._hold = hold
        self._clock = clock
        self._aside: asyncio.Future[Any] | None = None

    @property
    def is_aside(self) -> bool:
        """Whether long work is running."""
        return self._aside is not None

    def check(self, name: str) -> None:
        """Raise unless the state of the replica `name` may be read.

        Raises:
            Busy: long work is running.
            InternalError: the core has failed.
        """
        if self._aside is not None:
            raise Busy(f"{name} is busy with long work: a step or a look-up", field="replica", remedy="retry")
        if self.in_core:
            raise InternalError(
                f"an earlier step broke the state of {name}: it raised an unexpected exception",
                remedy="deregister and register the replica again",
            )

    async def idle(self) -> None:
        """Wait until no long work is running. No long work starts before the caller awaits something else."""
        while self._aside is not None:
            await asyncio.wait([self._aside])

    def apply(self, step: Step, check: Check | None = None) -> StepResult:
        """Apply a step; publish its decision, and those of its cache events that subscribers may see.

        Raises KvplaneError, and changes nothing, if the core refuses the step. Raises what `check` raises, with the
        step applied and nothing published.
        """
        at_ns = self._clock()
        self._enter()
        try:
            result = answered(step, self._replica.apply(step))
            return self._publish(step, result, at_ns, check)
        except KvplaneError:
            self.in_core = False
            raise

    def read(self, message: bytes, decode: Callable[[bytes], list[Part]]) -> SentStep | None:
        """Return the step of a session's message, on a core that reads messages; None on another, for a message without
        a step, and for one that cannot be read so. `decode` returns the parts of a message as objects.
        """
        found = None if self._reader is None else self._reader(message)
        return None if found is None else SentStep(found, message, decode)

    def effort(self, step: Step) -> int:
        """Estimate what the core takes to apply a step, in nanoseconds. Invalid steps are accepted too."""
        return self._replica.effort(step)

    def is_long(self, step: Step, effort_ns: int | None = None) -> bool:
        """Whether applying the step on the event loop could delay other replicas. `effort_ns`: if it is known."""
        return (self.effort(step) if effort_ns is None else effort_ns) > MOST_INLINE_NS

    async def aside(self, work: Awaitable[_T]) -> _T:
        """Run long work in a task that is the only user of the replica; returns its result. No other long work may be
        running.

        Cancelling the caller does not cancel the work. Callers that wait in `idle` resume when the work has ended.
        """
        assert self._aside is None, "one at a time"
        self._aside = task = asyncio.ensure_future(work)
        task.add_done_callback(self._back)
        return await asyncio.shield(task)

    async def apply_by(self, offload: Offload, step: Step, check: Check | None = None) -> StepResult:
        """Apply a step as `apply` does, but on a thread of `offload`. The caller must run this in `aside`.

        Raises as `apply`, and Busy if too much work waits for the thread.
        """
        at_ns = self._clock()
        self._enter()
        try:
            result = answered(step, await offload(partial(self._replica.apply_concurrently, step)))
            return self._publish(step, result, at_ns, check)
        except KvplaneError:
            self.in_core = False
            raise

    async def apply_aside(
        self, step: Step, offload: Offload, done: Done[_T], check: Check | None = None, effort_ns: int | None = None
    ) -> _T:
        """Apply a step and return `done(result)`; a long step is applied on a thread of `offload`.

        Cancelling the caller cancels neither the step nor the call of `done`. `effort_ns`: if it is known. Raises as
        `apply`, and Busy.
        """
        if not self.is_long(step, effort_ns):
            return done(self.apply(step, check))
        return await self.aside(self._apply_aside(step, offload, done, check))

    async def _apply_aside(self, step: Step, offload: Offload, done: Done[_T], check: Check | None) -> _T:
        return done(await self.apply_by(offload, step, check))

    def go_on(self, opening: Opening) -> bool:
        """Do a slice of the work of opening a session. Returns whether more work may be left."""
        self._enter()
        has_more = opening.go_on()
        self.in_core = False
        return has_more

    def replaced(self) -> None:
        """Record that the replica has taken over another state; a check that runs is dropped."""
        self.changes += 1

    def _enter(self) -> None:
        self.in_core = True
        self.changes += 1

    def _back(self, task: asyncio.Future[_T]) -> None:
        self._aside = None
        error: BaseException | None = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, KvplaneError):  # its caller may have been cancelled
            _log.error("unhandled exception in long work on a replica", exc_info=error)

    def _publish(self, step: Step, result: StepResult, at_ns: int, check: Check | None) -> StepResult:
        took_ns = self._clock() - at_ns
        packed = self._pack(step, HEAD.pack(took_ns, at_ns)) if self._pack is not None else None
        events: OfParts
        of_tiers: OfParts
        if isinstance(step, SentStep) and isinstance(result, SentResult):
            assert packed is not None, "a core packs what it has read"
            events, of_tiers = result.events, result.tier_events
            record = Record(packed, events, of_tiers)
            step.applied(record)
            result.recorded(record)
        else:  # no empty list is made part of a result
            events = tuple([vars(part).get("events", ()) for part in result.parts])
            of_tiers = tuple([vars(part).get("tier_events", ()) for part in result.parts])
        if check is not None:
            check(result)
        self.in_core = False
        self._decisions.append(Decision(step, result, events, at_ns, took_ns), packed)
        if self.on_lent is not None:
            self.on_lent(events if self._lends_pool else of_tiers)
        self._events.publish_step(self._hold, step, events, of_tiers)
        return result
