"""The engine's side of tiers: gives the jobs of a step's answer to the movers of every rank, and reports their ends.

jobs = TierJobs(tables)
jobs.begin(session.epoch, session.busy_blocks)                  # of each engine life, after the claim
jobs.await_earlier(timeout_s=30)                                # before the first orders
...
part = scheduler.plan()
jobs.report(part.cache, executed_through, session.next_seq)
answer = session.apply(part, executed_through=executed_through)
...                                                             # every rank carries out the orders
for number, result in enumerate(answer.parts, answer.part):
    jobs.order(answer.seq, number, result)
"""

from __future__ import annotations

import time
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import attrgetter, or_
from zlib import crc32

from kvplane.base.errors import Unavailable
from kvplane.base.job_table import JobTable, record_of
from kvplane.base.step import Cache, Orders, PartResult

_JOB_BITS = 32  # a job is numbered by its epoch and a counter of this number of bits
_POLL_S = 0.0002
_FIRST = attrgetter("first")


@dataclass(slots=True)
class _Moving:
    """Jobs in flight with consecutive numbers: saves or moves of a part, or one load.

    Attributes:
        first, count: their numbers.
        left: by rank, the jobs that its movers have not ended: a bit for each, the lowest one for the first.
        after: a load is not reported as done before this step is executed.
        blocks: blocks that a load fills.
        since_ns: when they were ordered.
        tiers: that a load reads.
        failed: jobs that a rank has failed, as in `left`.
    """

    first: int
    count: int
    left: list[int]
    after: int = 0
    blocks: Sequence[int] = ()
    since_ns: int = 0
    tiers: frozenset[int] = frozenset()
    failed: int = 0


@dataclass(frozen=True, slots=True)
class _Over:
    """Jobs of one `_Moving` that all ranks have ended."""

    moving: _Moving
    jobs: Sequence[int]
    is_good: bool


class TierJobs:
    """The jobs in flight of one engine, on the job tables of all its ranks. Not thread-safe."""

    def __init__(self, tables: Sequence[JobTable], clock: Callable[[], int] = time.monotonic_ns) -> None:
        """`tables`: the job table of each rank, in rank order. `clock`: nanoseconds."""
        self._clock = clock
        self._block_ns: dict[int, float] = {}  # by tier: time to load a block, on all ranks
        self._loaded_ns = 0  # when the last load ended
        self._tables = tuple(tables)
        self._versions = {table.version for table in tables}
        self._positions = [table.num_ended for table in tables]
        self._moving: list[_Moving] = []  # by number, without those that all ranks have ended
        self._over: list[_Over] = []
        # The last report: number of its step, ends, and busy blocks that it gave back. For a step that is refused.
        self._reported: tuple[int, list[_Over], tuple[int, ...] | None] = (0, [], None)
        self._epoch, self._is_alone = 0, False  # whether movers have stopped the jobs of all engines before this one
        self._left_busy: tuple[int, ...] | None = None  # busy blocks, while movers may work on jobs of earlier lives

    @property
    def num_moving(self) -> int:
        """The number of jobs whose end was not reported yet."""
        ended = sum(len(over.jobs) for over in self._over)
        return ended + sum(reduce(or_, moving.left).bit_count() for moving in self._moving)

    @property
    def blocks_loading(self) -> tuple[int, ...]:
        """The blocks that loads in flight, also of earlier engine lives, may write: for `Revival.busy_blocks`."""
        loads = [*self._moving, *(over.moving for over in self._over)]
        blocks = {block for load in loads for block in load.blocks}
        return tuple(sorted(blocks.union(self._left_busy or ())))

    def begin(self, epoch: int, busy_blocks: Sequence[int]) -> None:
        """Begin an engine life, whose epoch owns the pages of every rank.

        The first report after the movers of all ranks have stopped the jobs of earlier lives ends these jobs, and gives
        `busy_blocks` back (`Session.busy_blocks`): so no other mover may write these.
        """
        self._moving.clear()
        self._over.clear()
        self._reported = (0, [], None)
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
                what = f"copy jobs of an engine before this one since {timeout_s} s"
                raise Unavailable(what, remedy="start the workers again, which have new pages then")
            time.sleep(_POLL_S)

    def order(self, seq: int, part: int, result: PartResult) -> None:
        """Give the movers of each rank the jobs of one part of an answer, whose orders every rank has carried out.

        The jobs fail where a table is full: then nothing is saved, and requests that wait for loads are preempted.
        """
        orders, after = result.orders, dict(zip(result.admit_job, result.admit_load_after, strict=False))
        step = self._epoch, seq, part
        records = {version: record_of(orders, step, after, version) for version in self._versions}
        if not any(records.values()):
            return
        checksums = {version: crc32(record) for version, record in records.items()}
        new = list(self._new(orders, after))
        for moving in new:
            insort(self._moving, moving, key=_FIRST)
        for rank, table in enumerate(self._tables):
            if not table.order(records[table.version], checksums[table.version]):
                for moving in new:
                    self._end(rank, moving.first, moving.count, is_done=False)

    def report(self, cache: Cache, executed_through: int, seq: int = 0) -> None:
        """Add the jobs that have ended on every rank to the facts of the next step. Call it once for each step.

        `executed_through`: of the same step. `seq`: its number (`Session.next_seq`): if it is that of the last report,
        that step was refused, and the one in its place reports the same ends too; 0: no step is planned again. Raises
        FailedPrecondition as `JobTable.ends_from`.
        """
        last, refused, busy = self._reported
        if seq and seq == last:
            self._over = refused + self._over
            self._left_busy = busy if self._left_busy is None else self._left_busy
        for rank, table in enumerate(self._tables):
            ends = table.ends_from(self._positions[rank])
            self._positions[rank] += len(ends)
            for first, count, is_done in ends:
                self._end(rank, first, count, is_done)
        waiting, reported = list[_Over](), list[_Over]()
        for over in self._over:
            if over.is_good and over.moving.after > executed_through:
                waiting.append(over)
            else:
                reported.append(over)
                (cache.jobs_done if over.is_good else cache.jobs_failed).extend(over.jobs)
        self._over, self._reported = waiting, (seq, reported, None)
        if self._left_busy is not None and self._have_begun():
            self._reported = seq, reported, self._left_busy
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

    def _new(self, orders: Orders, after: Mapping[int, int]) -> Iterator[_Moving]:
        """Yield the jobs of a part that has some."""
        num_ranks = len(self._tables)
        first = 0
        for job, count in Counter(orders.load_job).items() if orders.load_job else ():
            at = slice(first, first := first + count)
            blocks, tiers = list(orders.load_block[at]), frozenset(orders.load_tier[at])
            yield _Moving(job, 1, [1] * num_ranks, after.get(job, 0), blocks, self._clock(), tiers)
        for jobs in (orders.save_job, orders.move_job):
            for some in _runs(jobs) if jobs else ():
                yield _Moving(some.start, len(some), [(1 << len(some)) - 1] * num_ranks)

    def _end(self, rank: int, first: int, count: int, is_done: bool) -> None:
        """Note that the movers of a rank have ended jobs with consecutive numbers. Those of an earlier engine life, and
        those that this rank has ended before, do not count.
        """
        at = max(0, bisect_right(self._moving, first, key=_FIRST) - 1)
        while at < len(self._moving) and self._moving[at].first < first + count:
            moving = self._moving[at]
            low, high = max(first, moving.first), min(first + count, moving.first + moving.count)
            ended = (((1 << max(0, high - low)) - 1) << (low - moving.first)) & moving.left[rank]
            moving.left[rank] ^= ended
            moving.failed |= 0 if is_done else ended
            left = reduce(or_, moving.left)
            self._note_over(moving, ended & ~left)
            if left:
                at += 1
            else:
                del self._moving[at]

    def _note_over(self, moving: _Moving, jobs: int) -> None:
        """Note that all ranks have ended these jobs."""
        for some, is_good in ((jobs & ~moving.failed, True), (jobs & moving.failed, False)):
            if some:
                self._over.append(_Over(moving, _numbers(moving.first, some), is_good))
                if moving.blocks and is_good:
                    self._measure(moving)


def _runs(jobs: Sequence[int]) -> Iterator[range]:
    """Yield the runs of consecutive numbers of a column, whose numbers ascend: mostly one."""
    if jobs[-1] - jobs[0] == len(jobs) - 1:
        yield range(jobs[0], jobs[-1] + 1)
        return
    first = last = jobs[0]
    for job in jobs[1:]:
        if job != last + 1:
            yield range(first, last + 1)
            first = job
        last = job
    yield range(first, last + 1)


def _numbers(first: int, bits: int) -> Sequence[int]:
    """Return the numbers whose bits are set; the lowest bit is that of `first`."""
    start = (bits & -bits).bit_length() - 1
    if not bits >> start & (bits >> start) + 1:
        return range(first + start, first + bits.bit_length())
    return [first + at for at, bit in enumerate(reversed(bin(bits))) if bit == "1"]
