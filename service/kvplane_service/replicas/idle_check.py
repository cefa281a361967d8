"""Checks the state of idle replicas, so that a fault of the allocator is seen in production before it does damage.

A replica is idle while its core does not change: no step is applied, and no engine life begins. It is checked once per
idle period, in slices, with pauses in which the event loop serves calls. If the replica changes during a check, the
check is dropped without a result: slices before and after the change would check different states. A violated invariant
is counted and reported. The replica is still served, because most faults only cost capacity, and the operator decides
(docs/operating.md, KvplaneStateBroken).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from enum import Enum

from kvplane_core.face.interface import BrokenInvariant, ReplicaCore
from kvplane_service.replicas.applying import Applying
from kvplane_service.replicas.engine_lives import Clock

PAUSE_S = 0.005  # after each slice of about 1 ms: a check takes at most a fifth of the event loop's time
MAX_CHARS = 500  # of a violated invariant's text in the log
_POLLS_PER_PERIOD = 4
_NS_PER_MS = 1_000_000
_DONE = object()

Sleep = Callable[[float], Awaitable[None]]  # seconds

_log = logging.getLogger(__name__)


class Outcome(Enum):
    """How a check ended."""

    PASSED = "passed"
    DROPPED = "dropped"  # the replica changed meanwhile
    BROKEN = "broken"  # an invariant is violated


class IdleCheck:
    """Checks one replica, once per idle period.

    Attributes:
        name: name of the replica.
        counts: number of checks by outcome.
        broken: the last violated invariant, None if none was found; never cleared, because no step repairs the state.
    """

    def __init__(self, name: str, replica: ReplicaCore, steps: Applying) -> None:
        self.name = name
        self.counts = dict.fromkeys(Outcome, 0)
        self.broken: BrokenInvariant | None = None
        self._replica = replica
        self._steps = steps
        self._seen = self._checked = -1  # changes of the replica at the last poll, and at the last check
        self._since_ns = 0

    def is_due(self, now_ns: int, idle_ns: int) -> bool:
        """Whether the replica has been idle for `idle_ns` nanoseconds and was not checked since; call this
        periodically.
        """
        changes = self._steps.changes
        if changes != self._seen:
            self._seen, self._since_ns = changes, now_ns
        return now_ns - self._since_ns >= idle_ns and self._checked != changes and not self._steps.in_core

    async def run(self, sleep: Sleep) -> Outcome:
        """Check the replica, and sleep after each slice. Sets `broken` if an invariant is violated; raises nothing."""
        self._checked = began = self._steps.changes
        outcome, slices = Outcome.DROPPED, self._replica.check_in_slices()
        while self._is_unchanged(began):
            try:
                if next(slices, _DONE) is _DONE:
                    outcome = Outcome.PASSED
                    break
            except Exception as error:
                self.broken, outcome = _named(error), Outcome.BROKEN
                break
            await sleep(PAUSE_S)
        self.counts[outcome] += 1
        return outcome

    def _is_unchanged(self, changes: int) -> bool:
        return self._steps.changes == changes


def _named(error: Exception) -> BrokenInvariant:
    """Return the invariant that a check found violated."""
    if isinstance(error, BrokenInvariant):
        return error
    return BrokenInvariant("readable", f"the state cannot be read: {type(error).__name__}: {error}")


def log_broken(name: str, error: BrokenInvariant) -> None:
    """Log a violated invariant of the replica `name`."""
    _log.error("the state of replica %s is broken: %s: %s", name, error.invariant, str(error)[:MAX_CHARS])


async def check_in_background(
    checks: Callable[[], Iterable[IdleCheck]],
    idle_ms: int,
    clock: Clock,
    sleep: Sleep,
    report: Callable[[str, BrokenInvariant], None] = log_broken,
) -> None:
    """Check each replica once per idle period, one replica at a time; runs until it is cancelled.

    Args:
        checks: returns an iterator over the checks of the replicas. To check all replicas takes seconds, so the
            iterator must not hold references to later ones: that would keep a replica alive that is deregistered
            meanwhile.
        idle_ms: milliseconds without a change after which a replica is idle.
        clock: returns monotonic nanoseconds.
        sleep: waits for a time in seconds, as asyncio.sleep does.
        report: called with the name of the replica and the violated invariant.
    """
    while True:
        await sleep(idle_ms / 1000 / _POLLS_PER_PERIOD)
        await _check_all(checks(), idle_ms * _NS_PER_MS, clock, sleep, report)


async def _check_all(
    checks: Iterable[IdleCheck],
    idle_ns: int,
    clock: Clock,
    sleep: Sleep,
    report: Callable[[str, BrokenInvariant], None],
) -> None:
    """Check the replicas that are due, one after another.

    Only the replica that is being checked is referenced here. This is a separate function because a local variable of
    the endless loop would keep the last replica alive between two polls.
    """
    for check in checks:
        if check.is_due(clock(), idle_ns) and await check.run(sleep) is Outcome.BROKEN and check.broken is not None:
            report(check.name, check.broken)
