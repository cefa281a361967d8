"""From a step that may be applied to what everyone sees of it: core, decision log, events.

A long step is applied beside the event loop, so that other replicas' steps go on. Meanwhile a thread has the core's
state and nobody on the loop may touch it: who can wait does (`settled`), everyone else is refused (`check`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from kvplane.base.errors import InternalError, KvplaneError
from kvplane.base.step import Step, StepResult
from kvplane_service.core.cache_events import runs_of
from kvplane_service.core.replica import Replica
from kvplane_service.decisions.log import Decision, DecisionLog, without_tokens
from kvplane_service.replicas.effort import MOST_INLINE, effort
from kvplane_service.replicas.engine_lives import Clock
from kvplane_service.replicas.events import EventLog, PublicationHold
from kvplane_service.runtime.executors import Busy, Offload

_T = TypeVar("_T")
Done = Callable[[StepResult], _T]  # called when a step was applied, before anyone else is

_log = logging.getLogger(__name__)


class Applying:
    """Applies the steps of one replica, one at a time.

    Attributes:
        in_core: the core works, or failed otherwise than by a refusal: its state is unknown from then on.
    """

    def __init__(
        self, replica: Replica, decisions: DecisionLog, events: EventLog, hold: PublicationHold, clock: Clock
    ) -> None:
        self.in_core = False
        self._replica = replica
        self._decisions = decisions
        self._events = events
        self._hold = hold
        self._clock = clock
        self._aside: asyncio.Task[Any] | None = None

    @property
    def is_aside(self) -> bool:
        """Whether a step is being applied beside the event loop."""
        return self._aside is not None

    def check(self, name: str) -> None:
        """Raise what keeps everyone from the state of the replica of this name.

        Raises:
            Busy: a step is being applied.
            InternalError: the core has failed.
        """
        if self._aside is not None:
            raise Busy(f"{name} applies a long step", field="replica", remedy="try again in a moment")
        if self.in_core:
            raise InternalError(f"{name} broke in an earlier step", remedy="deregister it and register it anew")

    async def settled(self) -> None:
        """Wait until no step is being applied; none will be before the caller awaits something else."""
        while self._aside is not None:
            await asyncio.wait([self._aside])

    def apply(self, step: Step) -> StepResult:
        """Let the core apply a step and publish what may be seen. Raises KvplaneError: refused, nothing changed."""
        at_ns = self._clock()
        self.in_core = True
        try:
            result = self._replica.apply(step)
        except KvplaneError:
            self.in_core = False
            raise
        return self._publish(step, result, at_ns)

    async def apply_aside(self, step: Step, offload: Offload, done: Done[_T]) -> _T:
        """As `apply` and then `done`; a long step is applied by `offload`.

        When this is cancelled both are done all the same. Raises as `apply`, and Busy.
        """
        if effort(step, self._replica) <= MOST_INLINE:
            return done(self.apply(step))
        assert self._aside is None, "one step at a time"
        self._aside = task = asyncio.ensure_future(self._apply_aside(step, offload, done))
        task.add_done_callback(self._back)
        return await asyncio.shield(task)

    async def _apply_aside(self, step: Step, offload: Offload, done: Done[_T]) -> _T:
        at_ns = self._clock()
        self.in_core = True
        try:
            result = await offload(partial(self._replica.apply, step))
        except KvplaneError:
            self.in_core = False
            raise
        return done(self._publish(step, result, at_ns))

    def _back(self, task: asyncio.Task[_T]) -> None:
        self._aside = None
        error: BaseException | None = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, KvplaneError):  # its caller may be gone
            _log.error("a long step broke its replica", exc_info=error)

    def _publish(self, step: Step, result: StepResult, at_ns: int) -> StepResult:
        self.in_core = False
        events = tuple([part.events for part in result.parts])
        self._decisions.append(Decision(without_tokens(step), result, events, at_ns, self._clock() - at_ns))
        runs = [run for of_part in events for run in runs_of(of_part)]
        self._events.publish(step.epoch, self._hold.step(step.seq, step.executed_through, runs))
        return result


