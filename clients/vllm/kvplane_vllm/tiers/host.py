"""The steps of the allocator whose device is the host memory of the ranks, and whose tier is their disk, or peers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvplane.base.groups import DENSE_RETENTION, CommitRule, GroupKind, Medium, ReplicaSpec, TierKind, TierSpec
from kvplane.base.job_table import VERSION, JobsEnd
from kvplane.base.session import CacheRequest
from kvplane.base.step import Cache, EventKind, Part, PartResult, Step, StepResult
from kvplane.tier_jobs import TierJobs
from kvplane_core.face.keys import seal_key
from kvplane_core.face.loader import new_in_process, open_step
from kvplane_core.face.part_rows import Update
from kvplane_vllm.tiers.kept import KeyFile
from kvplane_vllm.tiers.messages import NO_SEALS, PartOrders, Progress, Ready, Seals

if TYPE_CHECKING:
    from kvplane.base.sections import Peers
    from kvplane_vllm.tiers.service import Service

CLOSE_S = 5.0  # for a disk that hangs


def host_spec(
    engine: ReplicaSpec, num_blocks: int, tiers: tuple[TierSpec, ...], *, events: bool = False
) -> ReplicaSpec:
    """Return the settings of the allocator: the groups of the engine in the memory of the host. `events`: of keys that
    are stored and removed there.

    A hit ends between blocks, since no page is copied within host memory; its pages are written whole, not zeroed. The
    engine chooses which states are kept: its requests end there.
    """
    groups = tuple(replace(group, zero_new_blocks=False, checkpoint_alignment=0) for group in engine.groups)
    has_states = any(group.kind is GroupKind.MAMBA for group in groups)
    return replace(
        engine,
        groups=groups,
        num_blocks=num_blocks,
        commit=CommitRule.SAFE,
        partial_hits=False,
        retention_interval=DENSE_RETENTION if has_states else engine.retention_interval,
        watermark_blocks=0,
        events=events,
        tiers=tiers,
        pool=Medium.HOST,
    )


class _Reported:
    """The job table of a rank, in another process: orders go with a step, ends come with its output."""

    version = VERSION

    def __init__(self, epoch: int) -> None:
        self.life = epoch
        self.num_ended = 0
        self.ordered = b""
        self._ends: list[JobsEnd] = []

    def order(self, record: bytes, checksum: int | None = None) -> bool:
        """See `JobTable.order`."""
        self.ordered = record
        return True

    def report(self, ends: Sequence[JobsEnd]) -> None:
        """Add ends that the rank has reported."""
        self._ends += ends
        self.num_ended += len(ends)

    def ends_from(self, position: int) -> list[JobsEnd]:
        """See `JobTable.ends_from`."""
        ends, self._ends = self._ends, []
        assert position + len(ends) == self.num_ended, "ends are read once, in order"
        return ends


class HostAllocator:
    """Applies parts, one or more per step of vLLM.

    Attributes:
        replica: the allocator.
        epoch: of the engine life.
        executed: the last step whose copies have ended on all ranks.
        last_copies: the last step that has copies, or stores keys of blocks that are lent.
        kept: keys that the disk has kept from earlier lives.
        service: follows the steps; None = none does.
    """

    def __init__(
        self, spec: ReplicaSpec, ranks: Sequence[Ready], keys: KeyFile | None = None, service: Service | None = None
    ) -> None:
        """`keys`: of the disk, recorded in earlier lives and in this one; None = none are kept. `service`: follows the
        steps. Raises InvalidArgument if fields of the spec contradict each other.
        """
        self.replica = new_in_process(spec)
        self.epoch = max(one.epoch for one in ranks)
        if service is not None:
            self.epoch = max(self.epoch, service.known_epoch + 1)
        tables = [one.stamps[: spec.num_stamps] for one in ranks]
        found = self.replica.recover(self.epoch, tables, [keys.entries()] if keys else [])
        self.kept = found.kept
        self._keys, self._saving = keys, dict[int, int]()  # by job: the id of the slot that it writes
        self.executed = self.last_copies = 0
        self._ranks = [_Reported(self.epoch) for _ in ranks]
        self._has_jobs = bool(spec.tiers)
        self._jobs = TierJobs(self._ranks)  # type: ignore[arg-type]
        self._jobs.begin(self.epoch, ())
        self._seq = self._part = 0
        self._reported = 0  # the executed step that the allocator knows
        self._has_ends = False
        self._orders: list[PartOrders] = []
        self._done: list[int] = []
        self._preempted: list[int] = []
        self.service, self._applied = service, list[tuple[Part, PartResult]]()
        self._is_lent = [one.kind for one in spec.tiers] == [TierKind.PEERS]
        self._stored: deque[tuple[int, Sequence[int]]] = deque()  # by step: blocks that have got a key
        if service is not None:
            service.begin(self.replica, ranks[0].content if self._is_lent else b"", len(ranks))

    @property
    def is_open(self) -> bool:
        """Whether the step has parts already."""
        return self._part > 0

    @property
    def seq(self) -> int:
        """The number of the last step, or of the open one."""
        return self._seq

    @property
    def has_work(self) -> bool:
        """Whether there are orders for the workers, or copies in flight."""
        return bool(self._orders or self._stored) or self.executed < self.last_copies

    @property
    def is_busy(self) -> bool:
        """Whether copies or jobs are in flight, or have ended and the allocator does not know it; or orders wait."""
        waits = self._orders or self._stored or self._has_ends
        return bool(waits) or self._reported < self.last_copies or self._jobs.num_moving > 0

    def report(self, progress: Progress) -> None:
        """Take what the ranks have reported."""
        for rank, ends in progress.ends.items():
            self._ranks[rank].report(ends)
            self._has_ends = self._has_ends or bool(ends)
        if len(progress.executed) == len(self._ranks):
            self.executed = max(self.executed, min(progress.executed.values()))

    @property
    def has_ended(self) -> bool:
        """Whether copies or jobs have ended that the allocator does not know of; the next step reports it."""
        return not self._part and (self._has_ends or self._reported < min(self.executed, self.last_copies))

    def open_if_ended(self) -> None:
        """Let the allocator know what has ended, with a step of its own if none is open."""
        if self.has_ended:
            self.apply(Part())

    def apply(self, part: Part, last: bool = False) -> PartResult:
        """Apply a part of the step; its first one reports what has ended, its `last` one ends the step."""
        if not self._part:
            self._begin(part.cache)
        step = Step(self.epoch, self._seq, [part], part=self._part, last=last, executed_through=self._reported)
        applied = self.replica.apply(step)
        result: PartResult = applied.parts[0]
        self._applied.append((part, result))
        self._note(result, part.cache)
        if last:
            parts, results = (list(column) for column in zip(*self._applied, strict=True))
            self._applied.clear()
            self._end(Step(self.epoch, self._seq, parts, executed_through=self._reported), results, applied)
        return result

    def grow(self, rows: Sequence[tuple[Update, int]]) -> list[bool]:
        """Apply a step of its own: what running requests have gained, and how many tokens each is granted. Returns
        which of them had room. As `apply`, with a fraction of its work.
        """
        assert not self._part, "the step is open"
        cache = Cache()
        self._begin(cache)
        step = open_step(self.replica, self._reported, records=self.service is not None)
        if cache.jobs_done or cache.jobs_failed or cache.jobs_before or cache.loads_over:
            step.change_cache(cache)
        for update, _ in rows:
            step.update(update)
        done = [step.extend(update.slot, num_new) is not None for update, num_new in rows]  # all of them in one part
        applied = step.close()
        for result in applied.parts:
            self._note(result, cache)
            cache = Cache()  # only the first part has it
        self._end(step.recorded() if self.service is not None else None, applied.parts, applied)
        return done

    def _begin(self, cache: Cache) -> None:
        """Begin the next step, and add to its first section what has ended."""
        self._seq += 1
        self._has_ends, self._reported = False, self.executed
        if self._has_jobs:
            self._jobs.report(cache, self.executed, self._seq)
        self._done += cache.jobs_done

    def _note(self, result: PartResult, cache: Cache) -> None:
        """Take the result of a part that has this section."""
        self._preempted += result.preempted
        if self._keys is not None:
            self._record(result, cache.jobs_done)
            for job in cache.jobs_failed:
                self._saving.pop(job, None)
        if self._is_lent:
            stored = [(self._seq, event.blocks) for event in result.events if event.kind is EventKind.STORED]
            self._stored += stored
            self.last_copies = self._seq if stored else self.last_copies
        orders, jobs = result.orders, b""
        if self._has_jobs:
            self._jobs.order(self._seq, self._part, result)
            jobs = self._ranks[0].ordered
            for rank in self._ranks:
                rank.ordered = b""
        self._orders.append(PartOrders(self._seq, self._part, list(orders.stamp_block), list(orders.stamp), jobs))
        self._part += 1

    def _end(self, step: Step | None, results: list[PartResult], applied: StepResult) -> None:
        """End the step. `step`: for the service that follows."""
        self._part = 0
        if self.service is not None and step is not None:
            self.service.send(step, StepResult(self._seq, 0, results, applied.published_through))

    def next_request(self) -> CacheRequest | None:
        """Return what a caller of the service asks for, to be carried out in the first part of the next step."""
        return self.service.next_request(self._seq + 1) if self.service is not None else None

    def next_news(self) -> Peers | None:
        """Return what peers have stored or evicted, as `next_request`."""
        return self.service.next_news(self._seq + 1) if self.service is not None else None

    def take_seals(self) -> Seals:
        """Return the blocks that have got a key, in steps that have been executed since the last call, and still have
        one.
        """
        stored = list[int]()
        while self._stored and self._stored[0][0] <= self._reported:
            stored += self._stored.popleft()[1]
        if not stored:
            return NO_SEALS
        entries = self.replica.entries(stored)
        size, groups, keys, at = entries.digest_size, list[int](), list[int](), 0
        for run in entries.runs:
            for row in range(at, at + run.count):
                groups.append(run.group)
                keys.append(seal_key((run.domain, run.group, bytes(entries.digests[row * size : (row + 1) * size]))))
            at += run.count
        return Seals(list(entries.block), groups, list(entries.stamp), keys)

    def _record(self, result: PartResult, done: Sequence[int]) -> None:
        """Record the keys of slots whose save has ended, before vLLM is answered anything that depends on them."""
        orders, first = result.orders, self.replica.spec.num_blocks
        self._saving |= {job: first + slot for job, slot in zip(orders.save_job, orders.save_slot, strict=True)}
        written = [slot for job in done if (slot := self._saving.pop(job, 0))]
        if written and self._keys is not None:
            self._keys.record(self.replica.entries(written))

    def forget(self) -> bool:
        """Keep nothing for the next start, from now on: new weights may be the reason of a reset. Returns False if the
        disk cannot.
        """
        if self._keys is not None and not self._keys.clear():
            return False
        self._keys = None
        return True

    def shut_down(self) -> None:
        """Write what is recorded, if the disk does not hang, and notify the service."""
        if self._keys is not None:
            self._keys.close(CLOSE_S)
        if self.service is not None:
            self.service.close()

    def take_ends(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return jobs that are done, and slots of requests that the allocator has preempted, since the last call."""
        ended = self._done, self._preempted
        self._done, self._preempted = [], []
        return ended

    def take_orders(self) -> list[PartOrders]:
        """Return the orders of all parts since the last call, in order; the last step has ended."""
        assert not self._part, "the step is open"
        orders, self._orders = self._orders, []
        return orders

    def tables(self, slot: int) -> list[list[int]]:
        """Return the host blocks of a request, by group."""
        return self.replica.coordinator.tables(slot)
