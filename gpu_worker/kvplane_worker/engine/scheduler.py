"""Continuous batching on a kvplane session: builds the part of each step, and applies its result.

    facts of the last step, new requests, running, waiting  ->  Part  ->  service
    rows to compute, with their pages                       <-  result
    the tokens chosen from their logits                     ->  facts of the next step

The engine chooses order and budgets; the service computes amounts and refusals. The scheduler never chooses a block,
and reads only blocks that results name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice

from torch import Tensor

from kvplane.base.errors import InternalError, InvalidArgument
from kvplane.base.groups import GroupKind, ReplicaSpec
from kvplane.base.step import (
    UNCHANGED,
    UNLIMITED,
    AdmitStatus,
    Budget,
    Cache,
    End,
    News,
    Part,
    PartResult,
    Resume,
)
from kvplane.session.rows import AdmitRow, FactRow, NewsRow, ResumeRow, Row, RunRow, part_of, resume_of
from kvplane.session.tables import BlockTables
from kvplane_worker.engine import batch
from kvplane_worker.engine.batch import NO_STATE, state_index
from kvplane_worker.engine.drafter import Drafter, draft
from kvplane_worker.engine.request import NO_SLOT, Request

MAX_IDLE_STEPS = 8


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The engine's limits.

    Attributes:
        max_running: most requests that run at the same time.
        token_budget: most tokens per step.
        chunk_tokens: most prompt tokens of one request in a step.
        admit_rows: most admissions per step.
        num_drafts: most drafts per request and step; with recurrent state at most its speculative blocks.
        lookahead: slots to allocate beyond the drafts.
        commits: commit accepted tokens in the next step, so that their blocks can be hit one step earlier.
        drafter: function that returns draft tokens.
        report_lag: number of steps by which the report of executed steps is delayed, as with several steps in flight:
            at most 3, and 2 where launches may fail (the service accepts 4 steps in flight).
    """

    max_running: int = 8
    token_budget: int = 96
    chunk_tokens: int = UNLIMITED
    admit_rows: int = 4
    num_drafts: int = 3
    lookahead: int = 0
    commits: bool = True
    report_lag: int = 0
    drafter: Drafter = draft


@dataclass(slots=True)
class Counts:
    """Counters since the start."""

    steps: int = 0
    completed: int = 0
    refused: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    hits: int = 0
    hit_tokens: int = 0
    copies: int = 0
    preempted: int = 0
    deferred: int = 0
    accepted_drafts: int = 0
    rejected_drafts: int = 0
    lost_steps: int = 0


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One request's row of a launch; `row.tokens` are known tokens, then drafts."""

    request: Request
    row: batch.Row


class Scheduler:
    """Queue and running requests of one engine life.

    Attributes:
        counts: counters since the start.
    """

    def __init__(self, spec: ReplicaSpec, config: SchedulerConfig) -> None:
        """Raises InvalidArgument when the groups store states for fewer drafts than `config.num_drafts`."""
        self._config = config
        self._tables = BlockTables(len(spec.groups))
        self._state_sizes = {
            number: group.block_size for number, group in enumerate(spec.groups) if group.kind is GroupKind.MAMBA
        }
        _check_drafts(spec, config.num_drafts)
        self._max_model_len = spec.max_model_len
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._facts: list[FactRow] = []
        self._lost_steps: list[int] = []
        self._unreported_loss = False
        self._finished: list[Request] = []
        self._by_slot: dict[int, Request] = {}
        self._idle_steps = 0
        self.counts = Counts()

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running, or facts were not sent to the service yet."""
        return bool(self._waiting or self._running or self._facts or self._lost_steps)

    @property
    def num_running(self) -> int:
        """Number of running requests, which hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidArgument when it does not fit in max_model_len."""
        longest = len(request.prompt) + request.max_new
        if not request.prompt or request.max_new < 1 or longest > self._max_model_len:
            raise InvalidArgument(
                f"{len(request.prompt)} prompt tokens and {request.max_new} to generate",
                field="prompt",
                remedy=f"give at least 1 of each, and at most {self._max_model_len} in total",
            )
        self._waiting.append(request)

    def known_requests(self) -> tuple[News, tuple[int, ...]]:
        """Requests that were sent to the service, in their current state, and the slots of those that hold blocks."""
        news = part_of(*map(_news_of, self._by_slot.values())).news
        return news, tuple(request.slot for request in self._running)

    def resume(self) -> Resume | None:
        """Image of the running requests, with which a restarted service continues them.

        None while a failed launch is not reported: only the service can find the requests that hit its pages.
        """
        if self._unreported_loss:
            return None
        return resume_of(
            [
                ResumeRow(
                    request.slot,
                    request.computed,
                    self._tables[request.slot],
                    len(request.prompt),
                    launch_end=request.launch_end,
                )
                for request in self._running
            ]
        )

    # -- building a part ---------------------------------------------------------------------------------------------

    def plan(self) -> Part:
        """Build the part of the next step."""
        rows: list[Row] = [*self._facts, *map(self._run_row, self._running), *self._admissions()]
        cache = Cache(failed_steps=self._lost_steps)
        self._facts, self._lost_steps = [], []
        part = part_of(*rows, budget=Budget(tokens=self._config.token_budget), cache=cache)
        part.admit.max_running = self._config.max_running
        part.admit.only_if_no_preemption = True
        return part

    def _run_row(self, request: Request) -> RunRow:
        is_decode = request.computed == len(request.tokens) - 1
        request.drafts = self._drafts(request) if is_decode else []
        return RunRow(
            request.slot,
            extra=len(request.drafts),
            cap=UNLIMITED if is_decode else self._config.chunk_tokens,
            lookahead=self._config.lookahead,
        )

    def _drafts(self, request: Request) -> list[int]:
        most = min(self._config.num_drafts, self._max_model_len - len(request.tokens))
        return self._config.drafter(request.tokens, most)

    def _admissions(self) -> Iterator[Row]:
        """Rows for the head of the queue, with news of requests that were not sent to the service yet."""
        places = min(self._config.max_running - len(self._running), self._config.admit_rows)
        for request in islice(self._waiting, max(0, places)):
            if request.slot == NO_SLOT:
                request.slot = next(slot for slot in count() if slot not in self._by_slot)
                self._by_slot[request.slot] = request
                yield _news_of(request)
            yield AdmitRow(request.slot, cap=self._config.chunk_tokens, lookahead=self._config.lookahead)

    # -- applying a result -------------------------------------------------------------------------------------------

    def apply_result(self, part: Part, result: PartResult) -> list[Scheduled]:
        """Apply the result of a step to tables and requests. Returns the rows to compute."""
        self._tables.update(part, result)
        self._unreported_loss = False
        self.counts.steps += 1
        self.counts.copies += len(result.orders.copy_src)
        scheduled = [
            self._schedule(self._by_slot[slot], granted)
            for slot, granted in zip(part.run.slot, result.granted, strict=True)
            if granted
        ]
        self._preempt(result.preempted)
        scheduled += [self._schedule(request, granted) for request, granted in self._admitted(part, result)]
        self._check_progress(bool(scheduled or result.preempted or part.facts.slot))
        return scheduled

    def _admitted(self, part: Part, result: PartResult) -> Iterator[tuple[Request, int]]:
        """Move admitted requests from the queue to the running requests."""
        rows = zip(part.admit.slot, result.admit_status, result.admit_hit, result.admit_granted, strict=True)
        for slot, status, hit, granted in rows:
            request = self._by_slot[slot]
            if status == AdmitStatus.GRANTED:
                self._waiting.remove(request)
                self._running.append(request)
                self._start(request, hit)
                yield request, granted
            elif status == AdmitStatus.NEVER_FITS:
                self._waiting.remove(request)
                request.error = f"{len(request.tokens)} tokens need more blocks than the pool has"
                self._end(request, FactRow(slot, end=End.FREE))
            elif status == AdmitStatus.DEFERRED:
                self.counts.deferred += 1

    def _start(self, request: Request, hit: int) -> None:
        request.computed = request.launch_end = hit
        request.hits.append(hit)
        request.state_at = {group: state_index(hit, size) for group, size in self._state_sizes.items()}
        self.counts.hits += hit > 0
        self.counts.hit_tokens += hit

    def _preempt(self, slots: list[int]) -> None:
        """Return requests to the front of the queue, the oldest first."""
        for slot in slots:
            request = self._by_slot[slot]
            self._running.remove(request)
            request.lose_blocks()
            self._waiting.appendleft(request)
            self.counts.preempted += 1

    def _schedule(self, request: Request, granted: int) -> Scheduled:
        start, known = request.computed, len(request.tokens)
        tokens = [*request.tokens, *request.drafts][start : start + granted]
        tables = self._tables[request.slot]
        states = {group: tables[group][at] if at >= 0 else NO_STATE for group, at in request.state_at.items()}
        num_outputs = max(0, start + granted - (known - 1))
        return Scheduled(request, batch.Row(tokens, start, num_outputs, tables, states))

    def _check_progress(self, moved: bool) -> None:
        """Raise InternalError after MAX_IDLE_STEPS steps without progress, which would otherwise repeat forever."""
        self._idle_steps = 0 if moved else self._idle_steps + 1
        if self._idle_steps > MAX_IDLE_STEPS:
            raise InternalError(f"stuck with {self.num_running} running and {self.num_waiting} waiting requests")

    # -- applying a launch -------------------------------------------------------------------------------------------

    def take(self, scheduled: list[Scheduled], logits: Tensor) -> None:
        """Choose tokens from the logits of a launch, [outputs, vocabulary], in order of the rows."""
        chosen: list[int] = logits.argmax(dim=1).tolist()
        at = 0
        for one in scheduled:
            following = chosen[at : at + one.row.num_outputs]
            accepted = self._accept(one, following)
            if one.request.keep_logits:
                one.request.logits.extend(logits[at : at + len(accepted)].cpu())
            at += one.row.num_outputs
            self._advance(one, accepted)

    def lose_step(self, seq: int) -> None:
        """Record that the launch of this step failed. The next part reports it, before the step counts as executed.

        The result of that part preempts the requests that the step granted tokens, and requests that hit their pages.
        """
        self._lost_steps.append(seq)
        self._unreported_loss = True
        self.counts.lost_steps += 1

    def take_finished(self) -> list[Request]:
        """Requests that ended since the last call: with their last token, or with `error`."""
        finished, self._finished = self._finished, []
        return finished

    def _accept(self, one: Scheduled, following: list[int]) -> list[int]:
        """Append tokens to the request: the drafts that match the chosen tokens, and one more. Returns them."""
        if not following:
            return []
        drafts = one.row.tokens[len(one.row.tokens) - len(following) + 1 :]
        right = next((i for i, guess in enumerate(drafts) if guess != following[i]), len(drafts))
        self.counts.accepted_drafts += right
        self.counts.rejected_drafts += len(drafts) - right
        request, accepted = one.request, []
        for token in following[: right + 1]:
            request.tokens.append(token)
            accepted.append(token)
            if request.is_done:
                break
        return accepted

    def _advance(self, one: Scheduled, accepted: list[int]) -> None:
        """Update the position of the request, and queue its facts for the next step."""
        request, row = one.request, one.row
        self.counts.computed_tokens += len(row.tokens)
        self.counts.generated_tokens += len(accepted)
        rejected = max(0, row.num_outputs - len(accepted))
        request.computed, request.launch_end = row.end - rejected, row.end
        request.state_at = {group: state_index(row.end, size) + rejected for group, size in self._state_sizes.items()}
        if request.is_done:
            self._running.remove(request)
            self._end(request, FactRow(request.slot, tokens=accepted, end=End.FREE))
        elif accepted:
            commits = self._config.commits and row.num_outputs > 1
            self._facts.append(
                FactRow(
                    request.slot,
                    tokens=accepted,
                    computed=request.computed if rejected else UNCHANGED,
                    commit=request.computed if commits else UNCHANGED,
                )
            )

    def _end(self, request: Request, fact: FactRow) -> None:
        self._facts.append(fact)
        del self._by_slot[request.slot]
        self._finished.append(request)
        self.counts.completed += not request.error
        self.counts.refused += bool(request.error)


def _news_of(request: Request) -> NewsRow:
    longest = len(request.prompt) + request.max_new
    return NewsRow(request.slot, request.tokens, request_id=request.name, domain=request.domain, max_tokens=longest)


def _check_drafts(spec: ReplicaSpec, num_drafts: int) -> None:
    for group in spec.groups:
        if group.kind is GroupKind.MAMBA and min(group.speculative_blocks, group.block_size - 1) < num_drafts:
            raise InvalidArgument(
                f"{num_drafts} drafts, {group.speculative_blocks} speculative blocks of {group.block_size} tokens",
                field="num_drafts",
                remedy="set num_drafts to at most the speculative blocks, and below the block size",
            )
