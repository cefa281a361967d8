"""One process start: every case, its sides interleaved round by round.

    python -m tests.bench.peer.start found.json < plan.json

In a round each side does the work of the case once, and the next round begins with another side, so that what else
the machine does meets all of them alike.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.bench.peer.models import MODELS, Model
from tests.bench.peer.places import places
from tests.bench.peer.plan import DEFAULT_HASH, HASHES, HIT, MISS, Case, Plan, Round
from tests.bench.peer.sides import Intervals, OurSide, ReferenceSide, Side
from tests.bench.peer.work import ADMISSION_SLOTS
from tests.conformance.live.peer import Peer


class Start:
    """Runs the cases of a plan and collects rounds."""

    def __init__(self, plan: Plan, sides: list[Side]) -> None:
        self._plan = plan
        self._sides = sides
        self.rounds: list[Round] = []

    def run(self) -> None:
        """Every case of every model."""
        for model in MODELS:
            if model.name in self._plan.models:
                self._run_model(model)

    def _run_model(self, model: Model) -> None:
        for requests in self._plan.requests:
            num_blocks = model.shape.decode_blocks(requests, self._plan.all_steps)
            with self._case(model, num_blocks):
                self._fill(model, num_blocks)
                self._decode(model, requests)
        for tokens in self._plan.prompts:
            with self._case(model, model.shape.admission_blocks(tokens)):
                self._admissions(model, tokens)

    def _fill(self, model: Model, num_blocks: int) -> None:
        """Leave cached blocks in the whole pool, so that each new block of a decode step evicts one."""
        length, count = model.shape.filling(num_blocks)
        for side in self._sides:
            for seed in range(count):
                side.admit(-1 - seed, length, DEFAULT_HASH)

    def _decode(self, model: Model, requests: int) -> None:
        for side in self._sides:
            side.prefill(requests)
        self._interleave(Case(model.name, "", requests), lambda side, number: side.decode(self._plan))
        self._agree(f"{model.name}, {requests} requests", [side.decoded(self._plan) for side in self._sides])

    def _admissions(self, model: Model, tokens: int) -> None:
        hits: dict[str, list[int]] = {side.name: [] for side in self._sides}

        def admit(side: Side, seed: int, hashing: str) -> int:
            took, hit = side.admit(seed, tokens, hashing)
            hits[side.name].append(hit)
            return took

        for side in self._sides:  # fill the pool, so that misses evict
            for seed in range(ADMISSION_SLOTS + 1):
                admit(side, -1 - seed, next(iter(HASHES)))

        def act(side: Side, number: int) -> Intervals:
            taken: Intervals = {}
            for hashing in HASHES:
                seeds = range(number * self._plan.admissions, (number + 1) * self._plan.admissions)
                pairs = [(admit(side, seed, hashing), admit(side, seed, hashing)) for seed in seeds]
                taken[f"{MISS}/{hashing}"], taken[f"{HIT}/{hashing}"] = map(list, zip(*pairs, strict=True))
            return taken

        self._interleave(Case(model.name, "", tokens), act)
        self._agree(f"{model.name}, prompts of {tokens} tokens", list(hits.values()))

    def _interleave(self, case: Case, act: Callable[[Side, int], Intervals]) -> None:
        gc.collect()
        gc.freeze()
        for side in self._sides:
            side.freeze()
        for number in range(self._plan.all_rounds):
            first = number % len(self._sides)
            for side in self._sides[first:] + self._sides[:first]:
                taken = act(side, number)
                if number:
                    self._note(case, side, taken)

    def _note(self, case: Case, side: Side, taken: Intervals) -> None:
        for name, intervals in taken.items():
            kind, _, hashing = name.partition("/")
            this = Case(case.model, kind, case.size, hashing)
            median, mean = statistics.median(intervals), statistics.fmean(intervals)
            self.rounds.append(Round(this, side.name, median / 1000, mean / 1000))

    def _agree(self, what: str, states: list[Any]) -> None:
        assert all(state == states[0] for state in states), f"{what}: the sides did different work: {states}"
        print(f"{what}: {len(states)} sides agree", file=sys.stderr, flush=True)

    @contextmanager
    def _case(self, model: Model, num_blocks: int) -> Iterator[None]:
        for side in self._sides:
            side.open(model, num_blocks)
        yield
        for side in self._sides:
            side.close()
        gc.unfreeze()


def measure(plan: Plan) -> dict[str, Any]:
    """All rounds of one process start, with the load average before and after, and the versions of the reference."""
    load = [os.getloadavg()]
    with ExitStack() as stack:
        sides: list[Side] = [OurSide(name, place) for name, place in stack.enter_context(places()).items()]
        versions: dict[str, str] = {}
        if plan.reference:
            reference = ReferenceSide(stack.enter_context(Peer("tests.bench.peer.reference")))
            versions = reference.versions()
            sides.append(reference)
        start = Start(plan, sides)
        start.run()
    load.append(os.getloadavg())
    return {"rounds": [asdict(one) for one in start.rounds], "load_average": load, "reference": versions}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(measure(Plan.of(json.load(sys.stdin)))), encoding="utf-8")
