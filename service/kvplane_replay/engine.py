"""The scheduler loop of one engine with continuous batching.

Running requests come first, in order; then admissions from the head of the queue while token budget, places and
blocks last. The engine sends this order and its budgets, and the service answers with decisions: one message each way
per step.

    facts of the last step, new requests, running, waiting  ->  Part  ->  service
    tokens to compute, preempted, admitted with hits        <-  answer
    one sampled token for each request whose known tokens are computed; these are the facts of the next step
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Protocol

from kvplane.base.groups import ReplicaSpec
from kvplane.base.hashing import HashScheme
from kvplane.base.step import (
    Admit,
    AdmitStatus,
    Budget,
    End,
    Facts,
    News,
    OnRefusal,
    Part,
    PartResult,
    RowFlag,
    Run,
    StepResult,
)
from kvplane_replay.plan import CostModel, EngineConfig
from kvplane_replay.requests import NO_SLOT, LiveRequest, SlotTable
from kvplane_replay.summary import Refusal, Tally
from kvplane_replay.workloads import TraceRequest

TOO_LONG = "longer than max_model_len"
NEVER_FITS = "never fits the empty pool"

# Consecutive steps that may compute nothing before the engine fails as stuck. A deferred admission takes one.
_MAX_IDLE_STEPS = 3
_MAX_NEWS_BYTES = 8 << 20


class StepSession(Protocol):
    """The part of `kvplane.Session` that the engine uses."""

    @property
    def spec(self) -> ReplicaSpec:
        """The spec of the replica."""
        ...

    def submit(self, *parts: Part) -> int:
        """Send one complete step without waiting; returns its number."""
        ...

    def receive(self) -> StepResult:
        """Wait for the next answer."""
        ...


class Engine:
    """The scheduler of one replica. Every submitted request ends in `completed` or in `refusals`.

    Attributes:
        spec: spec of the replica.
        clock_ns: virtual time, nanoseconds.
        completed: number of requests that generated all their tokens.
        refusals: the requests that were refused.
        tally: counts of the answers.
    """

    def __init__(self, session: StepSession, config: EngineConfig, cost: CostModel) -> None:
        self.clock_ns = 0
        self.completed = 0
        self.refusals: list[Refusal] = []
        self.tally = Tally(num_groups=len(session.spec.groups))
        self._session = session
        self._config = config
        self._cost = cost
        self.spec = session.spec
        self._scheme = HashScheme.of(session.spec)
        self._slots = SlotTable(session.spec.hash_block_size, session.spec.hash_lookahead_tokens)
        self._waiting: deque[LiveRequest] = deque()
        self._running: list[int] = []
        self._facts = Facts()
        self._idle_steps = 0
        self._budget = Budget(tokens=config.token_budget)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """True while a request is waiting or running."""
        return bool(self._waiting or self._running)

    def submit(self, trace: TraceRequest) -> None:
        """Queue a request that arrives now. One longer than max_model_len, with its output, is refused."""
        request = LiveRequest(trace, self._config.max_output)
        if request.num_tokens > self.spec.max_model_len:
            detail = f"{request.num_tokens} tokens with its output, max_model_len is {self.spec.max_model_len}"
            self.refusals.append(Refusal(trace.name, TOO_LONG, detail))
            return
        self._waiting.append(request)

    def step(self) -> None:
        """Run one step: send it, hash the next prompts while the service decides, apply the answer."""
        part = self._build()
        self._session.submit(part)
        for request in islice(self._waiting, self._config.admit_rows):
            request.hash_prompt(self._scheme)
        (answer,) = self._session.receive().parts
        self.tally.count(part, answer)
        self._apply(part, answer)

    def finish(self) -> None:
        """Send the ends of the last requests. Requires that no work is left."""
        assert not self.has_work, "finish comes after the last request"
        if self._facts.slot:
            part = self._build()
            self._session.submit(part)
            (answer,) = self._session.receive().parts
            self.tally.count(part, answer)

    def _build(self) -> Part:
        facts, self._facts = self._facts, Facts()
        self.tally.ended += facts.end.count(End.FREE)
        news, admit = self._ask_admissions()
        run = Run(slot=list(self._running), on_refusal=OnRefusal.PREEMPT)
        return Part(facts=facts, news=news, run=run, admit=admit, budget=self._budget)

    def _ask_admissions(self) -> tuple[News, Admit]:
        """Admission rows for the head of the queue, and news rows for the unannounced of these requests."""
        places = min(self._config.max_running - len(self._running), self._config.admit_rows)
        news, hashes, news_bytes = News(), [], 0
        admit = Admit(max_running=self._config.max_running, only_if_no_preemption=True)
        for request in islice(self._waiting, max(0, places)):
            if request.slot == NO_SLOT:
                if news_bytes > _MAX_NEWS_BYTES:
                    break
                hashes.append(self._announce(request, news))
                news_bytes += len(hashes[-1])
            admit.slot.append(request.slot)
        news.hashes = b"".join(hashes)
        admit.flags = [int(RowFlag.FULL_FIT)] * len(admit.slot)
        return news, admit

    def _announce(self, request: LiveRequest, news: News) -> bytes:
        request.hash_prompt(self._scheme)
        hashes = request.take_prompt_hashes()
        news.slot.append(self._slots.take(request))
        news.num_tokens.append(request.num_prompt)
        news.num_hashes.append(len(hashes) // self._scheme.digest.size)
        news.request_id.append(request.trace.name)
        news.max_tokens.append(request.num_tokens)
        return hashes

    def _apply(self, part: Part, answer: PartResult) -> None:
        """Apply the answer: compute, admit, preempt, advance the clock, sample."""
        reached = self._compute(part.run.slot, answer.granted)
        scheduled = sum(answer.granted) + self._admit(len(part.admit.slot), answer, reached)
        if answer.preempted:
            preempted = set(answer.preempted)
            self._preempt(answer.preempted, preempted)
            reached = [slot for slot in reached if slot not in preempted]
        decode_rows = answer.granted.count(1)
        self.clock_ns += self._cost.step_ns(scheduled - decode_rows, decode_rows)
        self._sample(reached)
        self._check_progress(scheduled > 0 or bool(answer.preempted or self._facts.slot))

    def _compute(self, slots: list[int], granted: list[int]) -> list[int]:
        """Add the granted tokens; returns the slots with no token left to compute."""
        computed, known = self._slots.computed, self._slots.known
        reached = []
        for slot, tokens in zip(slots, granted, strict=True):
            if tokens:
                computed[slot] += tokens
                if computed[slot] == known[slot]:
                    reached.append(slot)
        return reached

    def _admit(self, num_rows: int, answer: PartResult, reached: list[int]) -> int:
        """Move admitted requests from the queue to the running ones; returns the number of scheduled tokens."""
        head = [self._waiting.popleft() for _ in range(num_rows)]
        stay, scheduled = [], 0
        for request, status, hit, granted in zip(
            head, answer.admit_status, answer.admit_hit, answer.admit_granted, strict=True
        ):
            if status == AdmitStatus.GRANTED:
                scheduled += granted
                self._start(request, hit, granted)
                if hit + granted == self._slots.known[request.slot]:
                    reached.append(request.slot)
            elif status == AdmitStatus.NEVER_FITS:
                self._give_up(request)
            else:
                stay.append(request)
        self._waiting.extendleft(reversed(stay))
        return scheduled

    def _start(self, request: LiveRequest, hit: int, granted: int) -> None:
        slot = request.slot
        self.tally.count_admission(self._slots.known[slot], hit, granted, request.admitted)
        request.admitted = True
        self._slots.computed[slot] = hit + granted
        self._running.append(slot)

    def _preempt(self, slots: list[int], preempted: set[int]) -> None:
        """Return requests to the front of the queue: all tokens stay known, none is computed."""
        self._running = [slot for slot in self._running if slot not in preempted]
        for slot in slots:
            self._slots.computed[slot] = 0
            self._waiting.appendleft(self._slots.holder(slot))

    def _give_up(self, request: LiveRequest) -> None:
        """Refuse a request whose known tokens alone exceed the pool."""
        detail = f"{self._slots.known[request.slot]} tokens, the pool has {self.spec.num_blocks - 1} blocks"
        self.refusals.append(Refusal(request.trace.name, NEVER_FITS, detail))
        self._end(request.slot, appended=0, hashes=b"")

    def _sample(self, reached: list[int]) -> None:
        """Append one token to each request whose known tokens are computed; end it with its last token."""
        slots, ended = self._slots, set()
        for slot in reached:
            request = slots.holder(slot)
            appended = min(1, request.num_tokens - slots.known[slot])
            slots.known[slot] += appended
            hashes = slots.hash_if_due(slot)
            if slots.known[slot] < request.num_tokens:
                self._add_fact(slot, appended, hashes, End.NONE)
            else:
                ended.add(slot)
                self._complete(request)
                self._end(slot, appended, hashes)
        if ended:
            self._running = [slot for slot in self._running if slot not in ended]

    def _complete(self, request: LiveRequest) -> None:
        self.completed += 1
        self.tally.prompt_tokens += request.num_prompt
        self.tally.generated_tokens += request.num_tokens - request.num_prompt

    def _end(self, slot: int, appended: int, hashes: bytes) -> None:
        self._add_fact(slot, appended, hashes, End.FREE)
        self._slots.release(slot)

    def _add_fact(self, slot: int, appended: int, hashes: bytes, end: End) -> None:
        facts = self._facts
        facts.slot.append(slot)
        facts.appended.append(appended)
        facts.num_hashes.append(len(hashes) // self._scheme.digest.size)
        facts.hashes += hashes
        facts.end.append(end)

    def _check_progress(self, has_progress: bool) -> None:
        """Fail on repeated steps without progress: the loop would never end, which is a bug of engine or service."""
        self._idle_steps = 0 if has_progress else self._idle_steps + 1
        assert self._idle_steps < _MAX_IDLE_STEPS, (
            f"{self._idle_steps} steps computed nothing, with {self.num_running} running and {self.num_waiting} waiting"
        )
