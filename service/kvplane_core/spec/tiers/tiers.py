"""All tiers of a replica, the jobs of their movers, and the index that look-ups of the union use."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvplane.base.groups import ReplicaSpec, SavePolicy
from kvplane.base.stamps import MAX_COUNTER, MAX_EPOCH, Stamp, in_time
from kvplane.base.step import LOAD_COLUMNS, MOVE_COLUMNS, SAVE_COLUMNS, CacheEvent, Orders, PartResult, RemoveReason
from kvplane_core.face.counters import TierCounters
from kvplane_core.face.keys import NULL_BLOCK, Key, seal_key
from kvplane_core.spec.pool import BlockPool
from kvplane_core.spec.tiers.tier import Tier

MAX_JOBS = 4096  # jobs in flight; at this number nothing is saved, moved or loaded
_JOB_BITS = 32  # a job is numbered by its engine life (epoch) and a counter of 32 bits, as a stamp without generation
MAX_VERSION = Stamp(0, MAX_EPOCH, MAX_COUNTER).pack()
_NEVER = 1  # no stamp and no version: those of the first epoch begin above


class Location(NamedTuple):
    """A slot of a tier, and the version that a reader expects in it."""

    tier: int
    slot: int
    version: int


class Filled(NamedTuple):
    """One row of a load: a block that is filled from a slot, and the key that it has afterwards.

    `stamp`: of the block when the load was ordered; it changes if the block is evicted meanwhile. `num_tokens`: tokens
    of the key's prefix. `parent`: digest of the block before it, b"" if there is none.
    """

    block: int
    stamp: int
    key: Key
    num_tokens: int
    parent: bytes
    source: Location


class Load(NamedTuple):
    """A load in flight. It has one reference to each of its blocks, and a pin on each of its slots.

    Attributes:
        request, serial: slot of the request that was admitted with this hit, and number of its use of the slot.
        num_tokens: tokens of the hit.
        after: the last step in flight whose launch may use the blocks for an earlier request; 0 if none.
        rows: blocks to fill, by group and position.
    """

    request: int
    serial: int
    num_tokens: int
    after: int
    rows: list[Filled]


@dataclass(frozen=True, slots=True)
class Save:
    """A block that is being saved. Stored if the block still has this stamp when the job is done: then no order that
    was answered until then changes the page.
    """

    key: Key
    block: int
    stamp: int
    tier: int
    slot: int


@dataclass(frozen=True, slots=True)
class Move:
    """A slot that is being copied to another tier. Stored if the source still has its version when the job is done."""

    key: Key
    source: Location
    tier: int
    slot: int


@dataclass(slots=True)
class Jobs:
    """The jobs in flight, by number."""

    loads: dict[int, Load] = field(default_factory=dict)
    saves: dict[int, Save] = field(default_factory=dict)
    moves: dict[int, Move] = field(default_factory=dict)

    def writes(self) -> list[Save | Move]:
        """Return the jobs that write slots."""
        return [*self.saves.values(), *self.moves.values()]

    def numbers(self) -> list[int]:
        """Return the numbers of all jobs in flight, ascending."""
        return sorted((*self.loads, *self.saves, *self.moves))

    def __len__(self) -> int:
        return len(self.loads) + len(self.saves) + len(self.moves)


class Tiers:
    """The tiers of one replica. A replica without tiers has an object without any, which costs nothing.

    Args:
        spec: specification of the replica.
        pool: its block pool.
    """

    def __init__(self, spec: ReplicaSpec, pool: BlockPool) -> None:
        sizes = tuple(group.block_size for group in spec.groups)
        retained = pool.retained
        self.each = tuple(Tier(number, tier, sizes, spec.events, retained) for number, tier in enumerate(spec.tiers))
        for one in self.each:
            one.is_lent = self.each[-1].is_of_peers and not one.is_of_peers
        retained.holders = self.each if retained.tiers else ()
        self.jobs = Jobs()
        self.counters = TierCounters()
        self.last_job = 0
        self.loading: dict[int, int] = {}  # by slot of a request: the load into its blocks
        self.costs_ns: list[int] = []  # `Cache.costs_ns`: of a token, and of a block of each tier; empty = unknown
        self.depth = len(self.each)  # number of tiers that a look-up searches
        self.demand = 0  # blocks that a step takes, at most, in the recent past
        self.demand_now = 0  # the same, of the step being applied
        self.orders = Orders()
        # Blocks that this core has given no stamp yet, and for which the memory shows one: a store may know their key.
        self.unknown: set[int] = set()
        self._sizes = sizes
        self._pool = pool
        ends = [spec.num_blocks]
        for tier in spec.tiers:
            ends.append(ends[-1] + tier.num_blocks)
        # Id of slot 0 of each tier in the blocks of a hit, and where its versions begin in a stamp table.
        self._firsts = tuple(ends[:-1])
        self.ids = range(ends[0], ends[-1])  # of all slots
        self.most_loading = spec.num_blocks // 4  # blocks that several loads fill at one time
        self.waits_in = 0  # the last step of this engine life in which an admission waited for that

    # -- index -------------------------------------------------------------------------------------------------------

    def find(self, domain: str, groups: Sequence[int], digest: bytes, horizon: int) -> list[int] | None:
        """Return what `BlockPool.find` returns, with ids from num_blocks on for slots of tiers, the nearest tier first.

        A group takes from a tier only what the device lacks.
        """
        blocks = self._pool.find(domain, groups, digest, horizon)
        if blocks is not None:
            return blocks
        found = []
        for group in groups:
            one = self._pool.find(domain, (group,), digest, horizon)
            at = self._find_in_tiers((domain, group, digest)) if one is None else one[0]
            if at is None:
                return None
            found.append(at)
        return found

    def _find_in_tiers(self, key: Key) -> int | None:
        for tier, first in zip(self.each[: self.depth], self._firsts, strict=False):
            slot = tier.find(key)
            if slot is not None:
                return first + slot
        return None

    def location(self, block: int) -> Location | None:
        """Return the slot that an id of a hit stands for; None for a block of the device."""
        for tier, first in zip(reversed(self.each), reversed(self._firsts), strict=True):
            if block >= first:
                return Location(tier.number, block - first, tier.version[block - first])
        return None

    def tier_of(self, domain: str, group: int, digest: bytes) -> int | None:
        """Return the number of the nearest tier that has a key; None if none has."""
        key = domain, group, digest
        return next((tier.number for tier in self.each if tier.find(key) is not None), None)

    @property
    def has_keys(self) -> bool:
        """Whether a tier has a key."""
        return any(tier.key for tier in self.each)

    def has(self, key: Key) -> bool:
        """Whether a tier has the key, or a job in flight writes it into one."""
        return any(tier.has(key) for tier in self.each)

    def is_intact(self, source: Location) -> bool:
        """Whether the slot has had this version without interruption."""
        return self.each[source.tier].version.get(source.slot) == source.version

    def clear(self, is_reported: bool = True) -> None:
        """Forget all keys. `is_reported`: as events; else the event CLEARED covers them."""
        for tier in self.each:
            tier.clear()
            if not is_reported:
                tier.take_events()

    def stored_events(self) -> list[CacheEvent]:
        """Return STORED events of all keys, of at most `MAX_HASHES` keys each."""
        return [run for tier in self.each for run in tier.stored_events()]

    def take_events(self) -> list[CacheEvent]:
        """Return and clear the events of all tiers since the last call."""
        return [run for tier in self.each for run in tier.take_events()]

    def drop(self, key: Key) -> None:
        """Forget a key whose content is not trusted any more. Loads of it fail."""
        for tier in self.each:
            tier.drop(key)

    def drop_farthest(self, sources: Sequence[Location]) -> None:
        """Forget what a load that failed read in the farthest of its tiers: a mover does not say which slot it could
        not read. If it was one of a nearer tier, the next load fails too, and forgets that; copies elsewhere are sound.
        """
        farthest = max(source.tier for source in sources)
        for source in sources:
            if source.tier == farthest and self.is_intact(source):
                self.each[farthest].drop_slot(source.slot)

    def revoke(self, block: int, key: Key | None) -> None:
        """Drop permanently what an evicted block holds, its `key`; every key if only a store could name it.

        Every rank writes another version for all slots that may hold it, of all tiers: those that have the key, and
        those that hold what no key here names. So no store returns it. What is being written into such a slot does
        not count, since the mover may write the version of its job before the rank writes this one.
        """
        if key is not None:
            self.drop(key)
        elif block in self.unknown and not self._pool.stamp[block]:
            for tier in self.each:
                for each, _ in list(tier.in_order()):
                    tier.drop(each)
        for tier, first in zip(self.each, self._firsts, strict=True):
            if not tier.stale:
                continue
            for slot in sorted(tier.stale):
                self.order(("stamp_block", "stamp"), (first + slot, self._pool.draw()))
            for job, save in self.jobs.saves.items():
                if save.tier == tier.number and save.slot in tier.stale:
                    self.jobs.saves[job] = replace(save, stamp=_NEVER)
            for job, move in self.jobs.moves.items():
                if move.tier == tier.number and move.slot in tier.stale:
                    self.jobs.moves[job] = replace(move, source=move.source._replace(version=_NEVER))
            tier.stale.clear()

    def reset(self) -> None:
        """Forget all keys permanently: every rank writes the stamp of a reset, behind that of each slot."""
        self.clear(is_reported=False)
        self.unknown.clear()
        for tier in self.each:
            tier.stale.clear()

    def open_jobs(self) -> dict[str, int]:
        """Return the number of jobs in flight by kind."""
        jobs = self.jobs
        return {"load": len(jobs.loads), "save": len(jobs.saves), "move": len(jobs.moves)}

    # -- what is wanted early ----------------------------------------------------------------------------------------

    def note_computed(self, registered: Sequence[tuple[int, Key]]) -> None:
        """Record the keys that blocks of the device got, for a first tier that is early."""
        pool = self._pool
        if not self.each or not self.each[0].wanted.is_early:
            return
        for block, key in registered:
            if not pool.key_tokens[block] % self._sizes[key[1]] and pool.key_of(block) == key:
                self.each[0].wanted.note_computed(block, pool.stamp[block], key)

    def note_hit(self, blocks: Iterable[int]) -> None:
        """Record that a request adopted these blocks of the device."""
        if not self.each or self.each[0].wanted.policy is not SavePolicy.REUSE:
            return
        for block in blocks:
            if block != NULL_BLOCK:
                self.each[0].wanted.note_used(block, self._pool.stamp[block])

    def note_loaded(self, load: Load) -> None:
        """Record that slots were read, for tiers behind theirs."""
        for row in load.rows:
            for behind in self.each[row.source.tier + 1 : row.source.tier + 2]:
                behind.wanted.note_used(row.source.slot, row.source.version)

    # -- jobs --------------------------------------------------------------------------------------------------------

    def load_after(self, job: int) -> int:
        """Return the step that a load in flight waits for; 0 for other jobs."""
        load = self.jobs.loads.get(job)
        return load.after if load is not None else 0

    def next_job(self) -> int:
        """Return the number of a new job."""
        # A reset of the cache draws its stamp from the same numbers: older versions count no more.
        self.last_job = max(self.last_job + 1, self._pool.draw() & MAX_VERSION)
        return self.last_job

    @property
    def num_loading(self) -> int:
        """Number of blocks that loads in flight fill."""
        return sum(len(load.rows) for load in self.jobs.loads.values())

    def begin_write(self, tier: Tier, key: Key) -> int | None:
        """Take a slot for the content of a key that a job will write; None, counted, if there is none."""
        slot = tier.take_slot()
        if slot is None:
            self.counters.no_slot += 1
            return None
        tier.writing.add(key)
        return slot

    def order_move(self, tier: Tier, slot: int, target: Tier) -> bool:
        """Order a copy of a slot that has a key into another tier; returns False if that has no slot for it."""
        key, source = tier.key[slot], Location(tier.number, slot, tier.version[slot])
        to = self.begin_write(target, key)
        if to is None:
            return False
        job = self.next_job()
        self.jobs.moves[job] = Move(key, source, target.number, to)
        self.order(MOVE_COLUMNS, (job, *source, target.number, to, seal_key(key)))
        return True

    def end_write(self, job: int, write: Save | Move, is_good: bool) -> None:
        """Record the end of a job that wrote a slot: the slot has the key, or is free."""
        tier = self.each[write.tier]
        tier.writing.discard(write.key)
        if not is_good:
            tier.free.append(write.slot)
            tier.note_lost(write.key)
            return
        tier.store(write.key, write.slot, job)
        if tier.wanted.is_early and isinstance(write, Save):
            tier.note_on_device(write.key)  # until the device is about to evict it
        for behind in self.each[tier.number + 1 : tier.number + 2]:
            if behind.wanted.policy is SavePolicy.THROUGH:
                behind.wanted.add(write.slot, job)

    def order(self, columns: Sequence[str], row: Sequence[int]) -> None:
        """Add a row to the orders of this part."""
        for name, value in zip(columns, row, strict=True):
            getattr(self.orders, name).append(value)

    def give_orders(self, orders: Orders) -> None:
        """Move the rows since the last call into these orders."""
        given = self.orders
        if not (given.load_job or given.save_job or given.move_job or given.stamp_block):
            return
        for name in ("stamp_block", "stamp", *LOAD_COLUMNS, *SAVE_COLUMNS, *MOVE_COLUMNS):
            setattr(orders, name, [*getattr(orders, name), *getattr(given, name)])
        self.orders = Orders()

    def complete(self, last: PartResult) -> None:
        """Move what the end of a step ordered, and evicted for that, into the result of its last part."""
        self.give_orders(last.orders)
        last.tier_events = [*last.tier_events, *self.take_events()]

    # -- a store -----------------------------------------------------------------------------------------------------

    def held(self, block: int) -> tuple[Key | None, int]:
        """Return the key, if it has one, and the version of the slot with this id."""
        number = bisect_right(self._firsts, block) - 1
        tier, slot = self.each[number], block - self._firsts[number]
        return tier.key.get(slot), tier.version.get(slot, 0)

    def install(self, rows: Sequence[tuple[int, Key, int]]) -> None:
        """Take over (id, key, version) of slots, verified by the stamp tables of all ranks, in these unused tiers."""
        for tier, first in zip(self.each, self._firsts, strict=True):
            slots = range(first, first + tier.num_slots)
            tier.install((block - first, key, version) for block, key, version in rows if block in slots)
        self.last_job = max([self.last_job, *(version for _, _, version in rows)])

    # -- engine lives ------------------------------------------------------------------------------------------------

    def abandon_loads(self) -> list[int]:
        """Forget all loads, whose engine life has ended; returns their blocks, one reference to each of which passes to
        the caller.
        """
        loads = list(self.jobs.loads.values())
        self.jobs.loads.clear()
        self.loading.clear()
        for load in loads:
            self.unpin(load)
        return [row.block for load in loads for row in load.rows]

    def unpin(self, load: Load) -> None:
        """Remove the pins of a load that has ended."""
        for row in load.rows:
            self.each[row.source.tier].unpin(row.source.slot)

    def end_epoch(self, shown: Sequence[int]) -> None:
        """End an engine life: keep the keys whose slot has the same version on all ranks, drop the others.

        `shown`: the stamp table, which may have the versions of the slots behind the stamps of the blocks.
        """
        last_reset = in_time(shown[NULL_BLOCK]) if len(shown) else 0
        for tier, first in zip(self.each, self._firsts, strict=True):
            for key, slot in list(tier.in_order()):
                is_shown = first + slot < len(shown) and not tier.is_of_peers
                version = shown[first + slot] if is_shown else 0
                if version != tier.version[slot] or in_time(version) <= last_reset:
                    tier.drop(key, RemoveReason.UNVERIFIED)

    def begin_epoch(self, epoch: int, memory_is_new: bool, shown: Sequence[int]) -> None:
        """Begin an engine life. Jobs that write slots stay in flight until their end is reported, unless the memory of
        pages and tiers is new. `shown`: as in `end_epoch`.
        """
        self._note_unknown(shown)
        self.last_job, self.waits_in = max(self.last_job, epoch << _JOB_BITS), 0
        if memory_is_new:
            for write in self.jobs.writes():
                self.end_write(0, write, is_good=False)
            self.jobs.saves.clear()
            self.jobs.moves.clear()

    def _note_unknown(self, shown: Sequence[int]) -> None:
        """Record for which blocks and slots the memory shows what this core does not know."""
        if not self.each or len(shown) < self.ids.stop:
            return
        stamps = self._pool.stamp
        self.unknown = {block for block in range(1, self.ids.start) if shown[block] and not stamps[block]}
        for tier, first in zip(self.each, self._firsts, strict=True):
            if tier.is_of_peers:
                continue
            tier.stale = {slot for slot in range(tier.num_slots) if shown[first + slot] and slot not in tier.key}
