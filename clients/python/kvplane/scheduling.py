"""The scheduler of an engine with continuous batching, as a state machine without I/O.

    scheduler = Scheduler(session.spec, Limits(token_budget=2048))
    scheduler.add(Request("r-1", prompt, max_new_tokens=64))
    while scheduler.has_work:
        part = scheduler.plan()
        result = session.apply(part).parts[0]
        for row in scheduler.update(part, result):         # the rows of one launch
            scheduler.finish_row(row, sample(row))         # one token behind each of the last `num_outputs` tokens
        finished = scheduler.take_finished()

It keeps the queues, chunks of prompts, drafts, preemptions, aborts and block tables that every engine needs. The
service decides how many tokens each row gets and which blocks; the engine gives its order, its limits and its tokens.
A launch is complete before the next step is planned. An engine that hashes tokens itself overrides `Request.news_row`,
`append` and `content`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

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
    RowFlag,
)
from kvplane.session.rows import AdmitRow, FactRow, NewsRow, ResumeRow, Row, RunRow, part_of, resume_of
from kvplane.session.tables import BlockTables

NO_SLOT = -1
MAX_IDLE_STEPS = 8
MAX_NEWS_TOKENS = 1 << 21  # of the prompts that one step announces, so that its message stays below its limit

Drafter = Callable[[Sequence[int], int], list[int]]  # (tokens of a request, most drafts) -> guesses of the next tokens


def no_drafts(tokens: Sequence[int], most: int) -> list[int]:
    """The drafter of an engine that does not speculate."""
    del tokens, most
    return []


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the engine.

    Attributes:
        max_running: requests that run at the same time.
        token_budget: tokens that a step computes.
        chunk_tokens: tokens of one prompt that a step computes.
        admit_rows: requests from the head of the queue that a step asks to admit.
        num_drafts: drafts per request and step; with recurrent states, at most their speculative blocks.
        drafter: guesses the next tokens.
        lookahead: slots that each row asks for beyond its drafts.
        commits: report accepted drafts as committed, so that their blocks can be hit one step earlier.
        admit_flags: of each admission.
    """

    max_running: int = 256
    token_budget: int = 8192
    chunk_tokens: int = UNLIMITED
    admit_rows: int = 8
    num_drafts: int = 0
    drafter: Drafter = no_drafts
    lookahead: int = 0
    commits: bool = False
    admit_flags: RowFlag = RowFlag.NONE


@dataclass(eq=False, slots=True)
class Request:
    """A request, from its prompt to its last token.

    Attributes:
        request_id: for explanations.
        prompt: token ids.
        max_new_tokens: tokens to generate; fewer when a stop token comes first.
        domain: requests share blocks within a domain only.
        stop_token_ids: the request ends with any of these.
        tokens: the prompt and the generated tokens.
        slot: its number at the service, NO_SLOT before it is announced.
        computed: leading tokens whose keys, values and states are in pages.
        launch_end: tokens of the last launch, rejected drafts included.
        drafts: guesses of the next tokens.
        hits: cached tokens found by each admission.
        error: why the request was given up, "" if it was not.
    """

    request_id: str
    prompt: Sequence[int]
    max_new_tokens: int
    domain: str = ""
    stop_token_ids: Container[int] = ()
    tokens: list[int] = field(init=False)
    slot: int = field(default=NO_SLOT, init=False)
    computed: int = field(default=0, init=False)
    launch_end: int = field(default=0, init=False)
    drafts: list[int] = field(default_factory=list, init=False)
    hits: list[int] = field(default_factory=list, init=False)
    error: str = field(default="", init=False)

    def __post_init__(self) -> None:
        """Raise InvalidArgument for an empty prompt, or one that asks for no token."""
        self.tokens = list(self.prompt)
        if not self.tokens or self.max_new_tokens < 1:
            raise InvalidArgument(
                f"{len(self.tokens)} prompt tokens and {self.max_new_tokens} more",
                field="max_new_tokens" if self.tokens else "prompt",
                remedy="give 1 or more of each",
            )

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, and those generated so far."""
        return len(self.tokens)

    @property
    def max_tokens(self) -> int:
        """Tokens of the prompt, and the most that it may generate."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def output(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[len(self.prompt) :]

    @property
    def is_done(self) -> bool:
        """Whether the last token is generated."""
        count = self.num_tokens - len(self.prompt)
        return count >= self.max_new_tokens or (count > 0 and self.tokens[-1] in self.stop_token_ids)

    def news_row(self) -> NewsRow:
        """Announces the request with the tokens that it has."""
        return NewsRow(
            self.slot, self.tokens, request_id=self.request_id, domain=self.domain, max_tokens=self.max_tokens
        )

    def append(self, token: int) -> None:
        """A token joins the request."""
        self.tokens.append(token)

    def content(self, num_appended: int) -> FactRow:
        """The row that appends the last tokens at the service."""
        return FactRow(self.slot, tokens=self.tokens[len(self.tokens) - num_appended :])


@dataclass(frozen=True, slots=True)
class Scheduled:
    """What a launch computes for one request: `num_tokens` tokens from position `start`, known ones and then drafts.

    Attributes:
        num_outputs: the last tokens, after each of which the engine samples one.
        tables: block ids by group, in token order.
        is_admission: the step admitted the request.
    """

    request: Request
    start: int
    num_tokens: int
    num_outputs: int
    tables: Sequence[Sequence[int]]
    is_admission: bool = False

    @property
    def end(self) -> int:
        """The position behind the last token."""
        return self.start + self.num_tokens

    @property
    def tokens(self) -> list[int]:
        """The token ids to compute."""
        return [*self.request.tokens, *self.request.drafts][self.start : self.end]


@dataclass(slots=True)
class Counts:
    """Totals of one scheduler; every field only grows."""

    steps: int = 0
    completed: int = 0
    refused: int = 0
    aborted: int = 0
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


class Scheduler:
    """Queues, limits and block tables of one engine life. Not thread-safe.

    Attributes:
        counts: totals so far.
    """

    def __init__(self, spec: ReplicaSpec, limits: Limits) -> None:
        """Raise InvalidArgument when the replica keeps states for fewer drafts than `limits.num_drafts`."""
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

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running, or the end of one is not reported yet."""
        return bool(self._waiting or self._running or self._facts or self._lost_steps)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def waiting(self) -> Sequence[Request]:
        """The queue, its head first."""
        return self._waiting

    def add(self, request: Request) -> None:
        """Append a request to the queue.

        Raises InvalidArgument when the request can be longer than `max_model_len`.
        """
        if request.max_tokens > self._max_model_len:
            raise InvalidArgument(
                f"the request may have {request.max_tokens} tokens",
                field="prompt",
                remedy=f"max_model_len is {self._max_model_len}: shorten the prompt, or lower max_new_tokens",
            )
        self._waiting.append(request)

    def abort(self, request: Request) -> None:
        """End a request between two steps: its blocks return with the next one. Does nothing when it has ended."""
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

    def known_requests(self) -> tuple[News, tuple[int, ...]]:
        """The announced requests as they are now, and the slots of those that run: for a reopened session."""
        announced = [request for request in self._by_slot if request is not None]
        news = part_of(*(request.news_row() for request in announced)).news
        return news, tuple(request.slot for request in self._running)

    def resume(self) -> Resume | None:
        """The running requests with the blocks that they hold, for a service that continues with them.

        None while a lost launch is not reported: the service decides which requests used its pages.
        """
        if self._has_unreported_loss:
            return None
        return resume_of(
            [
                ResumeRow(one.slot, one.computed, self._tables[one.slot], len(one.prompt), launch_end=one.launch_end)
                for one in self._running
            ]
        )

    # -- the next step -----------------------------------------------------------------------------------------------

    def plan(self) -> Part:
        """The part of the next step: facts of the last one, then rows to run and to admit."""
        rows: list[Row] = [*self._facts, *map(self._run_row, self._running), *self._admissions()]
        part = part_of(*rows, budget=self._budget, cache=Cache(failed_steps=self._lost_steps))
        part.admit.max_running = self._limits.max_running
        part.admit.only_if_no_preemption = True
        self._facts, self._lost_steps = [], []
        return part

    def _run_row(self, request: Request) -> RunRow:
        limits, is_decode = self._limits, request.computed == request.num_tokens - 1
        if limits.num_drafts:
            most = min(limits.num_drafts, self._max_model_len - request.num_tokens)
            request.drafts = limits.drafter(request.tokens, most) if is_decode else []
        cap = UNLIMITED if is_decode else limits.chunk_tokens
        return RunRow(request.slot, extra=len(request.drafts), cap=cap, lookahead=limits.lookahead)

    def _admissions(self) -> Iterator[Row]:
        """Rows for the head of the queue, and announcements of the requests that the service does not know."""
        limits, announced = self._limits, 0
        places = min(limits.max_running - len(self._running), limits.admit_rows)
        for request in islice(self._waiting, max(0, places)):
            if request.slot == NO_SLOT:
                if announced > MAX_NEWS_TOKENS:
                    return
                announced += request.num_tokens
                self._take_slot(request)
                yield request.news_row()
            yield AdmitRow(request.slot, cap=limits.chunk_tokens, lookahead=limits.lookahead, flags=limits.admit_flags)

    def _take_slot(self, request: Request) -> None:
        if not self._free_slots:
            self._free_slots.append(len(self._by_slot))
            self._by_slot.append(None)
        request.slot = self._free_slots.pop()
        self._by_slot[request.slot] = request

    # -- its result --------------------------------------------------------------------------------------------------

    def update(self, part: Part, result: PartResult) -> list[Scheduled]:
        """Take over the result of a planned part; returns the rows to compute, running requests first."""
        self._tables.update(part, result)
        self._has_unreported_loss = False
        self.counts.steps += 1
        self.counts.copies += len(result.orders.copy_src)
        lost = set(result.preempted)  # what the part granted them before is not computed
        granted = zip(part.run.slot, result.granted, strict=True)
        scheduled = [
            self._schedule(self._request(slot), count) for slot, count in granted if count and slot not in lost
        ]
        self._preempt(result.preempted)
        scheduled += self._admit(part, result)
        self._check_progress(bool(scheduled or result.preempted or part.facts.slot) or not self.has_work)
        return scheduled

    def _request(self, slot: int) -> Request:
        request = self._by_slot[slot]
        assert request is not None, f"slot {slot} has no request"
        return request

    def _admit(self, part: Part, result: PartResult) -> Iterator[Scheduled]:
        """Move admitted requests from the queue to the running ones."""
        rows = zip(part.admit.slot, result.admit_status, result.admit_hit, result.admit_granted, strict=True)
        for slot, status, hit, granted in rows:
            request = self._request(slot)
            if status == AdmitStatus.GRANTED:
                self._waiting.remove(request)
                self._running.append(request)
                request.computed = request.launch_end = hit
                request.hits.append(hit)
                self.counts.hits += hit > 0
                self.counts.hit_tokens += hit
                if granted:
                    yield self._schedule(request, granted, is_admission=True)
            elif status == AdmitStatus.NEVER_FITS:
                self._waiting.remove(request)
                request.error = f"{request.num_tokens} tokens need more blocks than the pool has"
                self.counts.refused += 1
                self._end(request, FactRow(slot, end=End.FREE))
            elif status == AdmitStatus.DEFERRED:
                self.counts.deferred += 1

    def _preempt(self, slots: list[int]) -> None:
        """Return requests to the head of the queue: their tokens stay known, none of them is computed."""
        for slot in slots:
            request = self._request(slot)
            self._running.remove(request)
            request.computed, request.drafts = 0, []
            self._waiting.appendleft(request)
            self.counts.preempted += 1

    def _schedule(self, request: Request, count: int, is_admission: bool = False) -> Scheduled:
        num_outputs = max(0, request.computed + count - (request.num_tokens - 1))
        tables = self._tables[request.slot]
        return Scheduled(request, request.computed, count, num_outputs, tables, is_admission)

    def _check_progress(self, has_progress: bool) -> None:
        """Raise when many steps in a row do nothing: the loop would never end, which is a fault of one side."""
        self._idle_steps = 0 if has_progress else self._idle_steps + 1
        if self._idle_steps > MAX_IDLE_STEPS:
            raise InternalError(f"stuck with {self.num_running} running and {self.num_waiting} waiting requests")

    # -- what the launch computed ------------------------------------------------------------------------------------

    def finish_row(self, row: Scheduled, sampled: Sequence[int]) -> int:
        """The launch is complete: `sampled` has a token behind each of the row's last `num_outputs` tokens.

        Drafts are accepted as long as they equal what was sampled, and one token more. Returns how many tokens joined
        the request, which is in `take_finished` when it has its last one.
        """
        request = row.request
        if request.error:
            return 0  # aborted during the launch
        if len(sampled) != row.num_outputs:
            raise InvalidArgument(
                f"{len(sampled)} tokens for a row with {row.num_outputs} outputs",
                field="sampled",
                remedy="give one token behind each of the last num_outputs tokens",
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
        """The launch of this step failed. Its result is reported with the next part, before it counts as executed.

        The next result preempts the requests that the step granted tokens, and those that hit their blocks.
        """
        self._lost_steps.append(seq)
        self._has_unreported_loss = True
        self.counts.lost_steps += 1

    def take_finished(self) -> list[Request]:
        """The requests that ended since the last call: complete, or given up with an `error`."""
        finished, self._finished = self._finished, []
        return finished

    def _accept(self, row: Scheduled, sampled: Sequence[int]) -> int:
        """Append the accepted tokens; returns how many."""
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
            self._facts.append(fact)
            self._by_slot[request.slot] = None
            self._free_slots.append(request.slot)
            request.slot = NO_SLOT
        self._finished.append(request)


def _check_drafts(spec: ReplicaSpec, num_drafts: int) -> None:
    for group in spec.groups:
        if group.kind is GroupKind.MAMBA and min(group.speculative_blocks, group.block_size - 1) < num_drafts:
            raise InvalidArgument(
                f"{num_drafts} drafts, {group.speculative_blocks} speculative blocks of {group.block_size} tokens",
                field="num_drafts",
                remedy="draft at most as many tokens as states are kept for, and less than a block",
            )
