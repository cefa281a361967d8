"""Random intents of a scheduler with given habits, drawn by the states of the driver's requests."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from tests.conformance.live.driver import Driver, Request
from tests.conformance.live.intents import (
    Add,
    Admit,
    Evict,
    Finish,
    Intent,
    Loaded,
    Look,
    Preempt,
    Release,
    Reset,
    Result,
    Run,
    Step,
)
from tests.conformance.live.kinds import Habits


class Generator:
    """Endless rounds: results, a step, running requests, admissions, arrivals, and what disturbs them.

    Results come before the step begins, as in every engine: what they register was written by steps before it.
    """

    def __init__(self, random: Random, driver: Driver, habits: Habits) -> None:
        self._random = random
        self._driver = driver
        self._habits = habits
        args = driver.header["manager_args"]
        self._max_len = args["max_model_len"]
        self._units = sorted({one["block_size"] for one in driver.header["groups"]} | {args["hash_block_size"]})
        self._num_blocks = driver.header["num_blocks"]
        self._count = 0
        self._texts = [random.randrange(50021) for _ in range(random.randint(1, 4))]
        self._crowd = random.choice((2, 3, 4, 6, 10))
        self._longest = random.choice((1.0, 1.0, 0.5)) * self._max_len
        self._encoder: dict[str, int] = {}

    def intents(self) -> Iterator[Intent]:
        """Intents; each must be performed before the next is drawn."""
        while True:
            yield from self._results()
            yield Step()
            yield from self._running()
            yield from self._admissions()
            yield from self._disturbances()
            yield from self._arrivals()
            if self._chance(0.15):
                yield Look()

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability

    # -- arrivals ----------------------------------------------------------------------------------------------------

    def _arrivals(self) -> Iterator[Intent]:
        while len(self._driver.requests) < self._crowd and self._chance(0.6):
            yield self._new()

    def _new(self) -> Add:
        self._count += 1
        name = f"r{self._count}"
        length = self._length(max(1, int(self._longest) - 1))
        text = self._random.choice(self._texts)
        shared = length if self._chance(0.4) else self._length(length)
        segments = ((text, shared),) if shared == length else ((text, shared), (40000 + self._count, length - shared))
        return Add(
            name,
            segments,
            salt=self._random.choice((None, None, None, None, None, None, "alice", "bob")),
            lora=self._random.choice((None, None, None, None, None, None, "l1", "l2")),
            items=self._items(length) if self._chance(0.15) else (),
            skip=self._chance(self._habits.skip),
        )

    def _length(self, most: int) -> int:
        """Of any size, but often on a block boundary or next to one."""
        if self._chance(0.4):
            return self._random.randint(1, most)
        unit = self._random.choice(self._units)
        near = unit * self._random.randint(1, max(1, most // unit)) + self._random.choice((-1, 0, 0, 1))
        return min(max(near, 1), most)

    def _items(self, length: int) -> tuple[tuple[str, int, int], ...]:
        items: list[tuple[str, int, int]] = []
        at = 0
        while at < length and len(items) < 3:
            offset = self._random.randint(at, length - 1)
            size = self._random.randint(1, max(1, min(length - offset, 40)))
            items.append((f"img{self._random.randint(0, 2)}-{len(items)}", offset, size))
            at = offset + size
        return tuple(items)

    # -- scheduling --------------------------------------------------------------------------------------------------

    def _results(self) -> Iterator[Intent]:
        for request in list(self._driver.requests.values()):
            while request.flights and (len(request.flights) > self._habits.in_flight or self._chance(0.5)):
                yield Result(
                    request.name,
                    accepted=self._random.randint(0, self._habits.drafts),
                    commit=bool(self._habits.drafts or self._habits.in_flight) and self._chance(0.9),
                    surprise=self._chance(0.2),
                )

    def _running(self) -> Iterator[Intent]:
        for request in list(self._driver.running):
            if len(request.flights) <= self._habits.in_flight and self._chance(0.9):
                drafts = self._random.randint(0, self._habits.drafts)
                yield Run(request.name, self._chunk(), self._aligned(), drafts, self._lookahead())

    def _admissions(self) -> Iterator[Intent]:
        for request in self._driver.with_status("LOADING"):
            if self._chance(0.5):
                yield Loaded(request.name, self._random.choice((0, 0, 0, 0, self._random.randint(1, self._max_len))))
        for request in self._driver.with_status("WAITING", "PREEMPTED"):
            if self._chance(0.8):
                yield self._admit(request)
                if request.status in ("WAITING", "PREEMPTED") and self._chance(0.8):
                    return  # refused: the next would be refused too

    def _admit(self, request: Request) -> Admit:
        is_external = self._chance(self._habits.external)
        return Admit(
            request.name,
            self._chunk(),
            self._aligned(),
            external=self._length(self._max_len) if is_external else 0,
            load=is_external and self._chance(0.5),
            options=self._options(request),
        )

    def _options(self, request: Request) -> tuple[tuple[str, Any], ...]:
        chosen: list[tuple[str, Any]] = list(self._lookahead())
        if self._chance(self._habits.full_fit):
            chosen.append(("full", True))
        if self._chance(self._habits.reserved):
            chosen.append(("reserved", self._random.randint(1, max(1, self._num_blocks // 3))))
        if self._chance(self._habits.first):
            chosen.append(("has_sched", False))
        if self._habits.encoder:
            most = self._habits.encoder
            chosen.append(("enc", self._encoder.setdefault(request.name, self._random.randint(1, most))))
        return tuple(chosen)

    def _lookahead(self) -> tuple[tuple[str, Any], ...]:
        return (("look", self._habits.lookahead),) if self._habits.lookahead else ()

    def _aligned(self) -> bool:
        return not self._chance(self._habits.free_chunks)

    def _chunk(self) -> int:
        return self._max_len if self._chance(0.4) else self._length(self._max_len)

    # -- what disturbs -----------------------------------------------------------------------------------------------

    def _disturbances(self) -> Iterator[Intent]:
        for request in list(self._driver.requests.values()):
            if self._chance(0.15 if request.tokens > request.prompt else 0.03):
                yield Finish(request.name, hold=self._chance(self._habits.hold))
        for request in list(self._driver.running):
            if self._chance(0.03):
                yield Preempt(request.name)
        for name in sorted(self._driver.held):
            if self._chance(0.3):
                yield Release(name)
        if self._chance(0.06):
            most = min(4, self._num_blocks - 1)
            chosen = self._random.sample(range(1, self._num_blocks), self._random.randint(1, most))
            yield Evict(tuple(sorted(chosen)))
        if self._chance(0.02):
            yield from self._reset()

    def _reset(self) -> Iterator[Intent]:
        """Mostly when all blocks are free: otherwise the reset is refused."""
        if self._chance(0.7):
            for name in list(self._driver.requests):
                yield Finish(name)
            for name in sorted(self._driver.held):
                yield Release(name)
            yield Step()
        yield Reset()
