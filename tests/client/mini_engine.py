"""A seeded engine of a few requests that drives one replica, over any transport, and records every answer."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvplane.base.groups import AlignSpec, GroupKind, GroupSpec, MambaMode, ReplicaSpec
from kvplane.base.step import AdmitStatus, Budget, End, Part, PartResult
from kvplane.session.rows import AdmitRow, FactRow, NewsRow, Row, RunRow, part_of

BLOCK = 16
FULL = GroupSpec(GroupKind.FULL_ATTENTION, BLOCK)
WINDOW = GroupSpec(GroupKind.SLIDING_WINDOW, BLOCK, window=32)


def spec_of(*groups: GroupSpec, num_blocks: int = 40, align: int = 0) -> ReplicaSpec:
    """A small replica; prefill chunks end at multiples of `align`."""
    return ReplicaSpec(
        groups=groups or (FULL,),
        num_blocks=num_blocks,
        max_model_len=1024,
        hash_block_size=BLOCK,
        scheduler_block_size=BLOCK,
        max_in_flight_tokens=256,
        align=AlignSpec(block_size=align, chunk_limit=96),
    )


HYBRID = spec_of(FULL, WINDOW)
MAMBA = GroupSpec(GroupKind.MAMBA, BLOCK, mamba_mode=MambaMode.ALIGN, zero_new_blocks=True)
STATE = spec_of(FULL, MAMBA, align=BLOCK)


@dataclass
class Request:
    tokens: list[int]
    num_output: int
    computed: int = 0
    known: bool = False


@dataclass
class MiniEngine:
    """Admits, prefills in chunks, decodes, is preempted, ends. `ask` applies a part as a whole step."""

    ask: Callable[[Part], PartResult]
    seed: int = 1
    running: dict[int, Request] = field(default_factory=dict)
    log: list[PartResult] = field(default_factory=list)
    num_preempted: int = 0
    num_hit: int = 0

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        shared = [self._rng.randrange(100_000) for _ in range(3 * BLOCK)]
        self._waiting = deque((slot, self._request(shared)) for slot in range(24))
        self._facts: list[FactRow] = []

    def _request(self, shared: list[int]) -> Request:
        own = [self._rng.randrange(100_000) for _ in range(self._rng.randrange(1, 90))]
        return Request(shared[: self._rng.randrange(3 * BLOCK)] + own, self._rng.randrange(1, 40))

    def run(self) -> list[PartResult]:
        """Until every request has ended; the answers."""
        while self._waiting or self.running or self._facts:
            self.step()
        return self.log

    def step(self) -> None:
        """One iteration."""
        part = self._part()
        answer = self.ask(part)
        self.log.append(answer)
        for slot, tokens in zip(part.run.slot, answer.granted, strict=True):
            self.running[slot].computed += tokens
        for slot, status, hit, granted in zip(
            part.admit.slot, answer.admit_status, answer.admit_hit, answer.admit_granted, strict=True
        ):
            if status == AdmitStatus.GRANTED:
                self.running[slot] = self._waiting.popleft()[1]
                self.running[slot].computed = hit + granted
                self.num_hit += hit
        for slot in answer.preempted:
            request = self.running.pop(slot)
            request.computed = 0
            self._waiting.appendleft((slot, request))
            self.num_preempted += 1
        self._sample()

    def _part(self) -> Part:
        rows: list[Row] = [*self._facts, *(RunRow(slot) for slot in self.running)]
        self._facts = []
        for slot, request in list(self._waiting)[:2]:
            if not request.known:
                rows.append(NewsRow(slot, request.tokens, request_id=f"request-{slot}"))
                request.known = True
            rows.append(AdmitRow(slot, cap=48))
        part = part_of(*rows, budget=Budget(tokens=96))
        part.admit.max_running = 8
        part.admit.only_if_no_preemption = True
        return part

    def _sample(self) -> None:
        for slot, request in list(self.running.items()):
            if request.computed < len(request.tokens):
                continue
            request.tokens.append(self._rng.randrange(100_000))
            request.num_output -= 1
            end = End.NONE if request.num_output else End.FREE
            self._facts.append(FactRow(slot, tokens=[request.tokens[-1]], end=end))
            if end:
                del self.running[slot]
