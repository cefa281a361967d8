"""An engine in virtual time on a real session with the service. It computes nothing: the outputs of requests are those
of the trace.

The loop is `kvplane.scheduling`. This module adds the requests of a trace, which send hashes instead of tokens, the
clock, and the counts. Of a replica with tiers, movers end every job some steps after its order; nothing is moved.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Protocol

from kvplane.base.groups import ReplicaSpec
from kvplane.base.hashing import HashScheme
from kvplane.base.step import AdmitStatus, End, Part, PartResult, RowFlag, StepResult
from kvplane.scheduling import Limits, Request, Scheduler
from kvplane_tools.replay.plan import CostModel, EngineConfig
from kvplane_tools.replay.requests import LiveRequest, ReplayedRequest
from kvplane_tools.replay.summary import Refusal, Tally
from kvplane_tools.replay.workloads import TraceRequest

TOO_LONG = "longer than max_model_len"
NEVER_FITS = "never fits the empty pool"


class StepSession(Protocol):
    """The part of `kvplane.Session` that the engine uses."""

    waiting_requests: int | None

    @property
    def spec(self) -> ReplicaSpec:
        """The settings of the replica."""

    def submit(self, *parts: Part) -> int:
        """Send one complete step without waiting, and return its number."""

    def receive(self) -> StepResult:
        """Wait for the next result."""


class Engine:
    """The engine of one replica. Every submitted request ends in `completed` or in `refusals`.

    Attributes:
        spec: settings of the replica.
        clock_ns: virtual time in nanoseconds.
        completed: number of requests that generated all their tokens.
        refusals: the requests that were refused.
        tally: counts from the results of steps.
    """

    def __init__(self, session: StepSession, config: EngineConfig, cost: CostModel) -> None:
        self.spec = session.spec
        self.clock_ns = 0
        self.completed = 0
        self.refusals: list[Refusal] = []
        self.tally = Tally(num_groups=len(self.spec.groups), num_tiers=len(self.spec.tiers))
        self._session = session
        self._config = config
        self._cost = cost
        self._scheme = HashScheme.of(self.spec)
        flags = RowFlag.FULL_FIT | (RowFlag.LOAD if self.spec.tiers else RowFlag.NONE)
        limits = Limits(config.max_running, config.token_budget, admit_rows=config.admit_rows, admit_flags=flags)
        self._scheduler = Scheduler(self.spec, limits)
        self._jobs: deque[list[int]] = deque([[] for _ in range(config.mover_steps)])  # those that a step reports

    @property
    def num_waiting(self) -> int:
        """The number of requests in the queue."""
        return self._scheduler.num_waiting

    @property
    def num_running(self) -> int:
        """The number of requests that hold blocks."""
        return self._scheduler.num_running

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self.num_waiting or self.num_running)

    def submit(self, request: TraceRequest | ReplayedRequest) -> None:
        """Append a request to the queue. A request that is longer than max_model_len with its output is refused."""
        if isinstance(request, TraceRequest):
            request = LiveRequest(request, self._config.max_output, self._scheme, self.spec.hint_values)
        if request.max_tokens > self.spec.max_model_len:
            detail = f"{request.max_tokens} tokens with its output, more than max_model_len, {self.spec.max_model_len}"
            self.refusals.append(Refusal(request.request_id, TOO_LONG, detail))
            return
        self._scheduler.add(request)

    def step(self) -> None:
        """Run one step: send it, hash the next prompts while the service decides, and apply the result."""
        part, answer = self._exchange()
        self._compute(part, answer)
        for request in self._scheduler.take_finished():
            self._finish(request)

    def finish(self) -> None:
        """Report the end of the last requests to the service. No request may be left."""
        assert not self.has_work, "finish comes after the last request"
        if self._scheduler.has_work:
            self._scheduler.update(*self._exchange())

    def _exchange(self) -> tuple[Part, PartResult]:
        part = self._scheduler.plan()
        part.cache.jobs_done = self._jobs.popleft()
        self.tally.ended += list(part.facts.end).count(End.FREE)
        self._session.waiting_requests = self.num_waiting
        self._session.submit(part)
        for request in islice(self._scheduler.waiting, self._config.admit_rows):
            assert isinstance(request, ReplayedRequest), "only requests of workloads are queued"
            request.hash_prompt()
        (answer,) = self._session.receive().parts
        self.tally.count(part, answer)
        orders = answer.orders
        self._jobs.append([*dict.fromkeys(orders.load_job), *orders.save_job, *orders.move_job])
        return part, answer

    def _count_admissions(self, part: Part, answer: PartResult) -> None:
        """Count what the answer admits, before it leaves the queue. A request that loads computes later."""
        waiting = {request.slot: request for request in islice(self._scheduler.waiting, self._config.admit_rows)}
        rows = zip(part.admit.slot, answer.admit_status, answer.admit_hit, answer.admit_granted, strict=True)
        for slot, status, hit, granted in rows:
            if status == AdmitStatus.GRANTED:
                request = waiting[slot]
                self.tally.count_admission(request.num_tokens, hit, granted, bool(request.hits))

    def _compute(self, part: Part, answer: PartResult) -> None:
        """Advance the clock by the cost of the launch, and append a token to each request that has computed all its
        tokens.
        """
        self._count_admissions(part, answer)
        rows = self._scheduler.update(part, answer)
        decode_rows = answer.granted.count(1)
        self.clock_ns += self._cost.step_ns(sum(row.num_tokens for row in rows) - decode_rows, decode_rows)
        for row in rows:
            self._scheduler.finish_row(row, [0] * row.num_outputs)

    def _finish(self, request: Request) -> None:
        """Record that a request ended: complete, or refused because its tokens need more blocks than the pool has."""
        if request.error:
            detail = f"{request.num_tokens} tokens, the pool has {self.spec.num_blocks - 1} blocks"
            self.refusals.append(Refusal(request.request_id, NEVER_FITS, detail))
            return
        assert isinstance(request, ReplayedRequest), "only requests of workloads are queued"
        self.completed += 1
        self.tally.prompt_tokens += request.num_prompt
        self.tally.generated_tokens += request.num_tokens - request.num_prompt
