"""The kvplane side: an engine on a Session, timed where it runs."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns, process_time_ns, thread_time_ns

from kvplane.base.groups import HashAlgorithm
from kvplane.base.hashing import HashScheme, RequestHasher, pack_tokens
from kvplane.base.step import Admit, AdmitStatus, End, Facts, News, Part, PartResult, Run
from kvplane.blocking.session import Session
from kvplane.session.builder import StepBuilder
from kvplane.session.tables import BlockTables
from tests.bench.peer.work import SETUP_BATCH, Shape, prompt, sampled

LOOPS_PER_S = 20_000_000


@dataclass(slots=True)
class Request:
    """State of a request in an engine."""

    slot: int
    tokens: list[int]
    hasher: RequestHasher
    computed: int = 0


@dataclass(frozen=True, slots=True)
class AheadStep:
    """A step that was sent one step ahead, in ns.

    Attributes:
        blocked: what the engine's thread spent on it, before and after the GPU's work on the step before.
        waited: of that, in `receive`.
        delayed: how much longer the engine's other Python work took than without a step under way.
        cpu: CPU time of this process for the step, in all threads, without that work.
    """

    blocked: int
    waited: int
    delayed: int
    cpu: int

    @property
    def spent(self) -> int:
        """What the step cost the engine's thread."""
        return self.blocked + self.delayed


def other_work(seconds: float) -> int:
    """Pure Python in the GPU's place, of about this length; returns its duration in ns."""
    begin = perf_counter_ns()
    total = 0
    for index in range(int(seconds * LOOPS_PER_S)):
        total += index
    return perf_counter_ns() - begin


@dataclass(slots=True)
class Engine:
    """The part of an engine that a session needs: requests, their tokens and block tables."""

    session: Session
    shape: Shape
    tables: BlockTables = field(init=False)
    running: list[Request] = field(init=False, default_factory=list)
    builder: StepBuilder = field(init=False, default_factory=StepBuilder)
    full_in: dict[int, list[int]] = field(init=False, default_factory=dict)  # rows whose block fills, by step in a unit
    steps: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.tables = BlockTables(self.shape.num_groups)

    # -- decode ------------------------------------------------------------------------------------------------------

    def admit(self, num_requests: int) -> None:
        """Prefill `num_requests` requests."""
        scheme = HashScheme.named(self.shape.unit)
        lengths = self.shape.decode_prompts(num_requests)
        waiting = [Request(index, prompt(index, length), RequestHasher(scheme)) for index, length in enumerate(lengths)]
        for first in range(0, num_requests, SETUP_BATCH):
            batch = waiting[first : first + SETUP_BATCH]
            self._admission(batch)
            self._finish_prompts(batch)
        self.running = waiting
        self.builder = StepBuilder([request.slot for request in waiting], hashed=True)
        for row, length in enumerate(lengths):
            self.full_in.setdefault((self.steps - length) % self.shape.unit, []).append(row)

    def decode(self) -> int:
        """One step: append a token to each request and allocate its slot; returns nanoseconds."""
        tokens = self._sample()
        begin = perf_counter_ns()
        part = self._part(tokens, extra=0)
        self._take(part, self.session.apply(part).parts[0])
        return perf_counter_ns() - begin

    def decode_ahead(self, num_steps: int, gpu_s: float) -> list[AheadStep]:
        """Run steps, each sent while the GPU computes the previous one; this thread sleeps for the GPU's time.

        What the step on the GPU samples is not known when the next one is sent: its rows ask for one token more than is
        known, and add the tokens of the step before it.
        """
        self.decode()  # the first step of the GPU
        spent = [self._step_ahead(gpu_s, first=index == 0) for index in range(num_steps + 1)]
        part = self._part(self._sample(), extra=0)
        self.session.apply(Part(facts=part.facts))
        return spent[1:]

    def _step_ahead(self, gpu_s: float, first: bool) -> AheadStep:
        tokens = [] if first else self._sample()
        before = self.session.next_seq - 2  # its results have arrived; the next step is on the GPU
        cpu, begin = process_time_ns(), perf_counter_ns()
        part = self._part(tokens, extra=1)
        self.session.submit(part, executed_through=before)
        submitted, at_work = perf_counter_ns(), thread_time_ns()
        worked = other_work(gpu_s / 2)
        at_work = thread_time_ns() - at_work
        time.sleep(gpu_s / 2)
        resumed = perf_counter_ns()
        result = self.session.receive().parts[0]
        received = perf_counter_ns()
        self._take(part, result)
        blocked = submitted - begin + perf_counter_ns() - resumed
        cpu = process_time_ns() - cpu - at_work
        return AheadStep(blocked, received - resumed, worked - other_work(gpu_s / 2), cpu)

    def _sample(self) -> array[int]:
        self.steps += 1
        return array("I", sampled(self.steps, len(self.running)))

    def _part(self, tokens: Sequence[int], extra: int) -> Part:
        """Append a token to each request, with the hash of each filled block; each row asks for one token."""
        builder, unit = self.builder, self.shape.unit
        builder.extra[:] = array("i", [extra]) * len(builder)
        if tokens:
            for request, token in zip(self.running, tokens, strict=True):
                request.tokens.append(token)
            for row in self.full_in.get(self.steps % unit, ()):
                request = self.running[row]
                unseen = request.tokens[request.hasher.num_tokens :]
                builder.add_hash(row, request.hasher.append(pack_tokens(unseen)))
        return builder.part(appended=len(tokens) > 0)

    def _take(self, part: Part, result: PartResult) -> None:
        """Apply the grants: here every row gets its one token."""
        self.tables.update(part, result)
        assert result.granted == [1] * len(self.running)

    # -- admission ---------------------------------------------------------------------------------------------------

    def measure_admission(self, seed: int, num_tokens: int, algorithm: HashAlgorithm) -> tuple[int, int]:
        """Hash a prompt, send it, take its hit and its tables; then finish and free it. Nanoseconds, and the hit."""
        tokens = prompt(seed, num_tokens)
        scheme = HashScheme.named(self.shape.unit, algorithm)
        begin = perf_counter_ns()
        request = Request(0, tokens, RequestHasher(scheme))
        (hit,) = self._admission([request])
        took = perf_counter_ns() - begin
        self._finish_prompts([request])
        self._apply(Part(facts=Facts(slot=[request.slot], end=[End.FREE])))
        return took, hit

    def _admission(self, requests: list[Request]) -> Sequence[int]:
        """Hashes, one step, tables; the hits."""
        lengths = [len(request.tokens) for request in requests]
        hashes = [request.hasher.append(pack_tokens(request.tokens)) for request in requests]
        slots = [request.slot for request in requests]
        news = News(
            slot=slots,
            num_tokens=lengths,
            num_hashes=[length // self.shape.unit for length in lengths],
            hashes=b"".join(hashes),
        )
        result = self._apply(Part(news=news, admit=Admit(slot=slots)))
        assert set(result.admit_status) == {AdmitStatus.GRANTED}
        for request, hit, granted in zip(requests, result.admit_hit, result.admit_granted, strict=True):
            request.computed = hit + granted
        return result.admit_hit

    def _finish_prompts(self, requests: list[Request]) -> None:
        left = [request for request in requests if request.computed < len(request.tokens)]
        if left:
            self._apply(Part(run=Run([request.slot for request in left])))

    def _apply(self, part: Part) -> PartResult:
        result = self.session.apply(part).parts[0]
        self.tables.update(part, result)
        return result
