"""Tiers in the simulation: the product's movers on simulated slots, and an engine that gives them the jobs.

    TieredLife ──TierJobs, JobTable──▶ Movers (no thread of its own) ──▶ SimSlots, pages of texts
                                          ▲ stepped by a task of the worker's process

A mover's work is a function that the virtual clock must be able to interrupt between two acts. So it runs on a thread
of its own, which has the baton only while the simulation waits for it: a run stays a function of its seed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from itertools import chain
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvplane.base.errors import Unavailable
from kvplane.base.groups import NULL_BLOCK, ReplicaSpec, TierKind, TierSpec
from kvplane.base.job_table import JobKind, JobTable, job_table_bytes, rows_for
from kvplane.base.stamp_table import StampTable
from kvplane.base.stamps import in_time
from kvplane.base.step import Cache, Part, StepResult
from kvplane.session.reopening import Revival
from kvplane.tier_jobs import TierJobs
from kvplane_core.spec.replica import Replica
from kvplane_worker.tiers import MoverMemory, Movers
from kvplane_worker.tiers.kept import Kept, kept_of
from kvplane_worker.tiers.movers import PIECE_BYTES, Job
from kvplane_worker.tiers.seal import Content
from kvplane_worker.tiers.slots import SlotCounts, Slots
from tests.core.page_memory import Memory, Page, WrongPage
from tests.core.page_requests import Texts
from tests.core.save_rules import with_policies
from tests.core.specification import specification_of
from tests.core.tier_engine import TierScheduler, copy_of
from tests.core.tier_spoils import spread
from tests.sim import history
from tests.sim.engine import EngineLife

if TYPE_CHECKING:
    from tests.sim.world import Site, World

_ACT_S = 0.01  # between two acts of a mover
_LOOK_S = 0.004
_EARLIER_S = 5.0  # an engine waits for jobs of one before it
_LOST_S = 1.0
Pause = Callable[[], None]


def draw_tiers(rng: Random) -> tuple[TierSpec, ...]:
    host, disk = TierSpec(TierKind.HOST, rng.choice([8, 30, 90])), TierSpec(TierKind.DISK, rng.choice([12, 150]))
    tiers = rng.choice([(host,), (host, disk), (host, disk), (disk,)])
    return with_policies(tiers, copy(rng))  # a copy: the run of a seed stays as it was


class Baton:
    """A function on a thread, which runs from one `pause` to the next."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self._act, self._mine, self._theirs = act, threading.Semaphore(0), threading.Semaphore(0)
        self.is_over = self._is_abandoned = False
        self.result: Any = ()
        self.bug: Exception | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def step(self) -> bool:
        """Let it run to its next pause; returns whether it is over."""
        self._mine.release()
        self._theirs.acquire()
        return self.is_over

    def abandon(self) -> None:
        """End the thread: its process has died."""
        if not self.is_over:
            self._is_abandoned = True
            self.step()

    def pause(self) -> None:
        """Give the baton back, on the thread."""
        self._theirs.release()
        self._mine.acquire()
        if self._is_abandoned:
            raise SystemExit

    def _run(self) -> None:
        self._mine.acquire()
        try:
            self.result = self._act()
        except SystemExit:
            pass
        except Exception as error:
            self.bug = error
        self.is_over = True
        self._theirs.release()


class Rows:
    """What a tensor of payloads is in the product: pages."""

    def __init__(self, pages: list[Page | None]) -> None:
        self.pages = pages

    def copy_(self, other: Rows) -> None:
        self.pages = [copy_of(page) for page in other.pages]

    def numel(self) -> int:
        return len(self.pages)


class SlotRows(Rows):
    """What is read of a tier: the slots in place, as they are when they are copied."""

    def __init__(self, slots: dict[int, tuple[Content, Page | None]], numbers: list[int]) -> None:
        self._slots, self._numbers = slots, numbers

    @property
    def pages(self) -> list[Page | None]:  # type: ignore[override]
        held = [self._slots.get(number) for number in self._numbers]
        return [None if one is None else copy_of(one[1]) for one in held]


class SimSlots(Slots):
    """A tier. A slot is as its seal says, or damaged; a write may be lost."""

    def __init__(self, spec: TierSpec, rng: Random, pause: Pause, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.spec, self._rng, self._pause = spec, rng, pause
        self.counts = SlotCounts()
        self.namespace, self.incarnation = b"", rng.randbytes(16)
        self.slots: dict[int, tuple[Content, Page | None]] = {}
        self.damages, self.forgets = rng.choice([0, 0, 0.1]), rng.choice([0, 0, 0.1])

    def write(self, contents: Sequence[Content], num_bytes: int, fill: Callable[[Any], list[bool]]) -> list[bool]:
        del num_bytes
        target = Rows([None for _ in contents])
        kept = [self._rng.random() < self.forgets for _ in contents]  # the disk keeps what it had
        if all(kept):
            return fill(target)
        for content, is_kept in zip(contents, kept, strict=True):
            if not is_kept:
                self.slots.pop(content.slot, None)
        self._pause()
        good = fill(target)
        for content, page, is_kept, is_good in zip(contents, target.pages, kept, good, strict=True):
            self._pause()
            if is_good and not is_kept and self._rng.random() >= self.damages:
                self.slots[content.slot] = content, page
        return good

    def read(self, contents: Sequence[Content], num_bytes: int) -> Any:
        del num_bytes
        held = [self.slots.get(content.slot) for content in contents]
        self._pause()
        if any(one is None or _seal(one[0]) != _seal(content) for one, content in zip(held, contents, strict=True)):
            return None
        return SlotRows(self.slots, [content.slot for content in contents])

    def held(self, slot: int) -> tuple[int, int]:
        held = self.slots.get(slot)
        return (held[0].group, 1) if held else (0, 1)

    def close(self, kept: Kept | None = None, erase: bool = False) -> None:
        """See Slots."""

    def take_over(self, other: SimSlots) -> None:
        """The disk that another worker had."""
        self.incarnation, self.slots = other.incarnation, other.slots

    def resemble(self, other: SimSlots) -> None:
        """Have the versions of another memory or disk, and the pages of other slots of the same group."""
        pages: dict[int, Page | None] = {}  # by group, the one before
        for slot, (content, page) in other.slots.items():
            self.slots[slot] = content._replace(identity=self.identity), copy_of(pages.get(content.group))
            pages[content.group] = page


def _seal(content: Content) -> bytes:
    """What the product compares; a page of texts has no bytes."""
    return content.seal(memoryview(b""))


class SimTiers:
    """The tiers of one rank, and their movers: as long as the worker's memory."""

    def __init__(self, spec: ReplicaSpec, pages: Memory, stamps: StampTable, world: World) -> None:
        self.spec, self.pages, self.stamps, self.world = spec, pages, stamps, world
        rng = self.rng = world.rng
        num_rows = rows_for(spec.num_blocks)
        self._raw = bytearray(job_table_bytes(num_rows))
        self.table = JobTable.create(self._raw, num_rows)
        self._running: Baton | None = None
        # A mover takes up to four saves or moves at once, in four of five seeds one: these run as they always did.
        at_once = 1 if world.seed % 5 else 4
        self.slots = [SimSlots(tier, rng, self.pause, PIECE_BYTES // at_once) for tier in spec.tiers]
        device = SimpleNamespace(device=SimpleNamespace(type="cpu"))
        groups = [SimpleNamespace(group=group, bytes_per_block=1, layers=(1,)) for group in range(len(spec.groups))]
        memory: Any = SimpleNamespace(num_blocks=spec.num_blocks, memory=device, group=groups.__getitem__)
        moved = MoverMemory(memory, stamps, list[Slots](self.slots))
        self.movers = Movers(moved, self, self.table, num_threads=0)  # type: ignore[arg-type]
        self._name_disks()
        self._lost: list[tuple[float, Job]] = []
        self.loses, self.fails, self.slow = rng.choice([0, 0, 0.05]), rng.choice([0, 0, 0.1]), rng.choice([1, 1, 8])
        if world.seed % 10 == 0:
            self.slow = 30  # so that loads outlive their engine

    def take_over(self, other: SimTiers) -> None:
        """The next worker of the rank has the disk of the last one, and what its stamp table says of it."""
        first = self.spec.num_blocks
        for mine, theirs in zip(self.slots, other.slots, strict=True):
            if mine.spec.kind is TierKind.DISK:
                kept = kept_of(other.stamps, first, mine.spec.num_blocks)
                self.stamps.write(range(first, first + mine.spec.num_blocks), kept.versions)
                self.stamps.begin_above(kept.owner_epoch)
                mine.take_over(theirs)
            first += mine.spec.num_blocks
        self._name_disks()

    def resemble(self, other: SimTiers) -> None:
        """Have served a service that knew nothing of this one: slots have the versions of those of the worker before,
        and what another slot has.
        """
        ids = range(self.spec.num_blocks, self.spec.num_stamps)
        self.stamps.write(ids, [other.stamps.read(block) for block in ids])
        for mine, theirs in zip(self.slots, other.slots, strict=True):
            mine.resemble(theirs)

    def _name_disks(self) -> None:
        identities = [one.identity for one in self.slots if one.spec.kind is TierKind.DISK]
        self.stamps.name_disks(int.from_bytes(b"".join(identities)[:8], "little"))

    async def run(self) -> None:
        """Carry out jobs until the worker dies."""
        while True:
            await asyncio.sleep(self.rng.random() * _ACT_S * self.slow)
            self._end_lost()
            with self.movers._lock:
                self.movers._take()
                job = self.movers._first()
                if job is not None:
                    self.movers._working.append(job)
            if job is not None:
                await self._carry_out(job)

    async def _carry_out(self, job: Job) -> None:
        baton = self._running = Baton(lambda: self.movers._carry_out(job))
        while not baton.step():  # noqa: ASYNC110 - all time is virtual
            await asyncio.sleep(self.rng.random() * _ACT_S * self.slow)
        self._running = None
        if baton.bug is not None:
            self.world.record(history.Broken(f"a mover: {baton.bug!r}"))
        if self.rng.random() < self.loses:
            self._lost.append((self.world.loop.time() + _LOST_S, job))
            return
        self.world.num_loaded += len(job.rows) * (job.kind == JobKind.LOAD and bool(baton.result))
        self.movers._end(job, [number for number in baton.result if self.rng.random() >= self.fails])
        if self.rng.random() < 0.05:
            self.table.end(job.number, self.rng.random() < 0.5, len(job.numbers))  # reported twice

    def _end_lost(self) -> None:
        """Ends that were lost come late, as failures."""
        now = self.world.loop.time()
        for at, job in list(self._lost):
            if at <= now or self.world.is_finishing:
                self._lost.remove((at, job))
                self.movers._end(job, ())

    def end(self) -> None:
        """The worker has died."""
        if self._running is not None:
            self._running.abandon()

    def blocks_of_loads(self) -> set[int]:
        """Blocks that loads of any engine life may still write: also of those that no mover has seen."""
        jobs = [*self.movers._loads, *self.movers._working]
        rows = chain(*(job.rows for job in jobs), *JobTable(bytearray(self._raw)).take())
        return {row.block for row in rows if row.kind == JobKind.LOAD}

    def check_keys(self, replica: Replica, texts: Texts) -> None:
        """What a slot holds under the version that the core knows is what its key says. Raises WrongPage."""
        for tier, slots in zip(replica.tiers.each, self.slots, strict=True):
            for (domain, group, digest), slot in tier.in_order():
                held = slots.slots.get(slot)
                if held is None or held[0].version != tier.version[slot] or held[1] is None:
                    continue  # no load takes it
                num_tokens, text = texts.by_digest[domain, digest]
                if not Memory(self.spec, {1: held[1]}).holds(group, 1, num_tokens, text):
                    raise WrongPage(f"tier {tier.number}, slot {slot} has the key of {text!r} and holds {held[1]}")

    # -- operations on pages, with time between two acts ---------------------------------------------------------------

    def pause(self) -> None:
        if self._running is not None:
            self._running.pause()

    def gather(self, group: Any, blocks: Sequence[int], target: Rows) -> None:
        del group
        for at, block in enumerate(blocks):
            first = copy_of(self.pages.pages.get(block))
            self.pause()
            last = copy_of(self.pages.pages.get(block))
            if first is not None and last is not None and first.group == last.group:
                half = len(first.slots) // 2
                target.pages[at] = Page(first.group, first.slots[:half] + last.slots[half:])

    def scatter(self, group: Any, blocks: Sequence[int], rows: Rows) -> None:
        del group
        for block, page in zip(blocks, rows.pages, strict=True):
            self.pages.pages.pop(block, None)
            self.pause()
            if page is not None:
                self.pages.pages[block] = page


class TieredLife(TierScheduler, EngineLife):
    """An engine life on a replica with tiers."""

    def __init__(self, world: World, site: Site) -> None:
        self._ordered: list[Any] = []  # parts of answers whose jobs were not given to the movers
        super().__init__(world, site)
        self.jobs = TierJobs([rank.memory.tiers.table for rank in self.ranks])
        self.process.spawn(self._order_all())

    async def _order_all(self) -> None:
        """Give jobs to the movers once every rank has carried out the orders of their step."""
        while True:
            await asyncio.sleep(_LOOK_S)
            while self._ordered and all(rank.obeyed >= (self.epoch, self._ordered[0][0]) for rank in self.ranks):
                self.jobs.order(*self._ordered.pop(0))

    async def _take_result(self, parts: list[Part], answer: StepResult) -> None:
        self._ordered += [(answer.seq, number, result) for number, result in enumerate(answer.parts, answer.part)]
        self.site.evictions.answered((self.epoch, self._life, answer.seq), self._decided_as)
        await super()._take_result(parts, answer)
        for part in parts:  # not before: until then an image must leave out a request whose load has failed
            self.jobs_over([*part.cache.jobs_done, *part.cache.jobs_failed], part.cache.jobs_before)

    async def _claim(self, next_seq: int, ahead: int) -> None:
        await super()._claim(next_seq, ahead)
        self.waits.clear()
        self._ordered.clear()
        others = set(self.site.busy_blocks())
        self.jobs.begin(self.epoch, [block for block in self.session.busy_blocks if block not in others])
        until_s = self.world.loop.time() + _EARLIER_S
        while not self.jobs.may_carry_out:
            if self.world.loop.time() > until_s:
                raise Unavailable("movers work on jobs of an engine before this one")
            await asyncio.sleep(_LOOK_S)

    def _parts(self) -> list[Part]:
        """In some seeds the engine says what it says of the cache in any part."""
        parts = super()._parts()
        rng = Random(f"{self.world.seed} {self.epoch} {self.seq}")
        return spread(parts, rng) if self.world.seed % 7 == 6 and rng.random() < 0.5 else parts

    def _spoil(self, blocks: set[int], newest_stamp: int) -> None:
        """Slots that hold what was there before the last reset that every rank has carried out hold garbage too."""
        super()._spoil(blocks, newest_stamp)
        if blocks:
            last_reset = min(in_time(rank.memory.table.read(NULL_BLOCK)) for rank in self.ranks)
            for tier in (tier for rank in self.ranks for tier in rank.memory.tiers.slots):
                for slot, (content, page) in tier.slots.items():
                    if page is not None and in_time(content.version) <= last_reset:
                        tier.slots[slot] = content, Page(page.group, [None] * len(page.slots))

    def _cache(self, held: list[int]) -> Cache:
        cache = super()._cache(held)
        self._report(cache)
        return cache

    def _report(self, cache: Cache) -> None:
        self.jobs.report(cache, self.executed_through, self.seq)

    def _loads_over(self) -> list[int]:
        loading = set(self.jobs.blocks_loading)
        return [block for block in super()._loads_over() if block not in loading]

    def plan_end(self) -> list[Part]:
        (part,) = super().plan_end()
        part.cache.loads_over = [block for block in part.cache.loads_over if block not in self.jobs.blocks_loading]
        self._report(part.cache)
        return [part]

    async def _end_all(self) -> None:
        while self._is_loading:
            await self._step(self.plan_end())
            await asyncio.sleep(_ACT_S)
        await super()._end_all()
        host = self._host()
        if host is not None and host.epoch == self.epoch:
            tiers = specification_of(host.replica).tiers
            left = {"loads": len(tiers.jobs.loads), "pins": sum(len(tier.pins) for tier in tiers.each)}
            if any(left.values()):
                self.world.record(history.Broken(f"{self.site.name}: at the end, {left} are left"))

    @property
    def _is_loading(self) -> bool:
        """Whether blocks of this life's loads, or of those before, may still be written. Saves never end here: one that
        fails is tried again.
        """
        is_ordered = any(result.orders.load_job for _, _, result in self._ordered)
        return is_ordered or bool(self.jobs.blocks_loading) or bool(self.site.loading_blocks())

    def _revive(self) -> Revival:
        revival = super()._revive()
        return replace(revival, busy_blocks=tuple(sorted({*revival.busy_blocks, *self.jobs.blocks_loading})))
