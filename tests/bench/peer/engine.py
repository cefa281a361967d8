"""The kvplane side: an engine on a Session, timed where it runs."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from time import perf_counter_ns, process_time_ns, thread_time_ns
from typing import TypeVar

from kvplane.base.groups import HashAlgorithm
from kvplane.base.hashing import HashScheme, RequestHasher, pack_tokens
from kvplane.base.step import Admit, AdmitStatus, End, Facts, News, Part, PartResult, Run
from kvplane.blocking.session import Session
from kvplane.session.builder import StepBuilder
from kvplane.session.tables import BlockTables
from tests.bench.peer.work import SETUP_BATCH, Clock, Shape, other_work, prompt, sampled

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class AheadStep:
    """A step that was sent one step ahead, in ns.

    Attributes:
        blocked: what the engine's thread spent on it, before and after the GPU's work on the step before.
        waited: of that, in `receive`.
        delayed: what the engine's other Python work waited for the interpreter's lock.
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


def sent_ahead(
    clock: Clock, gpu_s: float, send: Callable[[], None], receive: Callable[[], _T], use: Callable[[_T], object]
) -> AheadStep:
    """Send, let the GPU work, receive and use the answer; measures what that costs this thread."""
    now_ns = clock.now_ns
    cpu, begin = process_time_ns(), now_ns()
    send()
    submitted, at_work = now_ns(), thread_time_ns()
    other_work(gpu_s / 2)
    at_work, worked = thread_time_ns() - at_work, now_ns()
    time.sleep(gpu_s / 2)
    resumed = now_ns()
    answer = receive()
    received = now_ns()
    use(answer)
    used = now_ns()
    cpu = process_time_ns() - cpu - at_work
    delayed = max(0, worked - submitted - at_work)
    return AheadStep(submitted - begin + used - resumed, received - resumed, delayed, cpu)


@dataclass(slots=True)
class Engine:
    """The part of an engine that a session needs: requests, their tokens and block tables."""

    session: Session
    shape: Shape
    tables: BlockTables = field(init=False)
    builder: StepBuilder = field(init=False, default_factory=StepBuilder)
    extra: int = field(init=False, default=0)  # of all rows
    sampled: deque[array[int]] = field(init=False, default_factory=deque)  # per step, a token of each request
    steps: int = field(init=False, default=0)
    clock: Clock = field(init=False, default_factory=Clock)

    def __post_init__(self) -> None:
        self.tables = BlockTables(self.shape.num_groups)

    # -- decode ------------------------------------------------------------------------------------------------------

    def admit(self, num_requests: int) -> None:
        """Prefill `num_requests` requests, whose tokens the service hashes."""
        lengths = self.shape.decode_prompts(num_requests)
        for first in range(0, num_requests, SETUP_BATCH):
            slots = list(range(first, min(first + SETUP_BATCH, num_requests)))
            self._admission(slots, [prompt(slot, lengths[slot]) for slot in slots])
        self.builder.set_rows(range(num_requests))

    def decode(self) -> int:
        """One step: append a token to each request and allocate its slot; returns nanoseconds."""
        tokens, begin = self._sample(), perf_counter_ns()
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
        tokens = None if first else self._sample()
        before = self.session.next_seq - 2  # its results have arrived; the next step is on the GPU
        sent: list[Part] = []

        def send() -> None:
            sent.append(self._part(tokens, extra=1))
            self.session.submit(sent[0], executed_through=before)

        return sent_ahead(
            self.clock, gpu_s, send, self.session.receive, lambda answer: self._take(sent[0], answer.parts[0])
        )

    def _sample(self) -> array[int]:
        self.steps += 1
        return array("I", sampled(self.steps, len(self.builder)))

    def _part(self, tokens: array[int] | None, extra: int) -> Part:
        """Append a token to each request; each row asks for one token more."""
        builder = self.builder
        if extra != self.extra:
            self.extra, builder.extra[:] = extra, array("i", [extra]) * len(builder)
        if tokens is not None:
            self.sampled.append(tokens)
            builder.tokens[:] = tokens
        return builder.part(appended=tokens is not None)

    def _take(self, part: Part, result: PartResult) -> None:
        """Apply the grants: here every row gets its one token."""
        self.tables.update(part, result)
        assert result.granted.count(1) == len(self.builder)

    # -- admission ---------------------------------------------------------------------------------------------------

    def measure_admission(self, seed: int, num_tokens: int, algorithm: HashAlgorithm) -> tuple[int, int]:
        """Hash a prompt, send it, take its hit and its tables; then finish and free it. Nanoseconds, and the hit."""
        tokens = prompt(seed, num_tokens)
        scheme = HashScheme.named(self.shape.unit, algorithm)
        begin = perf_counter_ns()
        news = News([0], [num_tokens], num_hashes=[num_tokens // self.shape.unit])
        news.hashes = RequestHasher(scheme).append(pack_tokens(tokens))
        hit, granted = self._admit(news)[0]
        took = perf_counter_ns() - begin
        if hit + granted < num_tokens:
            self._apply(Part(run=Run([0])))
        self._apply(Part(facts=Facts(slot=[0], end=[End.FREE])))
        return took, hit

    def _admission(self, slots: list[int], prompts: list[list[int]]) -> None:
        """Admit prompts, and compute what is left of them."""
        lengths = [len(tokens) for tokens in prompts]
        news = News(slots, lengths, tokens=array("I", chain.from_iterable(prompts)))
        found = zip(slots, lengths, self._admit(news), strict=True)
        left = [slot for slot, length, (hit, granted) in found if hit + granted < length]
        if left:
            self._apply(Part(run=Run(left)))

    def _admit(self, news: News) -> list[tuple[int, int]]:
        """One step; the hit and the granted tokens of each request."""
        result = self._apply(Part(news=news, admit=Admit(slot=news.slot)))
        assert set(result.admit_status) == {AdmitStatus.GRANTED}
        return list(zip(result.admit_hit, result.admit_granted, strict=True))

    def _apply(self, part: Part) -> PartResult:
        result = self.session.apply(part).parts[0]
        self.tables.update(part, result)
        return result
