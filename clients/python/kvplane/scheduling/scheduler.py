"""The scheduler: queues, the rows of the next step, and what its result changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from itertools import chain, islice

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
    OnRefusal,
    Part,
    PartResult,
    Resume,
    RowFlag,
)
from kvplane.scheduling.requests import NO_SLOT, Counts, Limits, Request, Scheduled
from kvplane.session.rows import AdmitRow, FactRow, NewsRow, PrefetchRow, ResumeRow, Row, RunRow, part_of, resume_of
from kvplane.session.tables import BlockTables

MAX_IDLE_STEPS = 8
MAX_NEWS_TOKENS = 1 << 21  # prompt tokens after which a step announces no further request, to bound its message


class Scheduler:
    """The queues, limits and block tables of one engine life. Not thread-safe.

    Attributes:
        counts: counters since the start.
    """

    def __init__(self, spec: ReplicaSpec, limits: Limits) -> None:
        """Start with empty queues. Raises InvalidArgument if the replica keeps states for fewer than
        `limits.num_drafts` drafts.
        """
        _check_drafts(spec, limits.num_drafts)
        self.counts = Counts()
        self._limits = limits
        self._budget = Budget(tokens=limits.token_budget)
        self._tables = BlockTables(len(spec.groups))
        self._max_model_len = spec.max_model_len
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._by_slot: list[Request | None] = []
        self._free_slots: list[int] = []
        self._facts: list[FactRow] = []
        self._lost_steps: list[int] = []
        self._has_unreported_loss = False
        self._finished: list[Request] = []
        self._idle_steps = 0
        self._open_loads = set[int]()
        self._is_resetting = False

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running, or the end of a request was not reported to the service yet."""
        return bool(self._waiting or self._running or self._facts or self._lost_steps or self._is_resetting)

    @property
    def is_resetting(self) -> bool:
        """Whether `reset` has not been carried out."""
        return self._is_resetting

    @property
    def num_running(self) -> int:
        """The number of requests that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """The number of requests in the queue."""
        return len(self._waiting)

    @property
    def waiting(self) -> Sequence[Request]:
        """The waiting requests, the next one to be admitted first."""
        return self._waiting

    def add(self, request: Request) -> None:
        """Append a request to the queue. Raises InvalidArgument if it can become longer than `max_model_len`."""
        if request.max_tokens > self._max_model_len:
            raise InvalidArgument(
                f"the request may have {request.max_tokens} tokens, more than max_model_len, {self._max_model_len}",
                field="prompt",
                remedy="shorten the prompt, or lower max_new_tokens",
            )
        request.arrived = self.counts.steps
        self._waiting.append(request)

    def abort(self, request: Request) -> None:
        """End a request between two steps; its blocks return to the pool with the next step. Does nothing if the
        request has ended.
        """
        if request in self._running:
            self._running.remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        else:
            return
        request.error = "aborted"
        self.counts.aborted += 1
        pending = next((fact for fact in self._facts if fact.slot == request.slot), None)
        if pending is not None:
            self._facts.remove(pending)
        self._end(request, replace(pending or FactRow(request.slot), end=End.FREE))

    @property
    def loading(self) -> list[Request]:
        """The running requests that wait for a load from a tier."""
        return [request for request in self._running if request.load]

    @property
    def awaits_loads(self) -> bool:
        """Whether a load has not ended: until its end is reported its blocks are not free, even if no request waits."""
        return bool(self._open_loads)

    def give_up_load(self, request: Request) -> None:
        """Let a request wait no longer for its load, between two steps: it returns to the head of the queue, and
        computes what is not on the device. Its blocks stay with the load until the end of the job is reported.
        """
        if request.load:
            self._start_again(request)
            request.may_load = False
            self.counts.loads_given_up += 1

    def reset(self) -> None:
        """Drop every key, between two steps: let every running request start again, and admit none until the service
        has done it and `is_resetting` is False. That is after the next step, or after the loads in flight have ended.
        """
        for request in reversed(self._running):
            self._start_again(request)
        self._is_resetting = True

    def distrust(self, blocks: Set[int], requests: Iterable[Request]) -> None:
        """Let every running request that holds one of these blocks start again, between two steps, and `requests` look
        up nothing when they do: the content of the blocks is wrong. List them in `Cache.evicted` of the next part.
        """
        for request in [one for one in self._running if not blocks.isdisjoint(chain(*self._tables[one.slot]))]:
            self._start_again(request)
        for request in requests:
            request.may_hit = False

    def _start_again(self, request: Request) -> None:
        self._facts.append(FactRow(request.slot, end=End.PREEMPTED))
        self._preempt([request.slot])

    def known_requests(self) -> tuple[News, tuple[int, ...]]:
        """Return the announced requests with their current tokens, and the slots of the running ones, for a reopened
        session.
        """
        announced = [request for request in self._by_slot if request is not None]
        news = part_of(*(request.news_row() for request in announced)).news
        return news, tuple(request.slot for request in self._running)

    def resume(self) -> Resume | None:
        """Return the running requests with the blocks that they hold, for a service that continues with them. Those
        that wait for a load are left out, and so preempted: the new service does not know the job.

        Returns None while a failed launch is unreported: the service decides which requests have used that launch's
        pages.
        """
        if self._has_unreported_loss:
            return None
        return resume_of(
            [
                ResumeRow(one.slot, one.computed, self._tables[one.slot], len(one.prompt), launch_end=one.launch_end)
                for one in self._running
                if not one.load
            ]
        )

    # -- the next step -----------------------------------------------------------------------------------------------

    def plan(self) -> Part:
        """Return the part of the next step: the results of the last launch, then the rows to run and to admit."""
        rows: list[Row] = [*self._facts, *map(self._run_row, self._running), *self._admissions(), *self._prefetches()]
        cache = Cache(failed_steps=self._lost_steps, reset=self._is_resetting)
        part = part_of(*rows, budget=self._budget, cache=cache)
        part.admit.max_running = self._limits.max_running
        part.admit.only_if_no_preemption = True
        if self._may_pass:
            part.admit.on_refusal = OnRefusal.SKIP
        self._facts, self._lost_steps = [], []
        return part

    @property
    def _may_pass(self) -> int:
        """How many requests may be admitted before the head of the queue. Whatever passes a request passes all before
        it, so no other was passed by more.
        """
        return max(self._limits.passed_by - self._waiting[0].passed, 0) if self._waiting else 0

    def _run_row(self, request: Request) -> RunRow:
        limits, is_decode = self._limits, request.computed == request.num_tokens - 1
        if limits.num_drafts:
            most = min(limits.num_drafts, self._max_model_len - request.num_tokens)
            request.drafts = limits.drafter(request.tokens, most) if is_decode else []
        cap = UNLIMITED if is_decode else limits.chunk_tokens
        return RunRow(request.slot, extra=len(request.drafts), cap=cap, lookahead=limits.lookahead)

    def _admissions(self) -> Iterator[Row]:
        """Yield admit rows for the head of the queue, each after a news row if the service does not know the request
        yet.
        """
        limits, announced = self._limits, 0
        places = 0 if self._is_resetting else min(limits.max_running - len(self._running), limits.admit_rows)
        if self._may_pass and places > 0:
            places = min(limits.admit_rows, self._may_pass + 1)
        for request in islice(self._waiting, max(0, places)):
            if request.slot == NO_SLOT:
                if announced > MAX_NEWS_TOKENS:
                    return
                announced += request.num_tokens
                yield self._announced(request)
            flags = limits.admit_flags if request.may_load else limits.admit_flags & ~RowFlag.LOAD
            most = UNLIMITED if request.may_hit else 0
            yield AdmitRow(
                request.slot, cap=limits.chunk_tokens, lookahead=limits.lookahead, flags=flags, hit_limit=most
            )

    def _prefetches(self) -> Iterator[Row]:
        """Yield a row for each request near the head of the queue that no step has prefetched, with a news row as
        `_admissions`. One that this step admits has none of its blocks copied.
        """
        for request in islice(self._waiting, self._limits.prefetch_rows):
            if request.is_prefetched:
                continue
            if request.slot == NO_SLOT:
                yield self._announced(request)
            request.is_prefetched = True
            yield PrefetchRow(request.slot)

    def _announced(self, request: Request) -> NewsRow:
        """Give the request a slot, and return the row that announces it."""
        if not self._free_slots:
            self._free_slots.append(len(self._by_slot))
            self._by_slot.append(None)
        request.slot = self._free_slots.pop()
        self._by_slot[request.slot] = request
        row, waited = request.news_row(), self.counts.steps - request.arrived
        return replace(row, waited=waited) if waited else row

    # -- its result --------------------------------------------------------------------------------------------------

    def update(self, part: Part, result: PartResult) -> list[Scheduled]:
        """Apply the result of a planned part. Returns the rows to compute, running requests first."""
        self._tables.update(part, result)
        self._end_loads(part.cache)
        self._has_unreported_loss = False
        self._is_resetting = self._is_resetting and not result.reset_done
        self.counts.steps += 1
        self.counts.copies += len(result.orders.copy_src)
        lost = set(result.preempted)  # what the part granted them before is not computed
        granted = zip(part.run.slot, result.granted, strict=True)
        scheduled = [
            self._schedule(self._request(slot), count) for slot, count in granted if count and slot not in lost
        ]
        self._preempt(result.preempted)
        scheduled += self._admit(part, result)
        has_progress = bool(scheduled or result.preempted or part.facts.slot or self._open_loads or part.cache.reset)
        self._check_progress(has_progress or not self.has_work)
        return scheduled

    def _end_loads(self, cache: Cache) -> None:
        over = {*cache.jobs_done, *cache.jobs_failed}
        self._open_loads = {job for job in self._open_loads - over if job >= cache.jobs_before}
        for request in self.loading if over else ():
            request.load = 0 if request.load in over else request.load

    def _request(self, slot: int) -> Request:
        request = self._by_slot[slot]
        assert request is not None, f"slot {slot} has no request"
        return request

    def _admit(self, part: Part, result: PartResult) -> Iterator[Scheduled]:
        """Move admitted requests from the queue to the running ones, and yield a row for each that computes tokens."""
        rows = zip(part.admit.slot, result.admit_status, result.admit_hit, result.admit_granted, strict=True)
        earlier = list[Request]()  # that stay in the queue
        for row, (slot, status, hit, granted) in enumerate(rows):
            request = self._request(slot)
            if status == AdmitStatus.GRANTED:
                for one in earlier:
                    one.passed += 1
                self._waiting.remove(request)
                self._running.append(request)
                request.computed = request.launch_end = hit
                request.hits.append(hit)
                self.counts.hits += hit > 0
                self.counts.hit_tokens += hit
                self._note_admission(request, row, result)
                if granted:
                    yield self._schedule(request, granted)
            elif status == AdmitStatus.NEVER_FITS:
                self._waiting.remove(request)
                request.error = f"{request.num_tokens} tokens need more blocks than the pool has"
                self.counts.refused += 1
                self._end(request, FactRow(slot, end=End.FREE))
            else:
                earlier.append(request)
                self.counts.deferred += status == AdmitStatus.DEFERRED

    def _note_admission(self, request: Request, row: int, result: PartResult) -> None:
        request.may_load = request.may_hit = request.is_admitted = True
        request.load = result.admit_job[row] if result.admit_job else 0
        if request.load:
            self._open_loads.add(request.load)
            self.counts.loads += 1
            self.counts.loaded_tokens += result.admit_tier_tokens[row]

    def _preempt(self, slots: Sequence[int]) -> None:
        """Move preempted requests to the head of the queue. They keep their tokens, of which none counts as
        computed.
        """
        for slot in slots:
            request = self._request(slot)
            self._running.remove(request)
            request.computed, request.drafts, request.load = 0, [], 0
            if self._waiting:
                request.passed = max(request.passed, self._waiting[0].passed)
            self._waiting.appendleft(request)
            self.counts.preempted += 1

    def _schedule(self, request: Request, count: int) -> Scheduled:
        is_admission, request.is_admitted = request.is_admitted, False
        num_outputs = max(0, request.computed + count - (request.num_tokens - 1))
        tables = self._tables[request.slot]
        return Scheduled(request, request.computed, count, num_outputs, tables, is_admission)

    def _check_progress(self, has_progress: bool) -> None:
        """Raise InternalError after many steps in which nothing happened: the loop would never end."""
        self._idle_steps = 0 if has_progress else self._idle_steps + 1
        if self._idle_steps > MAX_IDLE_STEPS:
            stuck = f"stuck with {self.num_running} running and {self.num_waiting} waiting requests"
            raise InternalError(f"{stuck}: nothing happened in {self._idle_steps} steps", remedy="run kvplane doctor")

    # -- what the launch computed ------------------------------------------------------------------------------------

    def finish_row(self, row: Scheduled, sampled: Sequence[int]) -> int:
        """Record the tokens that a complete launch sampled for one of its rows; return how many the request gained.

        `sampled` has one token after each of the row's last `num_outputs` tokens. Drafts are accepted up to the first
        one that differs from the sampled token; the token sampled after the accepted ones is appended too. A request
        that now has its last token is in the next `take_finished`. Raises InvalidArgument for another length.
        """
        request = row.request
        if request.error:
            return 0  # aborted during the launch
        if len(sampled) != row.num_outputs:
            raise InvalidArgument(
                f"there are {len(sampled)} sampled tokens for a row with {row.num_outputs} outputs",
                field="sampled",
                remedy="give one token after each of the row's last num_outputs tokens",
            )
        accepted = self._accept(row, sampled)
        self.counts.computed_tokens += row.num_tokens
        self.counts.generated_tokens += accepted
        rejected = max(0, row.num_outputs - accepted)
        request.computed, request.launch_end = row.end - rejected, row.end
        if not row.num_outputs:
            return 0  # a chunk of the prompt
        fact = request.content(accepted)
        if request.is_done:
            self._running.remove(request)
            self.counts.completed += 1
            self._end(request, replace(fact, end=End.FREE))
            return accepted
        commits = self._limits.commits and row.num_outputs > 1
        if rejected or commits:
            changes = request.computed if rejected else UNCHANGED, request.computed if commits else UNCHANGED
            fact = replace(fact, computed=changes[0], commit=changes[1])
        self._facts.append(fact)
        return accepted

    def lose_step(self, seq: int) -> None:
        """Record that the launch of step `seq` failed. The next part reports it to the service.

        Call it before the session reports the step as executed. The next result preempts the requests to which that
        step granted tokens, and requests that use its cached blocks.
        """
        self._lost_steps.append(seq)
        self._has_unreported_loss = True
        self.counts.lost_steps += 1

    def take_finished(self) -> list[Request]:
        """Return the requests that ended since the last call, complete or with an `error`."""
        finished, self._finished = self._finished, []
        return finished

    def _accept(self, row: Scheduled, sampled: Sequence[int]) -> int:
        """Append the accepted tokens to the request and return their number."""
        request, drafts = row.request, list[int]()
        if row.num_outputs > 1:
            drafts = request.drafts[: row.num_outputs - 1]
        right = next((at for at, guess in enumerate(drafts) if guess != sampled[at]), len(drafts))
        self.counts.accepted_drafts += right
        self.counts.rejected_drafts += len(drafts) - right
        for count, token in enumerate(sampled[: right + 1], 1):
            if request.is_done:
                return count - 1
            request.append(token)
        return min(len(sampled), right + 1)

    def _end(self, request: Request, fact: FactRow) -> None:
        if request.slot != NO_SLOT:
            self._facts.append(replace(fact, hint=request.hint) if request.hint else fact)
            self._by_slot[request.slot] = None
            self._free_slots.append(request.slot)
            request.slot = NO_SLOT
        self._finished.append(request)


def _check_drafts(spec: ReplicaSpec, num_drafts: int) -> None:
    for group in spec.groups:
        if group.kind is GroupKind.MAMBA and min(group.speculative_blocks, group.block_size - 1) < num_drafts:
            raise InvalidArgument(
                f"{num_drafts} drafts, but the replica keeps {group.speculative_blocks} states for drafts, and a block "
                f"has {group.block_size} tokens",
                field="num_drafts",
                remedy="give at most as many drafts as states, and fewer than the tokens of a block",
            )
