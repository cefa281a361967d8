"""What a replica did in the last hour: samples at an interval, in a bounded number, for the plots of a status page."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from kvplane_service.replicas.host import ReplicaHost

INTERVAL_MS = 20_000
MAX_SAMPLES = 180  # an hour; of 5 columns of 4 bytes each
UNKNOWN = -1.0

Clock: TypeAlias = Callable[[], int]
Sleep: TypeAlias = Callable[[float], Awaitable[None]]


@dataclass(slots=True)
class Recent:
    """Columns of samples, the oldest first.

    Attributes:
        held: share of the pool that requests hold.
        hit: share of the tokens looked up since the sample before that were hit; UNKNOWN if there were none.
        running, waiting: requests; UNKNOWN if the engine does not report those that wait.
        steps_per_s: steps since the sample before, per second.
        at_ns: time of the last sample.
    """

    held: array[float] = field(default_factory=lambda: array("f"))
    hit: array[float] = field(default_factory=lambda: array("f"))
    running: array[float] = field(default_factory=lambda: array("f"))
    waiting: array[float] = field(default_factory=lambda: array("f"))
    steps_per_s: array[float] = field(default_factory=lambda: array("f"))
    at_ns: int = 0
    _last: tuple[int, int, int] = (0, 0, 0)

    def note(self, host: ReplicaHost, now_ns: int) -> None:
        """Take a sample."""
        core, waiting = host.replica, host.waiting_requests
        counters = core.counters
        now = (counters.steps, counters.queried_tokens, counters.hit_tokens)
        steps, queried, hit = (new - old for new, old in zip(now, self._last, strict=True))
        since_ns = now_ns - self.at_ns if self.at_ns else 0
        sample = (
            1 - core.free_blocks / max(1, core.spec.num_blocks - 1),
            hit / queried if self.at_ns and queried > 0 else UNKNOWN,
            core.num_running,
            UNKNOWN if waiting is None else waiting,
            max(0, steps) * 1e9 / since_ns if since_ns else 0,
        )
        for column, value in zip(self.columns, sample, strict=True):
            column.append(value)
            del column[:-MAX_SAMPLES]
        self.at_ns, self._last = now_ns, now

    @property
    def columns(self) -> tuple[array[float], ...]:
        """All columns."""
        return self.held, self.hit, self.running, self.waiting, self.steps_per_s


async def sample_in_background(
    each: Callable[[], Iterable[tuple[ReplicaHost, Recent]]], clock: Clock, sleep: Sleep
) -> None:
    """Take a sample of every replica at each interval; runs until it is cancelled. `each` may not hold references to
    later replicas, which may be deregistered meanwhile.
    """
    while True:
        await sleep(INTERVAL_MS / 1000)
        await _sample_all(each(), clock, sleep)


async def _sample_all(each: Iterable[tuple[ReplicaHost, Recent]], clock: Clock, sleep: Sleep) -> None:
    for host, recent in each:
        recent.note(host, clock())
        await sleep(0)
