"""Several engines on one virtual clock, fed by the arrivals of a trace.

Open loop: a request arrives when the trace says, however busy the engines are. Each engine has a clock of its
own, which its steps move; the one that is furthest behind steps next, so a request meets its engine in the state
that it had at that moment, and the outcome depends on nothing but the trace and the settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

from kvplane_replay.engine import Engine
from kvplane_replay.plan import NS_PER_SECOND, Routing
from kvplane_replay.summary import Tally
from kvplane_replay.workloads import TraceRequest


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a fleet is.

    Attributes:
        read: requests taken from the trace.
        completed, refused, running, waiting: where they are; they add up to `read`.
        steps: steps so far.
        clock_ns: virtual time of the engine that is furthest ahead.
    """

    read: int
    completed: int
    refused: int
    running: int
    waiting: int
    steps: int
    clock_ns: int


class Fleet:
    """The engines of one trace; `run_step` until it answers False.

    What the trace raises while it is read goes through `run_step`; the fleet can go on afterwards and ends what it has.
    """

    def __init__(
        self, engines: Sequence[Engine], trace: Iterable[TraceRequest], routing: Routing = Routing.STICKY
    ) -> None:
        assert engines, "a fleet has an engine"
        self.engines = tuple(engines)
        self.num_read = 0
        self._trace: Iterator[TraceRequest] = iter(trace)
        self._routing = routing
        self._turn = 0
        self._next: TraceRequest | None = None
        self._is_read = False

    def run_step(self) -> bool:
        """Deliver what has arrived, then step one engine; False when nothing is left and every end has been sent."""
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
        """Take nothing more from the trace."""
        self._is_read, self._next = True, None

    @property
    def clock_ns(self) -> int:
        """Virtual time of the engine that is furthest ahead."""
        return max(engine.clock_ns for engine in self.engines)

    @property
    def progress(self) -> Progress:
        """How far it is."""
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
        """What all engines counted together; a fresh copy."""
        total = Tally(num_groups=self.engines[0].tally.num_groups)
        for engine in self.engines:
            total.add(engine.tally)
        return total

    def _furthest_behind(self) -> Engine | None:
        busy = [engine for engine in self.engines if engine.has_work]
        return min(busy, key=lambda engine: engine.clock_ns) if busy else None

    def _peek(self) -> TraceRequest | None:
        if self._next is None and not self._is_read:
            self._next = next(self._trace, None)
            self._is_read = self._next is None
        return self._next

    def _deliver(self, request: TraceRequest) -> None:
        """Hand the next arrival to its engine; one that was idle has waited for it."""
        self._next = None
        self.num_read += 1
        engine = self.engines[self._route(request)]
        if not engine.has_work:
            engine.clock_ns = max(engine.clock_ns, _arrival_ns(request))
        engine.submit(request)

    def _route(self, request: TraceRequest) -> int:
        if self._routing is Routing.STICKY and request.session:
            return int.from_bytes(sha256(request.session.encode()).digest()[:8], "little") % len(self.engines)
        self._turn += 1
        return (self._turn - 1) % len(self.engines)


def _arrival_ns(request: TraceRequest) -> int:
    return round(request.arrival_s * NS_PER_SECOND)
