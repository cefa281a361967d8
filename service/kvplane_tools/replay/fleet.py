"""Several engines on one virtual clock, to which a trace's requests are assigned.

A request arrives at the time in the trace, however busy the engines are. Each engine has its own clock, which its steps
advance. The engine with the earliest clock runs the next step. So a request that arrives finds its engine in the state
of that time, and the outcome depends only on the trace and the settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TypeAlias

from kvplane_tools.replay.engine import Engine
from kvplane_tools.replay.plan import NS_PER_SECOND, Routing
from kvplane_tools.replay.requests import ReplayedRequest
from kvplane_tools.replay.summary import Tally
from kvplane_tools.replay.workloads import TraceRequest

Arriving: TypeAlias = TraceRequest | ReplayedRequest


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a fleet.

    Attributes:
        read: number of requests read from the trace.
        completed, refused, running, waiting: number of these requests in each state; the sum is `read`.
        steps: number of steps so far.
        clock_ns: virtual time in nanoseconds of the engine whose clock is latest.
    """

    read: int
    completed: int
    refused: int
    running: int
    waiting: int
    steps: int
    clock_ns: int


class Fleet:
    """The engines of one trace. Call `run_step` until it returns False.

    `run_step` raises an error of the trace; further calls finish the requests that were read before it.
    """

    def __init__(self, engines: Sequence[Engine], trace: Iterable[Arriving], routing: Routing = Routing.STICKY) -> None:
        assert engines, "a fleet has an engine"
        self.engines = tuple(engines)
        self.num_read = 0
        self._trace: Iterator[Arriving] = iter(trace)
        self._routing = routing
        self._turn = 0
        self._next: Arriving | None = None
        self._is_read = False

    def run_step(self) -> bool:
        """Submit the requests that have arrived, then run a step of one engine.

        Returns False once all requests have ended and the service was informed of their end.
        """
        engine = self._furthest_behind()
        while (request := self._peek()) is not None and (engine is None or _arrival_ns(request) <= engine.clock_ns):
            self._deliver(request)
            engine = self._furthest_behind()
        if engine is None:
            for each in self.engines:
                each.finish()
            return False
        engine.step()
        return True

    def stop_reading(self) -> None:
        """Read no further requests from the trace."""
        self._is_read, self._next = True, None

    @property
    def clock_ns(self) -> int:
        """The virtual time in nanoseconds of the engine whose clock is latest."""
        return max(engine.clock_ns for engine in self.engines)

    @property
    def progress(self) -> Progress:
        """The numbers of requests by state, and the clock."""
        return Progress(
            read=self.num_read,
            completed=sum(engine.completed for engine in self.engines),
            refused=sum(len(engine.refusals) for engine in self.engines),
            running=sum(engine.num_running for engine in self.engines),
            waiting=sum(engine.num_waiting for engine in self.engines),
            steps=sum(engine.tally.steps for engine in self.engines),
            clock_ns=self.clock_ns,
        )

    def tally(self) -> Tally:
        """Return the sum of the counts of all engines."""
        first = self.engines[0].tally
        total = Tally(num_groups=first.num_groups, num_tiers=first.num_tiers)
        for engine in self.engines:
            total.add(engine.tally)
        return total

    def _furthest_behind(self) -> Engine | None:
        busy = [engine for engine in self.engines if engine.has_work]
        return min(busy, key=lambda engine: engine.clock_ns) if busy else None

    def _peek(self) -> Arriving | None:
        if self._next is None and not self._is_read:
            self._next = next(self._trace, None)
            self._is_read = self._next is None
        return self._next

    def _deliver(self, request: Arriving) -> None:
        """Submit the next request to its engine. The clock of an idle engine advances to the request's arrival."""
        self._next = None
        self.num_read += 1
        engine = self.engines[self._route(request)]
        if not engine.has_work:
            engine.clock_ns = max(engine.clock_ns, _arrival_ns(request))
        engine.submit(request)

    def _route(self, request: Arriving) -> int:
        if self._routing is Routing.STICKY and request.session:
            return int.from_bytes(sha256(request.session.encode()).digest()[:8], "little") % len(self.engines)
        self._turn += 1
        return (self._turn - 1) % len(self.engines)


def _arrival_ns(request: Arriving) -> int:
    return round(request.arrival_s * NS_PER_SECOND)
