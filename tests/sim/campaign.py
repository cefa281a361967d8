"""Many runs, one after the other, and what they come to."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.sim.world import Outcome, run
from tests.twins import TWINS, weakened

MOST_VOID = 0.05  # share of the runs that may show nothing
# Seeds that once led to a fault of the product, with what it was.
KEPT = {
    8: "an engine that had counted less than a new service named steps by mistake",
}


@dataclass
class Totals:
    """Of a campaign. `failed` are the runs with findings."""

    seeds: int = 0
    steps: int = 0
    hits: int = 0
    hits_across: int = 0
    services: int = 0
    lives: int = 0
    void: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    failed: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.steps += outcome.steps
        self.hits += outcome.hits
        self.hits_across += outcome.hits_across
        self.services += outcome.services
        self.lives += outcome.lives
        self.void += outcome.is_void
        self.faults += outcome.faults
        if outcome.findings:
            self.failed.append(outcome)

    def count(self, rule: str) -> int:
        """Runs in which a rule was broken."""
        return sum(any(found.startswith(rule) for found in outcome.findings) for outcome in self.failed)

    @property
    def is_good(self) -> bool:
        return not self.failed and self.void <= MOST_VOID * self.seeds

    def __str__(self) -> str:
        wrong, leaks = self.count("never a wrong hit"), self.count("no block is leaked")
        return (
            f"seeds={self.seeds} steps={self.steps} faults={self.faults.total()} hits={self.hits} "
            f"hits_across_restarts={self.hits_across} services={self.services} engine_lives={self.lives} "
            f"void={self.void} failed={len(self.failed)} wrong_hits={wrong} leaks={leaks}"
        )


def campaign(seeds: Iterable[int], each: Callable[[Outcome], None] = lambda _: None) -> Totals:
    """Run the seeds; `each` is called with every outcome."""
    totals = Totals()
    with quiet():
        for seed in seeds:
            outcome = run(seed)
            totals.add(outcome)
            each(outcome)
    return totals


def seeds_until_caught(twin: str, seeds: Iterable[int]) -> tuple[int, str]:
    """How many seeds a twin survives, the last included, and the rule that caught it; (0, "") when none did."""
    assert twin in TWINS
    with quiet(), weakened(twin):
        for number, seed in enumerate(seeds, 1):
            findings = run(seed).findings
            if findings:
                return number, findings[0].partition(":")[0]
    return 0, ""


@contextmanager
def quiet() -> Iterator[None]:
    """What the product logs of faults is not news here."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
