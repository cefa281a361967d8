"""Continuous batching on a kvplane session: what is asked of the service at each step, and what its answer means.

    facts of the last step, new requests, running, waiting  ->  Part  ->  service
    rows to compute, with their pages                       <-  answer
    the tokens chosen from their logits                     ->  facts of the next step

The service runs the loop over amounts and refusals; the engine says its order and its budgets. No block is ever chosen
here, and none is read that the answers did not name.
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
        max_running: requests that run at once.
        token_budget: tokens computed in one step.
        chunk_tokens: most prompt tokens of one request in a step.
        admit_rows: admissions asked for in one step.
        num_drafts: most drafts per request and step; with recurrent state at most its speculative blocks.
        lookahead: slots asked for beyond the drafts.
        commits: report accepted tokens at once, so that their blocks can be hit a step earlier.
        drafter: makes the guesses.
        report_lag: steps are told to be executed so many steps late, as when several are in flight: at most 3, and 2
            where launches may fail (the service takes 4).
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
    """What happened; every field only grows."""

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
    """A request's part of the step: `row.tokens` are known tokens, then drafts."""

    request: Request
    row: batch.Row


class Scheduler:
    """Queues and amounts of one engine life.

    Attributes:
        counts: so far.
    """

    def __init__(self, spec: ReplicaSpec, config: SchedulerConfig) -> None:
        """Raise InvalidArgument when states are kept beside the running one for fewer drafts than asked for."""
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
        self._untold_loss = False
        self._finished: list[Request] = []
        self._by_slot: dict[int, Request] = {}
        self._idle_steps = 0
        self.counts = Counts()

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running, or the service was not told yet that one has ended."""
        return bool(self._waiting or self._running or self._facts or self._lost_steps)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidArgument when it could never end within max_model_len."""
        longest = len(request.prompt) + request.max_new
        if not request.prompt or request.max_new < 1 or longest > self._max_model_len:
            raise InvalidArgument(
                f"{len(request.prompt)} prompt tokens and {request.max_new} more",
                field="prompt",
                remedy=f"give 1 or more of each, {self._max_model_len} together at most",
            )
        self._waiting.append(request)

    def known_requests(self) -> tuple[News, tuple[int, ...]]:
        """Requests that the service was told of, as they are now, and the slots of those that hold blocks."""
        news = part_of(*map(_news_of, self._by_slot.values())).news
        return news, tuple(request.slot for request in self._running)

    def resume(self) -> Resume | None:
        """What the running requests hold, for a service that goes on with them.

        None while a launch that failed has not been told: who hit the pages that it left is for the service to say.
        """
        if self._untold_loss:
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

    # -- what is asked -----------------------------------------------------------------------------------------------

    def plan(self) -> Part:
        """The next step's program."""
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
        """Rows for the head of the queue, and news of those that the service does not know yet."""
        places = min(self._config.max_running - len(self._running), self._config.admit_rows)
        for request in islice(self._waiting, max(0, places)):
            if request.slot == NO_SLOT:
                request.slot = next(slot for slot in count() if slot not in self._by_slot)
                self._by_slot[request.slot] = request
                yield _news_of(request)
            yield AdmitRow(request.slot, cap=self._config.chunk_tokens, lookahead=self._config.lookahead)

    # -- what is answered --------------------------------------------------------------------------------------------

    def settle(self, part: Part, result: PartResult) -> list[Scheduled]:
        """Make the answer true; the rows to compute."""
        self._tables.update(part, result)
        self._untold_loss = False
        self.counts.steps += 1
        self.counts.copies += len(result.orders.copy_src)
        scheduled = [
            self._schedule(self._by_slot[slot], granted)
            for slot, granted in zip(part.run.slot, result.granted, strict=True)
            if granted
        ]
        self._preempt(result.preempted)
        scheduled += [self._schedule(request, granted) for request, granted in self._admitted(part, result)]
        self._watch(bool(scheduled or result.preempted or part.facts.slot))
        return scheduled

    def _admitted(self, part: Part, result: PartResult) -> Iterator[tuple[Request, int]]:
        """Move what was admitted from the queue to the running requests."""
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
        """Back to the front of the queue, in an order that keeps the oldest first."""
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

    def _watch(self, moved: bool) -> None:
        """Steps in which nothing can happen would go on for ever: that is a bug of one side, and loud."""
        self._idle_steps = 0 if moved else self._idle_steps + 1
        if self._idle_steps > MAX_IDLE_STEPS:
            raise InternalError(f"stuck with {self.num_running} running and {self.num_waiting} waiting requests")

    # -- what was computed -------------------------------------------------------------------------------------------

    def take(self, scheduled: list[Scheduled], logits: Tensor) -> None:
        """Choose tokens from the logits of a launch, [outputs, vocabulary], rows one after the other."""
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
        """The launch of this step failed: the service must know before it counts as executed.

        Its answer to the next step preempts the requests that the step granted tokens, and whoever hit their pages.
        """
        self._lost_steps.append(seq)
        self._untold_loss = True
        self.counts.lost_steps += 1

    def take_finished(self) -> list[Request]:
        """Requests that ended since the last call: with their last token, or given up with `error`."""
        finished, self._finished = self._finished, []
        return finished

    def _accept(self, one: Scheduled, following: list[int]) -> list[int]:
        """The tokens that join the request: drafts as long as they are what was chosen, and one more."""
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
        """Note where the request stands; its facts for the next step."""
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
                remedy="draft at most as many tokens as states are kept for, and less than a block",
            )
