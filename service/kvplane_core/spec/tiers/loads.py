"""Loads blocks of a hit from the tiers, and ends the jobs of the movers.

    admit with LOAD ──▶ loading: the request has its blocks and gets no tokens ──jobs_done──▶ it runs
                                                                               └─jobs_failed─▶ preempted

The load has references of its own to the blocks that it fills, from its order until the engine reports its end. So what
becomes of the request meanwhile (an end, a preemption) gives no page away that a mover still writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from kvplane.base.groups import GroupKind, Medium
from kvplane.base.step import LOAD_COLUMNS, Cache, CacheEvent, EventKind, PartResult
from kvplane.base.values import WhyDeclined
from kvplane_core.face.interface import INSIDE, Hit
from kvplane_core.face.keys import NULL_BLOCK, seal_key
from kvplane_core.spec.coordinator import Admission, Coordinator
from kvplane_core.spec.in_flight import InFlightTracker
from kvplane_core.spec.managers.base import FOREVER
from kvplane_core.spec.tiers.tiers import MAX_JOBS, Filled, Load, Location, Move, Save, Tiers

WINDOWS = {GroupKind.SLIDING_WINDOW, GroupKind.SLIDING_WINDOW_MLA}


class Missing(NamedTuple):
    """A block of a hit that is not on the device: its place in the table of a group, and the slot that has it."""

    group: int
    position: int
    source: Location


class LoadPlan(NamedTuple):
    """A hit of the union of device and tiers.

    Attributes:
        hit: the hit, with null blocks instead of slots.
        missing: what must be loaded, by group and position.
        gained: tokens of the hit beyond the hit of the device alone.
        load_ns, compute_ns: times to load what is missing, behind the loads in flight, and to compute what is gained; 0
            and 0 if one is unknown.
    """

    hit: Hit
    missing: list[Missing]
    gained: int
    load_ns: int
    compute_ns: int

    @property
    def farthest(self) -> int:
        """The number of the farthest tier that is read."""
        return max(one.source.tier for one in self.missing)

    @property
    def is_slower(self) -> bool:
        """Whether to load the hit takes at least as long as to compute it."""
        return self.load_ns >= self.compute_ns > 0


class Choice(NamedTuple):
    """What is loaded for an admission.

    Attributes:
        plan: what is loaded, now or after loads in flight; None if nothing is.
        why: why `passed` is not loaded.
        passed: a longer hit than that of the plan; the plan itself if it waits.
    """

    plan: LoadPlan | None = None
    why: WhyDeclined | None = None
    passed: LoadPlan | None = None


class TierLoads:
    """Plans, begins and ends loads, and ends saves and moves."""

    def __init__(self, coordinator: Coordinator, tracker: InFlightTracker) -> None:
        self._blocks = coordinator
        self._tiers: Tiers = coordinator.tiers
        self._pool = coordinator.pool
        self._requests = coordinator.requests
        self._tracker = tracker

    # -- admission ---------------------------------------------------------------------------------------------------

    def choose(self, slot: int, limit: int, device: Hit) -> Choice:
        """Choose a hit of the union of device and tiers that is longer than the one of the device, and is loaded.
        Changes nothing but counters, and which step has an admission that waits.
        """
        tiers = self._tiers
        longest = plan = self._longest(slot, limit, device) if tiers.has_keys else None
        if plan is not None and plan.is_slower:
            plan = self._nearer(slot, limit, device, plan)
            tiers.counters.too_slow += plan is None
        if plan is None:
            return Choice(None, WhyDeclined.TOO_SLOW, longest) if longest is not None else Choice()
        if len(tiers.jobs) >= MAX_JOBS:
            tiers.counters.no_job += 1
            return Choice(None, WhyDeclined.NO_JOB, plan)
        why = self._why_later(plan)
        if why is None:
            return Choice(plan) if plan is longest else Choice(plan, WhyDeclined.TOO_SLOW, longest)
        tiers.counters.given_up += why is WhyDeclined.GIVEN_UP
        return Choice(plan if why is WhyDeclined.WAITS else None, why, plan)

    def _why_later(self, plan: LoadPlan) -> WhyDeclined | None:
        """Return why a load may not begin now; None if it may.

        It waits for a load of the same slot, whose block is hit then, and for room: loads fill `most_loading` blocks,
        or one load alone what it needs. While it waits for room no later row begins a load, so that its turn comes. It
        waits only for loads that a request waits for: an engine gives up those that do not end.
        """
        tiers = self._tiers
        if tiers.waits_in and tiers.waits_in == self._pool.step:
            return WhyDeclined.WAITS
        before, loading = tiers.jobs.loads, tiers.num_loading
        if loading and len(plan.missing) + loading > tiers.most_loading:
            if any(map(self._is_awaited, before)):
                tiers.waits_in = self._pool.step
                tiers.counters.waited += 1
                return WhyDeclined.WAITS
            return WhyDeclined.GIVEN_UP
        if not any(one.source.slot in tiers.each[one.source.tier].pins for one in plan.missing):
            return None
        wanted = {one.source for one in plan.missing}
        sharing = [job for job, load in before.items() if any(row.source in wanted for row in load.rows)]
        return WhyDeclined.WAITS if any(map(self._is_awaited, sharing)) else WhyDeclined.GIVEN_UP

    def _is_awaited(self, job: int) -> bool:
        """Whether the request that a load was ordered for still waits for it."""
        request = self._tiers.jobs.loads[job].request
        return self._tiers.loading.get(request) == job and self._tracker.loads_from_tiers(request)

    def _longest(self, slot: int, limit: int, device: Hit) -> LoadPlan | None:
        hit = self._find(slot, limit)
        if hit.num_tokens <= device.num_tokens:
            return None
        plan = self._split(hit, hit.num_tokens - device.num_tokens)
        # Without missing blocks the look-up needed one that the hit does not: a job without rows would never end.
        return plan if plan.missing else None

    def _nearer(self, slot: int, limit: int, device: Hit, plan: LoadPlan) -> LoadPlan | None:
        """Return the longest hit without the farthest tiers that is loaded faster than computed, if there is one."""
        tiers = self._tiers
        try:
            for tiers.depth in range(plan.farthest, 0, -1):
                nearer = self._longest(slot, limit, device)
                if nearer is None or not nearer.is_slower:
                    return nearer
        finally:
            tiers.depth = len(tiers.each)
        return None

    def _times(self, missing: list[Missing], gained: int) -> tuple[int, int]:
        """Return the nanoseconds to load these blocks, behind the loads in flight, and to compute these tokens; 0 and 0
        if one is unknown.
        """
        costs = self._tiers.costs_ns
        sources = [one.source.tier for one in missing]
        sources += [row.source.tier for load in self._tiers.jobs.loads.values() for row in load.rows]
        if not costs or not costs[0] or any(not costs[1 + tier] for tier in set(sources)):
            return 0, 0
        return min(sum(costs[1 + tier] for tier in sources), FOREVER), min(gained * costs[0], FOREVER)

    def _find(self, slot: int, limit: int) -> Hit:
        """Find the longest prefix of a request in the union, of at most `limit` tokens, see `_find_prefix`."""
        requests, most = self._requests, self._blocks.most_hit(slot)
        return self._find_prefix(requests.content[slot].digests, requests.domain[slot], most, limit)

    def _find_prefix(self, digests: Sequence[bytes], domain: str, most: int, limit: int = FOREVER) -> Hit:
        """Find the longest prefix in the union that ends between blocks in every group: a block in which a hit ends is
        copied when the request is admitted, before a load would fill it.
        """
        lookup, unit = self._blocks.union, self._blocks.spec.scheduler_block_size
        hit = lookup.find(digests, domain, most, INSIDE, limit)
        while hit.num_tokens % unit:
            hit = lookup.find(digests, domain, most, INSIDE, hit.num_tokens - hit.num_tokens % unit)
        return hit

    def plan(self, digests: Sequence[bytes], domain: str, most: int) -> LoadPlan | None:
        """Return the longest hit of a prompt in the union, of at most `most` tokens; None without a hit. Changes
        nothing.
        """
        hit = self._find_prefix(digests, domain, most)
        return self._split(hit, 0) if hit.num_tokens else None

    def _split(self, hit: Hit, gained: int) -> LoadPlan:
        missing, rows = list[Missing](), list[list[int]]()
        for manager, blocks in zip(self._blocks.managers, hit.blocks, strict=True):
            skipped = max(manager.skipped_tokens(hit.num_tokens), 0) // manager.block_size
            row = [NULL_BLOCK] * min(skipped, len(blocks))
            for index in range(len(row), len(blocks)):
                source = self._tiers.location(blocks[index])
                row.append(blocks[index] if source is None else NULL_BLOCK)
                if source is not None:
                    missing.append(Missing(manager.group, index, source))
            rows.append(row)
        return LoadPlan(replace(hit, blocks=tuple(rows)), missing, gained, *self._times(missing, gained))

    def begin(self, admission: Admission, plan: LoadPlan) -> tuple[int, list[list[int]], Hit]:
        """Admit a request with the hit of the plan, and order the load of what is missing.

        The caller has checked that enough blocks are free. Returns the job, the new blocks per group, and the hit with
        the blocks that are loaded.
        """
        assert plan.missing, "no worker gets a job without rows, so it would never end"
        pool, slot = self._pool, admission.slot
        on_device = [block for row in plan.hit.blocks for block in row]
        pool.touch(on_device)  # the allocation below could otherwise evict them
        fresh = pool.take(len(plan.missing))
        rows = [list(row) for row in plan.hit.blocks]
        for block, one in zip(fresh, plan.missing, strict=True):
            rows[one.group][one.position] = block
        filled = replace(plan.hit, blocks=tuple(rows))
        new = self._blocks.admit(replace(admission, hit=filled))
        pool.release(on_device)
        job = self._tiers.next_job()
        load = Load(slot, self._requests.serial[slot], filled.num_tokens, pool.last_use(fresh), [])
        for block, one in zip(fresh, plan.missing, strict=True):
            load.rows.append(self._fill(slot, block, one))
            tier = self._tiers.each[one.source.tier]
            tier.pin(one.source.slot)
            key = seal_key(tier.key[one.source.slot])
            self._tiers.order(LOAD_COLUMNS, (job, *one.source, block, one.group, pool.stamp[block], key))
        self._tiers.jobs.loads[job] = load
        self._tiers.loading[slot] = job
        self._count(plan, any(on_device))
        self._tiers.each[plan.farthest].hit_tokens += plan.gained
        return job, new, filled

    def _count(self, plan: LoadPlan, with_device: bool) -> None:
        counters, sources = self._tiers.counters, {self._tiers.each[one.source.tier].medium for one in plan.missing}
        kinds = {self._blocks.managers[one.group].spec.kind for one in plan.missing}
        with_host, with_disk = Medium.HOST in sources, Medium.DISK in sources
        counters.loads += 1
        counters.loaded_tokens += plan.gained
        counters.device_host += with_device and with_host and not with_disk
        counters.host_disk += with_host and with_disk and not with_device
        counters.device_host_disk += with_device and with_host and with_disk
        counters.windows_alone += kinds <= WINDOWS
        counters.states_alone += kinds == {GroupKind.MAMBA}

    def _fill(self, slot: int, block: int, one: Missing) -> Filled:
        manager, digests = self._blocks.managers[one.group], self._requests.content[slot].digests
        size, hashed = manager.block_size, manager.hash_size
        first = one.position * size // hashed
        parent = digests[first - 1] if first else b""
        key = self._requests.domain[slot], one.group, digests[(one.position + 1) * size // hashed - 1]
        return Filled(block, self._pool.stamp[block], key, (one.position + 1) * size, parent, one.source)

    # -- completion --------------------------------------------------------------------------------------------------

    def end_jobs(self, cache: Cache, result: PartResult) -> None:
        """Apply the ends of jobs that a part reports; a job that has ended before changes nothing."""
        for job in cache.jobs_done:
            self._end(job, True, result)
        left = [job for job in self._tiers.jobs.numbers() if job < cache.jobs_before]
        for job in (*cache.jobs_failed, *left):
            self._end(job, False, result)

    def _end(self, job: int, is_done: bool, result: PartResult) -> None:
        jobs, counters = self._tiers.jobs, self._tiers.counters
        load = jobs.loads.pop(job, None)
        if load is not None:
            self._end_load(job, load, is_done, result)
            return
        write = jobs.saves.pop(job, None) or jobs.moves.pop(job, None)
        if write is None:
            return
        is_good = is_done and self._source_is_intact(write)
        self._tiers.end_write(job, write, is_good)
        counters.failed += not is_done
        counters.discarded += is_done and not is_good
        counters.saved += is_good and isinstance(write, Save)
        counters.moved += is_good and isinstance(write, Move)

    def _source_is_intact(self, write: Save | Move) -> bool:
        if isinstance(write, Move):
            return self._tiers.is_intact(write.source)
        return self._pool.stamp[write.block] == write.stamp

    def _end_load(self, job: int, load: Load, is_done: bool, result: PartResult) -> None:
        tiers, requests, slot = self._tiers, self._requests, load.request
        # A key that was dropped is not trusted; a block that was evicted may be damaged since.
        is_done = is_done and all(tiers.is_intact(row.source) for row in load.rows)
        is_done = is_done and all(self._pool.stamp[row.block] == row.stamp for row in load.rows)
        runs = requests.running[slot] and requests.serial[slot] == load.serial
        if tiers.loading.get(slot) == job:
            del tiers.loading[slot]
        tiers.unpin(load)
        blocks = [row.block for row in load.rows]
        if is_done:
            tiers.counters.loaded += len(blocks)
            for row in load.rows:
                tiers.each[row.source.tier].uses[row.key[1]].loaded += 1
            tiers.note_loaded(load)
            # A request that went back behind its hit may overwrite the blocks: it registers them once it computed them.
            if not runs or requests.computed[slot] >= load.num_tokens:
                self._register(load)
            else:
                self._blocks.register_again(blocks)
        else:
            tiers.counters.loads_failed += 1
            tiers.drop_farthest([row.source for row in load.rows])
            if runs:
                result.preempted.extend(self._tracker.preempt(slot, self._pool.step))
        # Launches that were sent before the load may still use the pages.
        self._tracker.release_later(blocks, load.after)

    def _register(self, load: Load) -> None:
        """Give the loaded blocks their keys, which are visible at once: their content is verified."""
        pool, step = self._pool, self._pool.step
        pool.step = pool.executed_through
        for row in load.rows:
            pool.register(row.block, row.key, row.num_tokens)
            for tier in self._tiers.each:
                tier.note_on_device(row.key)
        self._tracker.note_keys(load.request, pool.step)
        pool.step = step
        if pool.with_events:
            for run in _runs(load.rows):
                pool.events.append(self._stored(load.request, run))

    def _stored(self, slot: int, run: list[Filled]) -> CacheEvent:
        (domain, group, _), size = run[0].key, self._blocks.managers[run[0].key[1]].block_size
        starts = tuple(row.num_tokens - size for row in run)
        digests, blocks = tuple(row.key[2] for row in run), tuple(row.block for row in run)
        kind, parent, end = EventKind.STORED, run[0].parent, run[-1].num_tokens
        return CacheEvent(kind, group, digests, blocks, domain, parent, size, slot, starts[0], end, starts)


def _runs(rows: list[Filled]) -> Iterator[list[Filled]]:
    """Yield rows of one group whose blocks follow each other in the prompt."""
    run: list[Filled] = []
    for row in rows:
        if run and not (row.key[1] == run[-1].key[1] and row.parent == run[-1].key[2]):
            yield run
            run = []
        run.append(row)
    if run:
        yield run
