"""The engine's side of tiers: gives the jobs of a step's answer to the movers of every rank, and reports their ends.

jobs = TierJobs(tables)
jobs.begin(session.epoch, session.busy_blocks)                  # of each engine life, after the claim
jobs.await_earlier(timeout_s=30)                                # before the first orders
...
part = scheduler.plan()
jobs.report(part.cache, executed_through)
answer = session.apply(part, executed_through=executed_through)
...                                                             # every rank carries out the orders
for number, result in enumerate(answer.parts, answer.part):
    jobs.order(answer.seq, number, result)
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvplane.base.errors import Unavailable
from kvplane.base.job_table import JobKind, JobRow, JobTable
from kvplane.base.step import LOAD_COLUMNS, MOVE_COLUMNS, SAVE_COLUMNS, Cache, Orders, PartResult

_JOB_BITS = 32  # a job is numbered by its epoch and a counter of this number of bits
_POLL_S = 0.0002


@dataclass(slots=True)
class _Moving:
    """A job in flight.

    Attributes:
        after: a load is not reported as done before this step is executed.
        blocks: blocks that it fills.
        ranks: ranks whose movers have not ended it.
        since_ns: when it was ordered.
        tiers: that it reads.
        is_good: whether no rank failed it.
    """

    after: int
    blocks: list[int]
    ranks: set[int]
    since_ns: int
    tiers: set[int] = field(default_factory=set)
    is_good: bool = True


class TierJobs:
    """The jobs in flight of one engine, on the job tables of all its ranks. Not thread-safe."""

    def __init__(self, tables: Sequence[JobTable], clock: Callable[[], int] = time.monotonic_ns) -> None:
        """`tables`: the job table of each rank, in rank order. `clock`: nanoseconds."""
        self._clock = clock
        self._block_ns: dict[int, float] = {}  # by tier: time to load a block, on all ranks
        self._loaded_ns = 0  # when the last load ended
        self._tables = tuple(tables)
        self._positions = [table.num_ended for table in tables]
        self._moving: dict[int, _Moving] = {}
        self._over: list[int] = []  # jobs in `_moving` that ended on all ranks
        self._epoch, self._is_alone = 0, False  # whether movers have stopped the jobs of all engines before this one
        self._left_busy: tuple[int, ...] | None = None  # busy blocks, while movers may work on jobs of earlier lives

    @property
    def num_moving(self) -> int:
        """The number of jobs whose end was not reported yet."""
        return len(self._moving)

    @property
    def blocks_loading(self) -> tuple[int, ...]:
        """The blocks that loads in flight, also of earlier engine lives, may write: for `Revival.busy_blocks`."""
        blocks = {block for moving in self._moving.values() for block in moving.blocks}
        return tuple(sorted(blocks.union(self._left_busy or ())))

    def begin(self, epoch: int, busy_blocks: Sequence[int]) -> None:
        """Begin an engine life, whose epoch owns the pages of every rank.

        The first report after the movers of all ranks have stopped the jobs of earlier lives ends these jobs, and gives
        `busy_blocks` back (`Session.busy_blocks`): so no other mover may write these.
        """
        self._moving.clear()
        self._over.clear()
        self._positions = [table.num_ended for table in self._tables]
        self._is_alone = bool(self._epoch) and self.may_carry_out
        self._epoch, self._left_busy = epoch, tuple(busy_blocks)

    @property
    def may_carry_out(self) -> bool:
        """Whether the orders of this engine life may be carried out: not while movers may work on jobs of an engine
        before this one. A load of that engine can write pages that the service gives away: the service knows them only
        if it claimed every worker and got its answer. An engine that has waited once, and reopens its session, has
        listed its own loads (`blocks_loading`), and waits for nothing.
        """
        return self._is_alone or self._have_begun()

    def await_earlier(self, timeout_s: float) -> None:
        """Wait until `may_carry_out`. Raises Unavailable after this time: a worker has died, or its movers hang."""
        deadline = time.monotonic() + timeout_s
        while not self.may_carry_out:
            if time.monotonic() >= deadline:
                what = f"movers work on jobs of an engine before this one since {timeout_s} s"
                raise Unavailable(what, remedy="start the workers again, which have new pages then")
            time.sleep(_POLL_S)

    def order(self, seq: int, part: int, result: PartResult) -> None:
        """Give the movers of each rank the jobs of one part of an answer, whose orders every rank has carried out.

        The jobs fail where a table is full: then nothing is saved, and requests that wait for loads are preempted.
        """
        after = dict(zip(result.admit_job, result.admit_load_after, strict=False))
        rows = list(_rows(result.orders, (self._epoch, seq, part), after))
        now = self._clock()
        for row in rows:
            moving = self._moving.get(row.job)
            if moving is None:
                self._moving[row.job] = moving = _Moving(row.after, [], set(range(len(self._tables))), now)
            if row.kind == JobKind.LOAD:
                moving.blocks.append(row.block)
                moving.tiers.add(row.tier)
        for rank, table in enumerate(self._tables):
            if rows and not table.order(rows):
                for job in dict.fromkeys(row.job for row in rows):
                    self._end(rank, job, is_done=False)

    def report(self, cache: Cache, executed_through: int) -> None:
        """Add the jobs that have ended on every rank to the facts of the next step.

        `executed_through`: of the same step. Raises FailedPrecondition as `JobTable.ends_from`.
        """
        for rank, table in enumerate(self._tables):
            ends = table.ends_from(self._positions[rank])
            self._positions[rank] += len(ends)
            for job, is_done in ends:
                self._end(rank, job, is_done)
        waiting = list[int]()
        for job in self._over:
            moving = self._moving[job]
            if moving.is_good and moving.after > executed_through:
                waiting.append(job)
                continue
            (cache.jobs_done if moving.is_good else cache.jobs_failed).append(job)
            del self._moving[job]
        self._over = waiting
        if self._left_busy is not None and self._have_begun():
            cache.jobs_before = self._epoch << _JOB_BITS
            cache.loads_over = [*cache.loads_over, *self._left_busy]
            self._left_busy = None

    def costs_ns(self, token_ns: int, num_tiers: int) -> list[int]:
        """Return what `Cache.costs_ns` takes, with the measured times of loads. `token_ns`: to compute a token."""
        return [token_ns, *(round(self._block_ns.get(tier, 0)) for tier in range(num_tiers))]

    def _measure(self, moving: _Moving) -> None:
        """Note how long a load took, from its order or the end of the load before, whichever is later."""
        now = self._clock()
        took, self._loaded_ns = (now - max(moving.since_ns, self._loaded_ns)) / len(moving.blocks), now
        for tier in moving.tiers:
            before = self._block_ns.get(tier, took)
            self._block_ns[tier] = before + (took - before) / 8

    def wait(self, timeout_s: float) -> None:
        """Wait until a job has ended on some rank, at most this time: for an engine that has nothing to launch."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not self._over:
            ended = any(table.num_ended > at for table, at in zip(self._tables, self._positions, strict=True))
            if ended or (self._left_busy is not None and self._have_begun()):
                return
            time.sleep(_POLL_S)

    def _have_begun(self) -> bool:
        return all(table.life >= self._epoch for table in self._tables)

    def _end(self, rank: int, job: int, is_done: bool) -> None:
        moving = self._moving.get(job)
        if moving is None or rank not in moving.ranks:
            return  # of an earlier engine life, or reported before
        moving.is_good &= is_done
        moving.ranks.remove(rank)
        if not moving.ranks:
            self._over.append(job)
            if moving.blocks and moving.is_good:
                self._measure(moving)


def _rows(orders: Orders, step: tuple[int, int, int], after: dict[int, int]) -> Iterator[JobRow]:
    """Yield the rows of the jobs of a part. `step`: epoch, seq, part. `after`: the step that each load waits for."""
    left = Counter(orders.load_job)
    for job, tier, slot, version, block, group, stamp in _columns(orders, LOAD_COLUMNS):
        left[job] -= 1
        yield JobRow(job, JobKind.LOAD, left[job], *step, after.get(job, 0), tier, slot, version, block, stamp, group)
    for job, block, group, stamp, tier, slot in _columns(orders, SAVE_COLUMNS):
        yield JobRow(job, JobKind.SAVE, 0, *step, 0, tier, slot, job, block, stamp, group)
    for job, tier, slot, version, to_tier, to_slot in _columns(orders, MOVE_COLUMNS):
        yield JobRow(job, JobKind.MOVE, 0, *step, 0, tier, slot, version, to_tier, to_slot, 0)


def _columns(orders: Orders, names: Sequence[str]) -> Iterator[tuple[int, ...]]:
    return zip(*(getattr(orders, name) for name in names), strict=True)
