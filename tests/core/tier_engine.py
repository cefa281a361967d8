"""The random engine (`page_engine`) on a replica with tiers, with movers that do all that the contract permits.

A mover begins when the stamps of its job's step are written (a load: when its orders are done and `admit_load_after`
is executed), takes any time, leaves garbage while it works and after it failed, and continues after the engine died.
What it wrote may be lost. Its end is reported late, twice, as a failure although all went well, or never. It does not
look at the stamp of a page that it saves: the core must not trust a save whose page changed.

When the worker dies, pages and host tiers are gone; a disk keeps its slots and their versions. A new service knows the
keys of slots from a store that has lost its tail.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from random import Random
from typing import Any

from kvplane.base.groups import ReplicaSpec, TierKind
from kvplane.base.sections import Prefetch
from kvplane.base.stamps import in_time
from kvplane.base.step import ANY_HIT, Admit, Cache, End, Facts, Part, PartResult, RowFlag
from kvplane.base.values import NO_REQUEST, WhyDeclined
from kvplane_core.face import setup
from kvplane_core.face.entries import Entries
from kvplane_service.replicas.stamps import disks_alone
from tests.core import page_scheduler
from tests.core.page_engine import RandomEngine
from tests.core.page_memory import Memory, Page, WrongPage
from tests.core.page_requests import Request
from tests.core.page_scheduler import RandomScheduler
from tests.core.specification import specification_of
from tests.core.tier_spoils import Hidden, Key, Spoils, holed, part_of, shown_of, spread

Slot = tuple[int, int]  # tier and slot
HEADS = ["ab" * 22, "b" * 40, "aaab" * 11, "aabb" * 5 + "a" * 20, "ba" * 15]


@contextmanager
def small_pools() -> Iterator[None]:
    """Look at all that is evicted next: a tenth of these pools is a block or two. And ask for longer prompts again."""
    before = setup.AHEAD_SHARE, page_scheduler.HEADS
    setup.AHEAD_SHARE, page_scheduler.HEADS = 1, HEADS
    try:
        yield
    finally:
        setup.AHEAD_SHARE, page_scheduler.HEADS = before


@dataclass
class TierMemory:
    """The slots of all tiers: version and page; a slot without an entry holds garbage."""

    slots: dict[Slot, tuple[int, Page]] = field(default_factory=dict)

    def read(self, slot: Slot, version: int) -> Page | None:
        """The page, if the slot holds this version."""
        held = self.slots.get(slot)
        return held[1] if held is not None and held[0] == version else None


@dataclass
class Job:
    """A job on its way. `begin` and `end` are the two moments at which it touches what it reads and writes.

    Attributes:
        seq: step whose orders must be carried out before.
        after: step that must be executed before, of a load.
        blocks_written: of a load.
        state: 0 not begun, 1 begun, 2 over.
        is_good: what the mover says when it is over.
        first, at: as of a `Transfer`, so that a load can outlive its engine.
    """

    number: int
    seq: int
    begin: Callable[[], None]
    finish: Callable[[], bool]
    after: int = 0
    blocks_written: frozenset[int] = frozenset()
    state: int = 0
    is_good: bool = False
    first: int = 0
    at: int = 0

    def write(self, count: int) -> None:
        """Continue, also when no engine waits for it."""
        del count
        if self.state < 2:
            self.advance()
        elif self.blocks_written:
            self.finish()  # what is late may come twice

    def advance(self) -> None:
        if self.state == 0:
            self.begin()
        else:
            self.is_good = self.finish()
        self.state += 1

    def blocks(self, spec: ReplicaSpec) -> set[int]:
        """All that it may write."""
        del spec
        return set(self.blocks_written)


def copy_of(page: Page | None) -> Page | None:
    return None if page is None else Page(page.group, list(page.slots))


class TierScheduler(RandomScheduler):
    """An engine that lets hits be loaded from tiers.

    Attributes:
        waits: slot -> (life, job) of requests whose hit is loaded.
    """

    def __init__(self, *args: Any) -> None:
        self.waits: dict[int, tuple[tuple[int, int], int]] = {}
        super().__init__(*args)

    def _admit(self) -> Admit:
        admit = super()._admit()
        for row, external in enumerate(admit.external):
            flags = admit.flags[row]
            if not external and not flags & (RowFlag.DELAY_CACHING | RowFlag.WHOLE) and self._chance(80):
                admit.flags[row] |= int(RowFlag.LOAD)
                admit.expected_hit[row] = ANY_HIT if self._chance(90) else admit.expected_hit[row]
        return admit

    def _parts(self) -> list[Part]:
        parts = super()._parts()
        rng = copy(self.rng)  # a copy: the run of a seed stays as it was
        if len(self.spec.tiers) > 1 and rng.random() < 0.5:
            parts[-1].prefetch = self._prefetch(rng)
        return parts

    def _prefetch(self, rng: Random) -> Prefetch:
        """Requests that wait, and prompts that none has yet."""
        waiting = [slot for slot, one in self.requests.items() if not one.running and not one.is_held]
        slots = [slot for slot in waiting if rng.random() < 0.7]
        rows = Prefetch(slots, [0] * len(slots), domain=[""] * len(slots))
        known = list(self.digests.items())
        for (_, domain), digests in rng.sample(known, min(2, len(known))):
            count = rng.randint(1, len(digests))
            rows.slot.append(NO_REQUEST)
            rows.num_hashes.append(count)
            rows.hashes += b"".join(digests[:count])
            rows.domain.append(domain)
        rows.within_ns = [rng.choice([0, 0, 1, 10**9]) for _ in rows.slot]
        return rows

    def jobs_over(self, numbers: Container[int], before: int = 0) -> None:
        """The next step reports the ends of these jobs, and of all with lower numbers than `before`."""
        self.waits = {
            slot: (life, job) for slot, (life, job) in self.waits.items() if job not in numbers and job >= before
        }

    def _row(self, facts: Facts, slot: int, end: End = End.NONE, *args: object, **named: object) -> None:
        super()._row(facts, slot, end, *args, **named)  # type: ignore[arg-type]
        if end is End.HELD and self._waits(slot):
            self.requests[slot].checked = 0  # no transfer reads pages that a load still writes

    def _waits(self, slot: int) -> bool:
        return slot in self.waits and slot in self.requests and self.waits[slot][0] == self.requests[slot].life

    def _is_sound(self, request: Request) -> bool:
        return not self._waits(request.life[0]) and super()._is_sound(request)  # type: ignore[misc]

    def take_answer(self, parts: list[Part], results: list[PartResult]) -> None:
        super().take_answer(parts, results)
        for part, result in zip(parts, results, strict=True):
            for row, slot in enumerate(part.admit.slot):
                job = result.admit_job[row] if result.admit_job else 0
                if job:
                    self.waits[slot] = self.requests[slot].life, job
                    assert result.admit_granted[row] == 0
                    assert job in result.orders.load_job, "a job that no mover gets never ends"


class TierEngine(TierScheduler, RandomEngine):
    """Drives a replica with tiers.

    Attributes:
        jobs: in flight, of this engine life and of earlier ones.
        reports: ended jobs that are not reported yet: number, whether they are done, step to wait for.
        has_costs: states what tokens and loads take.
        kept_slots: slots that kept their keys over deaths of a worker.
        loaded: rows that were loaded for hits that then ran.
        tide: steps in which all prompts are new, and steps in which all come back, in turn; 0: each prompt is drawn.
            What comes back at one time is loaded at one time, so that loads wait for each other.
        returns: a store loses its records of blocks, or of slots, for an engine life, in which something is evicted
            that they name; then it is back as it was.
        lacked: what the store has meanwhile; None while it lacks nothing.
    """

    tide = 0
    returns = False

    def __init__(self, spec: ReplicaSpec, rng: Random, most_drafts: int = 0) -> None:
        self.tier_memory = TierMemory()
        self.has_new_memory, self.kept_slots = False, 0
        self.jobs: list[Job] = []
        self.reports: list[tuple[int, bool, int]] = []
        self.reported_jobs: list[int] = []
        self.loaded = self.done_loads = self.evicted_seq = 0
        self.lacked: list[Entries] | None = None
        self.hidden = Hidden()
        self.has_costs = copy(rng).random() < 0.4
        super().__init__(spec, rng, most_drafts)
        self.spoils = Spoils(self.tier_memory.slots, lambda domain, digest: self.texts.by_digest[domain, digest][0])
        self.forgets = rng.choice([0, 0, 10])
        self.never, self.breaks = rng.choice([0, 0, 5, 20]), rng.choice([0, 0, 5, 30])
        # Lives that last, and requests that come back: what left the device is asked for again.
        self.deaths, self.evicts, self.loads = rng.choice([0, 1, 3]), rng.choice([0, 4, 20]), rng.choice([0, 10, 40])
        self.ways_to_end = rng.choice([(End.FREE, End.PREEMPTED), (End.PREEMPTED, End.HELD, End.FREE)])
        # Together they reach a bound of the fast path that is too high, on a device alone too: it costs a key, no hit.
        self.ends_late = self.evicts == 0
        self.slow = rng.choice([5, 30, 70])

    # -- steps -------------------------------------------------------------------------------------------------------

    def _head(self) -> str:
        if not self.tide:
            return super()._head()
        is_new = self.seq // self.tide % 2 == 0
        return "".join(self.rng.choices("ab", k=20)) if is_new else self.rng.choice(HEADS)

    def _cache(self, held: list[int]) -> Cache:
        cache = super()._cache(held)
        cache.reset &= self._chance(15)
        ready = [one for one in self.reports if one[2] <= self.executed_through and self._chance(80)]
        self.reports = [one for one in self.reports if one not in ready]
        cache.jobs_done = [number for number, is_done, _ in ready if is_done]
        cache.jobs_failed = [number for number, is_done, _ in ready if not is_done]
        if self.reported_jobs and self._chance(20):
            again = self.rng.choice(self.reported_jobs)
            self.rng.choice([cache.jobs_done, cache.jobs_failed]).append(again)
        if self._chance(10):  # all that is older than the oldest job that a mover has, or that is not reported
            waiting = [*(job.number for job in self.jobs), *(number for number, _, _ in self.reports)]
            cache.jobs_before = min(waiting, default=self.replica.coordinator.tiers.last_job + 1)
            self.jobs_over((), cache.jobs_before)
        self.reported_jobs += [number for number, _, _ in ready]
        self.jobs_over([number for number, _, _ in ready])
        return cache

    def step(self) -> None:
        """Engines die more often while no rank has carried out an eviction."""
        drawn, is_returning = copy(self.rng).random(), self.lacked is not None and 0 < self.evicted_seq <= self.stamped
        if drawn < (
            0.5
            if is_returning
            else 0.2
            if self.spoils.has_open(self.stamped)
            else 0.1 * (self.returns and self.seq > 12)
        ):
            self._crash()
        super().step()

    def _parts(self) -> list[Part]:
        parts, rng = super()._parts(), copy(self.rng)
        cache = parts[0].cache
        if self.has_costs and rng.random() < 0.15:
            of_tiers = [rng.choice([0, 1, 20, 400]) for _ in self.spec.tiers]
            cache.costs_ns = [rng.choice([0, 1, 5, 100]), *of_tiers]
        if cache.jobs_done and not any(one.running or one.is_held for one in self.requests.values()):
            cache.reset |= rng.random() < 0.1
        if self.seq == 1 and rng.random() < 0.7:
            cache.evicted = [*cache.evicted, *(block for block in self.spoils.lost if block not in cache.evicted)]
        elif self.seq == 1:
            self.spoils.lost.clear()
        if self.lacked is not None and not self.evicted_seq:
            lacking = self._copied_blocks()
            if lacking:
                cache.evicted, self.evicted_seq = [*cache.evicted, rng.choice(lacking)], self.seq
        return spread(parts, rng) if rng.random() < 0.4 else parts

    def _copied_blocks(self) -> list[int]:
        """Blocks with copies in slots: those that the store does not know, or, if it knows them, those with a key."""
        keys = shown_of(self.followed.follower, set(range(1, self.spec.num_blocks))) | self._hidden_keys()
        return [block for block, some in keys.items() if self.spoils.copied(some)]

    def _hidden_keys(self) -> dict[int, frozenset[Key]]:
        return self.hidden.keys(specification_of(self.replica).coordinator.pool.stamp, self.memory.stamps)

    def _send(self, parts: list[Part]) -> None:
        keys, jobs = self.spoils.keys_of(parts, self.followed.follower), self.replica.coordinator.tiers.jobs
        keys |= {block: some for block, some in self._hidden_keys().items() if block in keys}
        flying = {*jobs.saves, *jobs.moves}
        super()._send(parts)
        results, jobs = self.last_results, self.replica.coordinator.tiers.jobs
        evicted = self.spoils.answered(self.seq, parts, results, keys)
        was_reset = any(result.reset_done for result in results)
        self.spoils.spoil(self.seq, evicted, was_reset, {*flying, *jobs.saves, *jobs.moves})

    def take_answer(self, parts: list[Part], results: list[PartResult]) -> None:
        super().take_answer(parts, results)
        late = [part.cache for part in parts[1:]]
        end_late = any(cache.jobs_done or cache.jobs_failed or cache.jobs_before for cache in late)
        for result in results:
            after = dict(zip(result.admit_job, result.admit_load_after, strict=False))
            self._take_orders(result, after)
            waits = WhyDeclined.WAITS in result.declined.why
            assert not waits or end_late or any(map(self._waits, self.waits)), (
                "an admission waits for a load that was given up"
            )
        loads = [len(load.rows) for load in self.replica.coordinator.tiers.jobs.loads.values()]
        assert len(loads) < 2 or sum(loads) <= self.spec.num_blocks // 4, "loads fill more than their share of the pool"

    def _take_orders(self, result: PartResult, after: dict[int, int]) -> None:
        orders = result.orders
        self.spoils.ordered(orders, self.followed.follower)
        loads: dict[int, list[tuple[Slot, int, int]]] = {}
        columns = (orders.load_job, orders.load_tier, orders.load_slot, orders.load_version, orders.load_block)
        for job, tier, slot, version, block in zip(*columns, strict=True):
            loads.setdefault(job, []).append(((tier, slot), version, block))
            assert block not in orders.zero_block, "a page that is loaded is zeroed"
        for job, rows in loads.items():
            self.jobs.append(self._load(job, rows, after.get(job, 0)))
        for job, block, tier, slot in zip(
            orders.save_job, orders.save_block, orders.save_tier, orders.save_slot, strict=True
        ):
            self.jobs.append(self._save(job, block, (tier, slot)))
        moves = (orders.move_job, orders.move_tier, orders.move_slot, orders.move_version)
        targets = zip(orders.move_to_tier, orders.move_to_slot, strict=True)
        for (job, tier, slot, version), target in zip(zip(*moves, strict=True), targets, strict=True):
            self.jobs.append(self._move_slot(job, (tier, slot), version, target))

    # -- movers ------------------------------------------------------------------------------------------------------

    def _hold(self, slot: Slot, held: tuple[int, Page] | None) -> None:
        """A slot holds a version from now on, and the stamp table has it; None: it holds garbage."""
        self.tier_memory.slots.pop(slot, None)
        self.memory.stamps[self._id_of(slot)] = held[0] if held else 0
        if held:
            self.tier_memory.slots[slot] = held

    def _id_of(self, slot: Slot) -> int:
        spec = self.replica.spec
        return spec.num_blocks + sum(tier.num_blocks for tier in spec.tiers[: slot[0]]) + slot[1]

    def _load(self, number: int, rows: Sequence[tuple[Slot, int, int]], after: int) -> Job:
        memory, read = self.memory, list[Page | None]()

        def begin() -> None:
            read[:] = [copy_of(self.tier_memory.read(slot, version)) for slot, version, _ in rows]
            for _, _, block in rows:
                memory.pages.pop(block, None)

        def finish() -> bool:
            for page, (_, _, block) in zip(read, rows, strict=True):
                memory.pages.pop(block, None)
                if page is not None:
                    memory.pages[block] = Page(page.group, list(page.slots))
            return None not in read and not self._chance(self.breaks)

        return Job(number, self.seq, begin, finish, after, frozenset(block for _, _, block in rows))

    def _save(self, number: int, block: int, target: Slot) -> Job:
        memory, read, is_lost = self.memory, list[Page | None](), self._chance(self.forgets)

        def begin() -> None:
            read.append(copy_of(memory.pages.get(block)))
            if not is_lost:
                self._hold(target, None)

        def finish() -> bool:
            first, last = read[0], memory.pages.get(block)
            if is_lost:
                memory.stamps[self._id_of(target)] = number  # the disk keeps what it had, and states no error
                return True
            self._hold(target, None)
            if first is None or last is None or first.group != last.group:
                return self._chance(50)  # of garbage it may say that it is saved
            half = len(first.slots) // 2
            self._hold(target, (number, Page(first.group, first.slots[:half] + last.slots[half:])))
            return not self._chance(self.breaks)

        return Job(number, self.seq, begin, finish)

    def _move_slot(self, number: int, source: Slot, version: int, target: Slot) -> Job:
        read = list[Page | None]()

        def begin() -> None:
            read.append(copy_of(self.tier_memory.read(source, version)))
            self._hold(target, None)

        def finish() -> bool:
            self._hold(target, None)
            if read[0] is None:
                return False
            self._hold(target, (number, read[0]))
            return not self._chance(self.breaks)

        return Job(number, self.seq, begin, finish)

    def _stride(self) -> None:
        for job in list(self.jobs):
            if not self._may_begin(job) or self._chance(self.slow):
                continue
            for _ in range(self.rng.choice([1, 2])):
                if job.state < 2:
                    job.advance()
            if job.state == 2:
                self.jobs.remove(job)
                if not self._chance(self.never):
                    self.reports.append((job.number, job.is_good, job.after if job.is_good else 0))
        super()._stride()

    def _may_begin(self, job: Job) -> bool:
        """A load waits until zeroes and copies of its step are done; what reads pages, only for the stamps."""
        return job.seq <= (self.moved if job.blocks_written else self.stamped) and job.after <= self.launched

    # -- deaths ------------------------------------------------------------------------------------------------------

    def _crash(self) -> None:
        if not self._chance(25):
            super()._crash()
            return
        memory, spec, last_reset = self.memory, self.replica.spec, in_time(self.memory.stamps[0])
        self.spoils.die(self.stamped)
        self.spoils.lost.clear()  # with the pages
        memory.pages.clear()
        self.movers, self.jobs, self.reports, self.reported_jobs, self.waits = [], [], [], [], {}
        memory.stamps[: spec.num_blocks] = [0] * spec.num_blocks
        for slot in list(self.tier_memory.slots):
            if spec.tiers[slot[0]].kind is TierKind.HOST:
                self._hold(slot, None)
        memory.stamps[:] = [stamp if in_time(stamp) > last_reset else 0 for stamp in memory.stamps]
        self.has_new_memory = True
        if self._chance(50):
            self.begin()
        else:
            self._recover([])
        self.has_new_memory = False
        self.kept_slots += sum(len(tier.key) for tier in self.replica.coordinator.tiers.each)

    def _begin_epoch(self) -> None:
        shown = disks_alone(self.memory.stamps, self.replica.spec)
        is_new = self.has_new_memory
        self.replica.begin_epoch(self.epoch, shown if is_new else self.memory.stamps, memory_is_new=is_new)

    def _leave_movers(self, kept: list[int]) -> None:
        super()._leave_movers(kept)
        self.spoils.die(self.stamped)
        loads = [job for job in self.jobs if job.blocks_written]
        self.movers += filter(self._may_begin, loads)  # type: ignore[arg-type]
        # Saves and moves of the life that ended continue; what was not begun may never be.
        self.jobs = [job for job in self.jobs if not job.blocks_written and self._may_begin(job)]
        for job in self.jobs:
            job.seq = 0
        self.reports = [(number, is_done, 0) for number, is_done, _ in self.reports]
        self.waits = {}

    def _chunks(self, stored: list[Entries]) -> list[Entries]:
        """A store may lose any record for a while, of a block or of a slot with its copy."""
        chunks, rng = super()._chunks(stored), copy(self.rng)
        if self.returns:
            chunks, self.lacked = [*chunks, *(self.lacked or ())], None if self.lacked is not None else chunks
            lacks_slots, first = rng.random() < 0.5, self.spec.num_blocks
            return chunks if self.lacked is None else [part_of(one, first, lacks_slots) for one in chunks]
        return [holed(one, rng) for one in chunks] if rng.random() < 0.4 else chunks

    def _recover(self, kept: list[int]) -> None:
        self.reports, self.reported_jobs = [], []  # another service does not know them
        unheard, self.jobs = self.jobs, []
        shown, self.evicted_seq = shown_of(self.followed.follower, set(range(1, self.spec.num_blocks))), 0
        super()._recover(kept)
        self.hidden.note(shown, self.memory.stamps)
        for job in unheard:
            while job.state < 2:
                job.advance()

    # -- checks ------------------------------------------------------------------------------------------------------

    def check_keys(self) -> None:
        """Every key of a tier names a slot that holds just that, or another version, which no load takes for it. Once
        all orders are carried out, the memory proves those that were written in this engine life.
        """
        super().check_keys()
        if not self.queue:
            for tier in self.replica.coordinator.tiers.each:
                mine = {slot: version for slot, version in tier.version.items() if version >> 32 == self.epoch}
                shown = {slot: self.memory.stamps[self._id_of((tier.number, slot))] for slot in mine}
                assert shown == mine, f"tier {tier.number} has keys that the memory does not prove"
        for tier in self.replica.coordinator.tiers.each:
            for (domain, group, digest), slot in tier.in_order():
                page = self.tier_memory.read((tier.number, slot), tier.version[slot])
                if page is None:
                    continue
                num_tokens, text = self.texts.by_digest[domain, digest]
                memory = Memory(self.spec, {1: page})
                if not memory.holds(group, 1, num_tokens, text):
                    raise WrongPage(f"tier {tier.number}, slot {slot} has the key of {text!r} and holds {page}")
