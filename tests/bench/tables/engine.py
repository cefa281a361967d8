"""An engine in virtual time: the product's scheduler and core, with steps that take what the model of cost says.

A decode step that nothing can interrupt stands for several: it asks for some tokens of each request, as a step with
accepted drafts does, and takes the time of as many steps. It never does while a prompt is computed, loaded, or could be
admitted, and it ends with the first request that ends; a prompt that arrives waits for up to `TOGETHER` - 1 steps more.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from kvplane.base.groups import ReplicaSpec
from kvplane.base.sections import Retain
from kvplane.base.step import CacheEvent, Orders, Part, PartResult, RowFlag
from kvplane.scheduling import Limits, Request, Scheduled
from kvplane.session.rows import RunRow
from kvplane_tools.replay.engine import Engine
from kvplane_tools.replay.plan import NS_PER_SECOND, CostModel, EngineConfig
from kvplane_tools.replay.requests import LiveRequest
from tests.bench.routing import PublishingSession, TimedScheduler
from tests.bench.tables.model import BUDGET, LINK_BYTES_PER_S, STORAGE_BYTES_PER_S, StepCost
from tests.bench.tables.published import MAX_RUNNING

TOGETHER, ADMIT_ROWS = 8, 16


class GroupedScheduler(TimedScheduler):
    """A scheduler whose decode steps stand for several."""

    def __init__(self, spec: ReplicaSpec, limits: Limits, first_token: Callable[[LiveRequest], None]) -> None:
        super().__init__(spec, limits, first_token)
        self._together, self._is_stuck = 1, False
        self.retain = Retain()  # of the next step

    def plan(self) -> Part:
        """See Scheduler."""
        self._together = self._tokens_of_each()
        part = super().plan()
        part.retain, self.retain = self.retain, Retain()
        return part

    def _tokens_of_each(self) -> int:
        waits = bool(self._waiting) and not (self._is_stuck and all(not fact.end for fact in self._facts))
        if waits or self._open_loads or any(one.computed < one.num_tokens - 1 for one in self._running):
            return 1
        return min([TOGETHER, *(one.max_tokens - one.num_tokens for one in self._running)])

    def _run_row(self, request: Request) -> RunRow:
        assert isinstance(request, LiveRequest)
        is_decode = request.num_tokens > request.num_prompt and request.computed == request.num_tokens - 1
        request.drafts = [0] * (self._together - 1) if is_decode else []
        return RunRow(request.slot, extra=len(request.drafts))

    def update(self, part: Part, result: PartResult) -> list[Scheduled]:
        """See Scheduler."""
        rows = super().update(part, result)
        self._is_stuck = bool(self._waiting) and not any(row.is_admission for row in rows)
        return rows


class Link:
    """One direction of the link of a tier: transfers follow each other."""

    def __init__(self, bytes_per_s: float) -> None:
        self._ns_per_byte, self._free_ns = NS_PER_SECOND / bytes_per_s, 0

    def end_ns(self, now_ns: int, num_bytes: int) -> int:
        """Return when a transfer that is ordered now ends."""
        self._free_ns = max(self._free_ns, now_ns) + int(num_bytes * self._ns_per_byte)
        return self._free_ns


class TimedEngine(Engine):
    """An engine that reports first tokens and ends, and whose transfers take time."""

    def __init__(
        self,
        session: PublishingSession,
        page_bytes: int,
        cost: StepCost,
        passed_by: int = 0,
        speeds: Sequence[float] = (LINK_BYTES_PER_S, STORAGE_BYTES_PER_S),
    ) -> None:
        """`passed_by`: see Limits. `speeds`: bytes per second of each tier, in each direction."""
        self.publishing, spec, rows = session, session.spec, max(ADMIT_ROWS, 2 * passed_by)
        super().__init__(session, EngineConfig(MAX_RUNNING, BUDGET, admit_rows=rows), CostModel())
        flags = RowFlag.FULL_FIT | (RowFlag.LOAD if spec.tiers else RowFlag.NONE)
        limits = Limits(MAX_RUNNING, BUDGET, admit_rows=rows, admit_flags=flags, passed_by=passed_by)
        self._scheduler = self.grouped = GroupedScheduler(spec, limits, self._first)
        self._step_cost, self._page_bytes = cost, page_bytes
        self._links = {(reads, tier): Link(speed) for reads in (True, False) for tier, speed in enumerate(speeds)}
        self._ends = list[tuple[int, int]]()
        self.first_token: Callable[[TimedEngine, LiveRequest], None]
        self.ended: Callable[[TimedEngine, LiveRequest], None]
        self.published: Callable[[TimedEngine, Sequence[CacheEvent]], None]

    @property
    def now_s(self) -> float:
        """The engine's time."""
        return self.clock_ns / NS_PER_SECOND

    @property
    def used_share(self) -> float:
        """The part of the pool that running requests hold, as an engine's metrics state it."""
        size = self.spec.hash_block_size
        held = sum(one.num_tokens // size + 2 for one in self.grouped._running)
        return min(held / self.spec.num_blocks, 1.0)

    def _first(self, request: LiveRequest) -> None:
        self.first_token(self, request)

    def _exchange(self) -> tuple[Part, PartResult]:
        done = list[int]()
        while self._ends and self._ends[0][0] <= self.clock_ns:
            done.append(heappop(self._ends)[1])
        self._jobs = deque([done])
        part, answer = super()._exchange()
        self._order(answer.orders)
        return part, answer

    def _order(self, orders: Orders) -> None:
        """Start the jobs of a step: loads and saves use the link of their tier, moves that of the farther one."""
        moved = zip(orders.move_tier, orders.move_to_tier, orders.move_job, strict=True)
        blocks = Counter[tuple[bool, int, int]]()  # by direction, tier and job
        blocks.update((True, tier, job) for tier, job in zip(orders.load_tier, orders.load_job, strict=True))
        blocks.update((False, tier, job) for tier, job in zip(orders.save_tier, orders.save_job, strict=True))
        blocks.update((tier > to_tier, max(tier, to_tier), job) for tier, to_tier, job in moved)
        ends = dict[int, int]()
        for (reads, tier, job), number in blocks.items():
            end_ns = self._links[reads, tier].end_ns(self.clock_ns, number * self._page_bytes)
            ends[job] = max(ends.get(job, 0), end_ns)
        for job, end_ns in ends.items():
            heappush(self._ends, (end_ns, job))

    def _compute(self, part: Part, answer: PartResult) -> None:
        self._count_admissions(part, answer)
        rows = self.grouped.update(part, answer)
        self.clock_ns += int(self._step_s(rows) * NS_PER_SECOND)
        if not rows and self._ends:
            self.clock_ns = max(self.clock_ns, self._awaited_ns())
        events, self.publishing.events = self.publishing.events, []
        if events:
            self.published(self, events)
        for row in rows:
            self.grouped.finish_row(row, [0] * row.num_outputs)

    def _awaited_ns(self) -> int:
        """When the next job ends, which an engine without work awaits."""
        return self._ends[0][0]

    def _step_s(self, rows: Sequence[Scheduled]) -> float:
        """A step computes or reads weights, whichever takes longer, and reads the cache."""
        decodes = [row for row in rows if row.num_tokens == row.num_outputs]
        prompts = [row for row in rows if row.num_tokens != row.num_outputs]
        tokens = len(decodes) + sum(row.num_tokens for row in prompts)
        if not tokens:
            return 0.0
        cost, together = self._step_cost, max((row.num_tokens for row in decodes), default=1)
        computes = sum(cost.prefill_s(row.start, row.num_tokens) for row in prompts)
        return together * (max(computes, cost.weights_s(tokens)) + cost.contexts_s(row.end for row in decodes))

    def _finish(self, request: Request) -> None:
        super()._finish(request)
        assert isinstance(request, LiveRequest), request.error
        self.ended(self, request)
