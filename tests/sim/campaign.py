"""Many runs in parallel processes, and their totals."""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from tests.sim.world import Outcome, run
from tests.twins import TWINS, weakened

MOST_VOID = 0.05  # highest fraction of runs without a hit across services
_SEEDS_AT_ONCE = 4  # per task of a process
# Seeds that found a fault of the product, with the fault.
KEPT = {
    8: "an engine that had counted less than a new service named steps by mistake",
    70131: "a service announced keys of blocks under a load, and dropped them when the engine life began",
    520042: "two services began one epoch, and the pool of one had its stamp of a block that the memory has elsewhere",
}

# Twins that the simulation must catch, with the first seed that catches each, so that a test need not search for it.
FIRST_SEED = {
    "no stamp check": 1,
    "no restamp on key moves": 3,
    "sealed check removed": 1,
    "fencing removed": 1,
    "incarnation ignored": 2,
    "one rank unchecked": 3,
    "publication before execution": 1,
    "a removal of a held key is swallowed": 1,
    "withdrawn keys stay shown": 1,
    "orders run twice": 1,
    "launches without an answer keep their stamps": 28,
    "two owners write": 1,
    "a drain loses what waits": 1,
    "lease expiry frees pages": 1,
    "resume forgets held pages": 9,
    "load concurrent with launches of the previous life": 5,
    "owner epoch ignored": 17,
    "idle check over a change": 1,
    "keys under a state": 2,
    "stamps under a state": 7,
    "stamp of a divided state": 32,
    "rows of callers join an image": 6,
}

# The same for runs with a mirrored engine.
MIRROR_TWINS = {
    "what diverged stays shown": 1,
    "lag limit ignored": 2,
    "repeats applied again": 1,
    "answers not compared": 1,
    "image of several steps": 1,
}

# The same for runs with tiers.
TIER_TWINS = {
    "saved before execution": 1,
    "saves of pages that changed": 1,
    "a reset leaves tiers": 1,
    "an eviction leaves tiers": 1,
    "tier load before launches": 4,
    "loads done on one rank": 1,
    "runs before its load is done": 1,
    "content not in the seal": 3,
    "host slots of another memory prove keys": 16,
    "slots of another disk prove keys": 133,
}


@dataclass
class Totals:
    """Totals of a campaign. `failed` are the runs with findings; equal campaigns have equal digests."""

    seeds: int = 0
    steps: int = 0
    hits: int = 0
    hits_across: int = 0
    services: int = 0
    lives: int = 0
    void: int = 0
    loaded: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    failed: list[Outcome] = field(default_factory=list)
    digest: str = ""

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.steps += outcome.steps
        self.hits += outcome.hits
        self.hits_across += outcome.hits_across
        self.services += outcome.services
        self.lives += outcome.lives
        self.void += outcome.is_void
        self.loaded += outcome.loaded
        self.faults += outcome.faults
        self.digest = hashlib.sha256(f"{self.digest} {outcome.digest}".encode()).hexdigest()[:16]
        if outcome.findings:
            self.failed.append(outcome)

    def count(self, rule: str) -> int:
        """Number of runs in which a rule was broken."""
        return sum(any(found.startswith(rule) for found in outcome.findings) for outcome in self.failed)

    @property
    def is_good(self) -> bool:
        return not self.failed and self.void <= MOST_VOID * self.seeds

    def __str__(self) -> str:
        wrong, leaks = self.count("never a wrong hit"), self.count("no block is leaked")
        return (
            f"seeds={self.seeds} steps={self.steps} faults={self.faults.total()} hits={self.hits} "
            f"hits_across_restarts={self.hits_across} services={self.services} engine_lives={self.lives} "
            f"void={self.void} failed={len(self.failed)} wrong_hits={wrong} leaks={leaks} "
            f"digest={self.digest}" + (f" loaded={self.loaded}" if self.loaded else "")
        )


def campaign(
    seeds: Sequence[int], each: Callable[[Outcome], None] = lambda _: None, jobs: int = 1, **kind: bool
) -> Totals:
    """Run the seeds in `jobs` processes; calls `each` with every outcome, in the order of the seeds. `kind` has further
    arguments of `run`: hangs, mirrors.
    """
    totals = Totals()
    for outcome in _outcomes(seeds, jobs, kind):
        totals.add(outcome)
        each(outcome)
    return totals


def default_jobs() -> int:
    """One process for each core."""
    return os.cpu_count() or 1


def _outcomes(seeds: Sequence[int], jobs: int, kind: dict[str, bool]) -> Iterator[Outcome]:
    """Outcomes by seed. A run depends only on its seed, not on the process that runs it."""
    run_one = partial(_run_quietly, **kind)
    if jobs == 1:
        yield from map(run_one, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(run_one, seeds, _SEEDS_AT_ONCE)


def _run_quietly(seed: int, **kind: bool) -> Outcome:
    with quiet():
        return run(seed, **kind)


def seeds_until_caught(twin: str, seeds: Iterable[int], **kind: bool) -> tuple[int, str]:
    """Number of seeds until a twin is caught, and the rule that caught it; (0, "") if none did."""
    assert twin in TWINS
    with quiet(), weakened(twin):
        for number, seed in enumerate(seeds, 1):
            findings = run(seed, **kind).findings
            if findings:
                return number, findings[0].partition(":")[0]
    return 0, ""


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the product's log: faults are injected on purpose."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
