"""Requests of all replicas of a fleet, their answers, and what a campaign counts."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from statistics import median

from kvplane.base.errors import KvplaneError
from tests.engine.reference.request import Request
from tests.engine.reference.weights import draw_weights
from tests.engine.twin import Twin
from tests.engine.workload import Requests
from tests.faults.child import Trap
from tests.fleet.processes import POOL, Fleet, Replica
from tests.fleet.routers import Counts

LIMIT_S = 120.0
LONGEST, MAX_NEW, AT_ONCE = 90, 6, 2
PAUSE_S = 0.3  # between two times that an engine is asked


@dataclass
class Report:
    """Results of a campaign on one kind of ownership.

    Attributes:
        failovers: times that the epochs of a replica continued at another service.
        recovered_s: seconds from each repair to the last answer, by kind of fault.
        ended: engine processes that ended with an error, and were started again.
        routers: how two routers compared, by kind of fault.
    """

    ownership: str
    faults: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    tokens: int = 0
    differing: int = 0
    hits: int = 0
    lost: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    epochs: int = 0
    failovers: int = 0
    knocks: int = 0
    taken: int = 0
    recovered_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    findings: list[str] = field(default_factory=list)
    routers: dict[str, Counts] = field(default_factory=dict)

    @property
    def line(self) -> str:
        return (
            f"ownership={self.ownership} faults={self.faults.total()} requests={self.requests} lost={self.lost} "
            f"tokens={self.tokens} differing={self.differing} hit={self.hits} epochs={self.epochs} "
            f"failovers={self.failovers} "
            f"rivals={self.knocks} granted={self.taken} ended={self.ended.total()} "
            f"recovered_s={self._recovered} violations={len(self.findings)}"
        )

    @property
    def _recovered(self) -> str:
        every = [one for some in self.recovered_s.values() for one in some] or [0.0]
        return f"{median(every):.1f}/{max(every):.1f}"


class Load:
    """Requests of all replicas, and the answers compared with the dense model."""

    def __init__(self, fleet: Fleet, seed: int, report: Report, limit_s: float = LIMIT_S) -> None:
        """A request that is not answered `limit_s` after a repair is lost."""
        self._fleet, self._report, self._limit_s = fleet, report, limit_s
        self._sources = [Requests(LONGEST, seed * 100 + at) for at in range(len(fleet.replicas))]
        self._sent: list[dict[int, Request]] = [{} for _ in fleet.replicas]
        self._asked_s = [0.0 for _ in fleet.replicas]
        self._resting = set[str]()
        self._twin = Twin(POOL.model, draw_weights(POOL.model))

    def ask(self, trapped: Replica | None = None, trap: Trap | None = None) -> None:
        """Send each engine some requests, and one of them a trap."""
        self._resting.clear()
        for at, replica in enumerate(self._fleet.replicas):
            self._ask(at, trap if replica is trapped else None)

    def _ask(self, at: int, trap: Trap | None = None) -> None:
        sent, replica = self._sent[at], self._fleet.replicas[at]
        requests = [self._sources[at].next() for _ in range(AT_ONCE)]
        sent.update(enumerate(replace(one, max_new_tokens=min(one.max_new_tokens, MAX_NEW)) for one in requests))
        prompts = {number: (one.prompt, one.max_new_tokens) for number, one in sent.items()}
        replica.engines.ask(prompts, replace(trap) if trap is not None else None)
        self._asked_s[at] = time.monotonic()
        if self._fleet.routers is not None:
            self._fleet.routers.prompts.append(tuple(requests[0].prompt))

    @property
    def is_done(self) -> bool:
        return all(replica.engines.is_done for replica in self._fleet.replicas)

    def listen(self, seconds: float, repaired: bool = False) -> None:
        """Receive answers for some time. Before the fleet is repaired, engines that have answered are asked again;
        then those that have ended are started again.
        """
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s and not (repaired and self.is_done):
            for at, replica in enumerate(self._fleet.replicas):
                self._note(replica.engines.listen(0.01))
                if repaired and replica.engines.process is None:
                    self._begin(replica)
                elif not repaired and self._is_idle(at):
                    self._take(at)
                    self._ask(at)
            time.sleep(0.001)  # nothing waits where all have answered

    def _is_idle(self, at: int) -> bool:
        replica = self._fleet.replicas[at]
        is_late = time.monotonic() - self._asked_s[at] > PAUSE_S
        return is_late and replica.engines.is_done and replica.name not in self._resting

    def rest(self, replica: Replica) -> None:
        """Wait until an engine has answered, and ask it nothing more before the next round."""
        self._resting.add(replica.name)
        until_s = time.monotonic() + self._limit_s
        while not replica.engines.is_done and time.monotonic() < until_s:
            self.listen(0.1)

    @property
    def num_ended(self) -> int:
        """Engine processes that ended with an error."""
        return self._report.ended.total()

    def _begin(self, replica: Replica) -> None:
        try:
            replica.engines.begin()
        except KvplaneError as refused:  # as while grants end
            self._note(refused)

    def _note(self, error: KvplaneError | None) -> None:
        if error is not None:
            self._report.ended[type(error).__name__] += 1

    def ask_all(self) -> None:
        """Ask each engine, and wait for every answer."""
        self.ask()
        self.finish()

    def finish(self) -> None:
        """Wait for every answer, and compare them."""
        self.listen(self._limit_s, repaired=True)
        for at, sent in enumerate(self._sent):
            self._take(at)
            self._report.lost += len(sent)
            sent.clear()

    def _take(self, at: int) -> None:
        engines = self._fleet.replicas[at].engines
        ended, engines.ended = engines.ended, []
        for number, hits, output in ended:
            self._compare(self._sources[at], self._sent[at].pop(number), hits, output)

    def _compare(self, source: Requests, request: Request, hits: list[int], output: list[int]) -> None:
        wrong = self._twin.count_wrong(request.prompt, output)
        report = self._report
        report.requests += 1
        report.tokens += len(output)
        report.differing += wrong
        report.hits += sum(hits)
        if wrong:
            report.findings.append(f"{wrong} tokens of {request.prompt} differ from the dense model's")
        answered = replace(request)
        answered.tokens = [*request.prompt, *output]
        source.done(answered)
