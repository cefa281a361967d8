"""The scheduler loop of STEPS.md, its decisions expressed as the step program: the engine's side of a step trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from itertools import takewhile

from kvplane.base.step import (
    UNCHANGED,
    UNLIMITED,
    Admit,
    AdmitStatus,
    Budget,
    End,
    ExtraKeys,
    Facts,
    News,
    OnRefusal,
    Part,
    PartResult,
    Peek,
    RowFlag,
    Run,
)
from tests.conformance.forms import Record

PLACEHOLDER = -1


class Status(Enum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    ENDED = "ended"


@dataclass(eq=False)
class Request:
    """State of STEPS.md section 4."""

    name: str
    slot: int
    tokens: list[int]
    prompt: int
    max_new: int
    arrival: float
    priority: int
    extra_keys: ExtraKeys
    computed: int = 0
    in_flight: int = 0
    place: int = 0
    stale: int = 0
    chunk: bool = False
    drafts: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    known: bool = False  # its news row was sent

    @property
    def order(self) -> tuple[int, float, str]:
        """Place in a priority queue."""
        return (self.priority, self.arrival, self.name)


@dataclass
class Plan:
    """The decisions of one schedule call, in the terms of the recording."""

    scheduled: list[tuple[Request, int]] = field(default_factory=list)
    new: list[list[object]] = field(default_factory=list)
    resumed: list[list[object]] = field(default_factory=list)
    run: list[list[object]] = field(default_factory=list)
    spec: dict[str, list[int]] = field(default_factory=dict)
    preempted: list[Request] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    results: list[PartResult] = field(default_factory=list)
    calls: list[list[object]] = field(default_factory=list)  # the recording's `log`; None: an amount not in the answer
    run_at_once: bool = False  # all run rows in one part: the answer does not contain the calls that they caused
    drafts_needed: bool = False


class Scheduler:
    """Keeps the queues and amounts; the service keeps the blocks.

    Args:
        header: of the step trace.
        send: sends parts of the step under way and returns their results; `last` ends the step.
        whole: one part per step where one part can express it; else one part per row. One part cannot express an
            admission of one token that is padded with drafts, since the padding depends on its hit. The part
            before it looks up that hit, and the admission begins another part.
    """

    def __init__(self, header: Record, send: Callable[[list[Part], bool], list[PartResult]], whole: bool) -> None:
        self._options = header["scheduler"]
        self._spec = header["spec_decode"]
        self._stop_token = header["stop_token"]
        self._alignment = header["cache_hit_alignment_tokens"]
        self._groups = len(header["groups"])
        self._send = send
        self._whole = whole
        self._by_priority = self._options["policy"] == "priority"
        self._async = self._options["async_scheduling"]
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self._free_slots: list[int] = []
        self._ended_slots: list[int] = []  # free once the step that ends them was answered: its events name the slot
        self._num_slots = 0
        self._facts = Facts(computed=[], commit=[])
        self._news: list[Request] = []
        self.input_parts: list[PartResult] = []
        self.last_news: list[str] = []  # names in the news that were sent last
        self._finished: list[str] = []

    # -- inputs ------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """A request arrives."""
        request.slot = self._free_slots.pop() if self._free_slots else self._num_slots
        self._num_slots = max(self._num_slots, request.slot + 1)
        self.requests[request.name] = request
        self._enqueue(request, front=False)
        self._news.append(request)
        self._flush_unless_whole()

    def abort(self, name: str) -> None:
        """A request is given up; unknown ones are ignored."""
        request = self.requests.get(name)
        if request is None:
            return
        self._finish(request)
        self._drop_ended()
        self._flush_unless_whole()

    def update(self, plan: Plan, tokens: dict[str, list[int]]) -> list[list[object]]:
        """Results of a step arrive (section 8); the requests that ended."""
        ended: list[list[object]] = []
        for request, num_tokens in plan.scheduled:
            if request.status is not Status.ENDED:
                before = len(request.tokens)
                reason = self._take_result(request, num_tokens, tokens[request.name], plan)
                if reason:
                    ended.append([request.name, len(request.tokens) - before, reason])
        self._drop_ended()
        self._flush_unless_whole()
        return ended

    def draft(self, name: str, drafts: list[int]) -> None:
        """Drafts for the next step."""
        request = self.requests.get(name)
        if request is not None:
            request.drafts = [] if request.chunk else list(drafts)

    def _take_result(self, request: Request, num_tokens: int, tokens: list[int], plan: Plan) -> str:
        request.in_flight -= num_tokens
        is_stale = request.stale > 0
        if is_stale:
            request.stale -= num_tokens
        if not tokens:
            return ""
        num_drafts = len(plan.spec.get(request.name, []))
        if num_drafts and not is_stale:
            rejected = num_drafts - (len(tokens) - 1)
            request.computed -= rejected if request.computed > 0 else 0
            request.place -= rejected if request.place > 0 else 0
        kept, reason = self._keep(request, tokens)
        had_place = request.place > 0
        commit = UNCHANGED
        if not is_stale:
            request.computed -= len(tokens) - kept
            if had_place:
                request.place -= len(tokens)
            if request.status is Status.RUNNING and (had_place or self._spec):
                commit = request.computed - request.in_flight
        self._fact(request, tokens[:kept], commit)
        if reason:
            self._finish(request)
        return reason

    def _keep(self, request: Request, tokens: list[int]) -> tuple[int, str]:
        for number, token in enumerate(tokens, 1):
            request.tokens.append(token)
            if token == self._stop_token:
                return number, "stop"
            outputs = len(request.tokens) - request.prompt
            if len(request.tokens) >= self._options["max_model_len"] or outputs >= request.max_new:
                return number, "length"
        return len(tokens), ""

    def _fact(self, request: Request, appended: list[int], commit: int, end: End = End.NONE) -> None:
        facts = self._facts
        facts.slot.append(request.slot)
        facts.computed.append(request.computed if request.status is Status.RUNNING else UNCHANGED)
        facts.appended.append(len(appended))
        facts.tokens.extend(appended)
        facts.commit.append(commit)
        facts.end.append(end)

    def _finish(self, request: Request) -> None:
        if request in self._news:
            self._news.remove(request)
        else:
            self._fact(request, [], UNCHANGED, End.FREE)
        request.status = Status.ENDED
        self._ended_slots.append(request.slot)
        self._finished.append(request.name)
        del self.requests[request.name]

    def _drop_ended(self) -> None:
        self.running = [one for one in self.running if one.status is not Status.ENDED]
        self.waiting = [one for one in self.waiting if one.status is not Status.ENDED]

    def _enqueue(self, request: Request, front: bool) -> None:
        if front and not self._by_priority:
            self.waiting.insert(0, request)
            return
        self.waiting.append(request)
        if self._by_priority:
            self.waiting.sort(key=lambda one: one.order)

    # -- facts and news ----------------------------------------------------------------------------------------------

    def _flush_unless_whole(self) -> None:
        """One part per row: every input reaches the service as it happens."""
        if self._whole:
            return
        facts, news = self._take_facts(), self._take_news()
        at = 0
        for row, slot in enumerate(facts.slot):
            count = facts.appended[row]
            one = Facts(
                [slot],
                [facts.computed[row]],
                [count],
                facts.tokens[at : at + count],
                commit=[facts.commit[row]],
                end=[facts.end[row]],
            )
            at += count
            self.input_parts.extend(self._send([Part(facts=one)], False))
        if news.slot:
            self.input_parts.extend(self._send([Part(news=news, with_hashes=True)], False))

    def _take_facts(self) -> Facts:
        facts, self._facts = self._facts, Facts()
        return facts

    def _take_news(self) -> News:
        fresh, self._news = self._news, []
        self.last_news = [one.name for one in fresh]
        return News(
            slot=[one.slot for one in fresh],
            num_tokens=[len(one.tokens) for one in fresh],
            tokens=[token for one in fresh for token in one.tokens],
            extra_keys=[one.extra_keys for one in fresh],
        )

    # -- schedule ----------------------------------------------------------------------------------------------------

    def schedule(self) -> Plan:
        """One step (sections 5 and 6)."""
        plan = Plan(finished=sorted(self._finished))
        self._finished = []
        options = self._options
        overhead = self._spec["draft_slots"] if self._spec else 0
        self._budget = Budget(options["max_num_scheduled_tokens"], options["max_num_batched_tokens"], overhead)
        self._cap = self._threshold()
        self._was_chunk = {request.name: request.chunk for request in self.running}
        rows = [request for request in self.running if not self._surely_ends(request)]
        if self._whole:
            self._schedule_whole(plan, rows)
        else:
            self._schedule_in_parts(plan, rows)
        self._after(plan)
        return plan

    def finish(self) -> list[PartResult]:
        """Send the remaining inputs; nothing more is scheduled."""
        return self._send([Part(facts=self._take_facts(), news=self._take_news())], True)

    def _threshold(self) -> int:
        options = self._options
        threshold, crowd = options["long_prefill_token_threshold"], len(self.running) + len(self.waiting)
        if threshold == 0 or crowd <= 1:
            return UNLIMITED
        if options["long_prefill_token_threshold_adaptive"]:
            threshold = max(threshold, options["max_num_batched_tokens"] // crowd)
        return int(threshold)

    def _surely_ends(self, request: Request) -> bool:
        return request.place > 0 and request.computed + 2 - request.place >= request.prompt + request.max_new

    def _may_pad(self, request: Request) -> bool:
        """Whether some hit leaves exactly one token to compute, which may then be padded."""
        return bool(self._spec) and (len(request.tokens) - 1) % self._alignment == 0

    def _until_padding(self, waiting: list[Request]) -> tuple[list[Request], list[Request]]:
        """The requests before the first that may be padded, and the rest."""
        plain = list(takewhile(lambda one: not self._may_pad(one), waiting))
        return plain, waiting[len(plain) :]

    def _schedule_whole(self, plan: Plan, rows: list[Request]) -> None:
        """One part, and one more for each admission that may be padded, whose hit the part before asks for."""
        places = self._options["max_num_running_reqs"] - len(self.running)
        admitted, waiting = self._until_padding([one for one in self.waiting if one.stale == 0][:places])
        part = Part(
            facts=self._take_facts(),
            news=self._take_news(),
            run=self._run_rows(rows),
            admit=self._admit_rows(admitted),
            peek=Peek([one.slot for one in waiting[:1]]),
            budget=self._budget,
            with_hashes=True,
        )
        last = not waiting
        result = self._sent(plan, part, last)
        plan.run_at_once = True
        self._take_run(plan, rows, result)
        goes_on = self._take_admissions(plan, admitted, result)
        while waiting and goes_on and self._may_admit(plan):
            padding = self._padding(plan, waiting[0], result)
            if padding < 0:
                break
            behind, rest = self._until_padding(waiting[1:])
            admitted, waiting = [waiting[0], *behind], rest
            part = Part(admit=self._admit_rows(admitted, padding), budget=self._budget)
            part.peek = Peek([one.slot for one in waiting[:1]])
            last = not waiting
            result = self._sent(plan, part, last)
            goes_on = self._take_admissions(plan, admitted, result, padding)
        if not last:
            self._sent(plan, Part(), True)

    def _sent(self, plan: Plan, part: Part, last: bool = False) -> PartResult:
        result = self._send([part], last)[0]
        plan.results.append(result)
        return result

    def _schedule_in_parts(self, plan: Plan, rows: list[Request]) -> None:
        """One row per part; the engine keeps the budget itself."""
        self._sent(plan, Part(facts=self._take_facts(), news=self._take_news()))
        for request in rows:
            if not self._has_budget():
                break
            if request.status is Status.RUNNING:
                result = self._sent(plan, Part(run=self._run_rows([request]), budget=self._budget))
                self._take_run(plan, [request], result)
        for request in [one for one in self.waiting if one.stale == 0]:
            if not self._may_admit(plan) or not self._admit_alone(plan, request):
                break
        self._sent(plan, Part(), True)

    def _has_budget(self) -> bool:
        return self._budget.tokens > 0 and self._budget.input > self._budget.overhead

    def _may_admit(self, plan: Plan) -> bool:
        room = len(self.running) < self._options["max_num_running_reqs"]
        return not plan.preempted and self._has_budget() and room

    def _admit_alone(self, plan: Plan, request: Request) -> bool:
        padding = self._padding(plan, request, self._sent(plan, Part(peek=Peek([request.slot]))))
        if padding < 0:
            return False
        result = self._sent(plan, Part(admit=self._admit_rows([request], padding), budget=self._budget))
        return self._take_admissions(plan, [request], result, padding)

    def _padding(self, plan: Plan, request: Request, found: PartResult) -> int:
        """Placeholders to add to a one-token admission (section 6.4); -1 when the padded row has no room."""
        hit = found.peek_hit[0]
        if not self._spec or len(request.tokens) - hit != 1:
            return 0
        ran_chunk = any(self._was_chunk.get(one.name, False) for one, _ in plan.scheduled)
        someone_ran = any(one.name in self._was_chunk for one, _ in plan.scheduled)
        k = self._spec["k"]
        if ran_chunk or not (someone_ran or hit > 0) or hit + k + 2 > self._options["max_model_len"]:
            return 0
        room = min(self._budget.tokens, self._budget.input - self._budget.overhead)
        if 1 + k <= room:
            return int(k)
        plan.calls.append(["L", request.name, hit, found.peek_single_group_hit[0]])
        return -1

    def _run_rows(self, rows: list[Request]) -> Run:
        most = self._options["max_model_len"]
        return Run(
            slot=[one.slot for one in rows],
            extra=[len(one.drafts) + one.place for one in rows],
            cap=[min(self._cap, max(most - one.computed - 1, 0)) for one in rows],
            lookahead=[self._spec["lookahead"] if self._spec else 0] * len(rows),
            in_flight=[one.in_flight for one in rows],
            victims=[one.slot for one in self._victims()],
            on_refusal=OnRefusal.PREEMPT,
        )

    def _victims(self) -> list[Request]:
        if not self._by_priority:
            return self.running[::-1]
        return sorted(self.running, key=lambda one: (one.priority, one.arrival), reverse=True)

    def _admit_rows(self, rows: list[Request], padding: int = 0) -> Admit:
        """Rows of waiting requests; `padding` is that of the first."""
        options = self._options
        flags = RowFlag.FULL_FIT * options["reserve_full_isl"]
        flags |= RowFlag.WHOLE * (not options["enable_chunked_prefill"])
        return Admit(
            slot=[one.slot for one in rows],
            extra=[padding, *[0] * (len(rows) - 1)] if rows else [],
            cap=[self._cap] * len(rows),
            lookahead=[self._spec["lookahead"] if self._spec else 0] * len(rows),
            flags=[int(flags)] * len(rows),
            max_running=options["max_num_running_reqs"],
            on_refusal=OnRefusal.STOP,
            only_if_no_preemption=True,
        )

    # -- answers -----------------------------------------------------------------------------------------------------

    def _take_run(self, plan: Plan, rows: list[Request], result: PartResult) -> None:
        if not plan.run_at_once:
            self._note_calls(plan, rows[0], result)
        self._preempt(plan, result)
        new = result.new_blocks.by_row()
        for row, (request, granted) in enumerate(zip(rows, result.granted, strict=True)):
            if granted == 0:
                continue
            blocks = new.get(row, {})
            plan.run.append(
                [
                    request.name,
                    request.computed,
                    [blocks.get(group, []) for group in range(self._groups)] if blocks else None,
                ]
            )
            plan.scheduled.append((request, granted))
            plan.drafts_needed |= not self._drafts_go_unused(request, granted)
            drafts = granted + request.computed - len(request.tokens) - request.place
            if drafts > 0:
                plan.spec[request.name] = request.drafts[:drafts]
            request.drafts = []
            self._spend(granted)

    def _note_calls(self, plan: Plan, request: Request, result: PartResult) -> None:
        """One running request: a call that fails for each victim, and the one that succeeds."""
        names = {one.slot: one.name for one in self.running}
        granted = result.granted[0]
        for slot in result.preempted:
            plan.calls += [["A", request.name, granted or None, 0], ["P", names[slot]]]
        if granted:
            plan.calls.append(["A", request.name, granted, 1])

    def _drafts_go_unused(self, request: Request, granted: int) -> bool:
        """Before this step counts: it samples nothing, or surely the last token that the request may have."""
        outputs = len(request.tokens) - request.prompt + 1 + (request.place > 0)
        return request.computed + granted < len(request.tokens) or outputs >= request.max_new

    def _spend(self, granted: int) -> None:
        budget = self._budget
        self._budget = Budget(budget.tokens - granted, budget.input - granted - budget.overhead, budget.overhead)

    def _preempt(self, plan: Plan, result: PartResult) -> None:
        by_slot = {one.slot: one for one in self.running}
        for slot in result.preempted:
            request = by_slot[slot]
            self._undo(plan, request)
            self.running.remove(request)
            request.computed = request.place = 0
            request.drafts = []
            request.stale = request.in_flight
            request.status = Status.PREEMPTED
            self._enqueue(request, front=True)
            plan.preempted.append(request)

    def _undo(self, plan: Plan, request: Request) -> None:
        """A victim that was scheduled by an earlier part of this step gives its budget back."""
        for number, (one, granted) in enumerate(plan.scheduled):
            if one is request:
                budget = self._budget
                self._budget = Budget(
                    budget.tokens + granted, budget.input + granted + budget.overhead, budget.overhead
                )
                del plan.scheduled[number]
                plan.spec.pop(request.name, None)
                plan.run = [row for row in plan.run if row[0] != request.name]
                return

    def _take_admissions(self, plan: Plan, rows: list[Request], result: PartResult, padding: int = 0) -> bool:
        """Whether all were admitted; `padding` is that of the first."""
        tables = result.tables.by_row()
        for row, request in enumerate(rows):
            status = result.admit_status[row]
            granted, hit = result.admit_granted[row], result.admit_hit[row]
            if status != AdmitStatus.NOT_REACHED:
                plan.calls.append(["L", request.name, hit, result.admit_single_group_hit[row]])
            if status not in (AdmitStatus.NOT_REACHED, AdmitStatus.NO_ROOM):
                plan.calls.append(["W", request.name, granted or None, int(granted > 0)])
            if status != AdmitStatus.GRANTED:
                return False
            blocks = tables[len(result.granted) + row]
            self._start(plan, request, hit, [blocks[group] for group in range(self._groups)])
            plan.drafts_needed |= not self._drafts_go_unused(request, granted)
            if padding and row == 0:
                plan.spec[request.name] = [PLACEHOLDER] * padding
            plan.scheduled.append((request, granted))
            self._spend(granted)
        return True

    def _start(self, plan: Plan, request: Request, hit: int, table: list[list[int]]) -> None:
        line: list[object] = [request.name, hit, table]
        (plan.resumed if request.status is Status.PREEMPTED else plan.new).append(line)
        self.waiting.remove(request)
        self.running.append(request)
        request.status = Status.RUNNING
        request.computed = hit
        request.drafts = []

    def _after(self, plan: Plan) -> None:
        if not (self._spec and self._spec["lookahead"] and self._options["v2_model_runner"]):
            plan.drafts_needed = True
        self._free_slots += self._ended_slots
        self._ended_slots = []
        for request, granted in plan.scheduled:
            request.computed += granted
            request.in_flight += granted
            request.chunk = request.computed < len(request.tokens) + request.place
            if self._async and not request.chunk:
                request.place += 1 + len(plan.spec.get(request.name, []))
                request.drafts = [PLACEHOLDER] * (self._spec["k"] if self._spec else 0)
