"""Saves what the device evicts next, and moves what a tier evicts next to the tier behind it: the policy `behind`; then
what a tier wants earlier than that, by the policies `through` and `reuse` (see `wanted`).

At the end of a step the first free blocks in eviction order are passed over, as many as a few steps take; if fewer are
free, then the last blocks of the request that is preempted next. Those that have an executed key, and are in no tier,
are saved. Nothing is held for that: a block that is allocated before its job is done gets another stamp, and the save
is discarded. What is retained, and evicted so soon for lack of others, is saved, and moved, before them.

With `through` that is done too, for what the limits on jobs left out; with `reuse` only for what is retained: all else
that is used once is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from kvplane.base.groups import ReplicaSpec, SavePolicy
from kvplane.base.step import SAVE_COLUMNS
from kvplane_core.face.keys import Key, seal_key
from kvplane_core.face.setup import SLOT_SHARE, most_ahead
from kvplane_core.spec.coordinator import Coordinator
from kvplane_core.spec.tiers.tier import Tier
from kvplane_core.spec.tiers.tiers import MAX_JOBS, Save, Tiers

AHEAD_STEPS = 10  # steps whose blocks are looked at: twice those that are in flight while a save is
SAVED_STEPS = 2  # blocks saved at the end of a step, in blocks that a step takes


class SaveBehind:
    """Orders saves and moves at the end of each step.

    Args:
        spec: specification of the replica.
        blocks: its coordinator, with one tier at least.
    """

    def __init__(self, spec: ReplicaSpec, blocks: Coordinator) -> None:
        self._managers = blocks.managers
        self._pool = blocks.pool
        self._tiers: Tiers = blocks.tiers
        self._sizes = tuple(group.block_size for group in spec.groups)
        self._most_ahead = most_ahead(spec)

    def close_step(self, next_victim: int | None) -> None:
        """Order the saves and moves of this step, into the orders of its last part.

        `next_victim`: slot of the running request that is preempted next.
        """
        tiers = self._tiers
        tiers.demand = max(tiers.demand_now, tiers.demand - tiers.demand // 16)
        tiers.demand_now = 0
        if tiers.each[0].is_of_peers:
            return  # nothing is saved there
        ahead = min(self._most_ahead, AHEAD_STEPS * tiers.demand)
        room = min(SAVED_STEPS * tiers.demand, MAX_JOBS - len(tiers.jobs))
        if self._pool.retained.num_free:
            retained = islice(self._pool.retained, max(0, ahead - self._pool.free.count))
            room = self._save(retained, room)
        left = self._save_wanted(self._save(self._evicted_next(ahead, next_victim), room))
        for tier, behind in zip(tiers.each, tiers.each[1:], strict=False):
            if behind.is_of_peers:
                continue
            if tier.num_free < ahead:
                left = self._move(tier, behind, min(ahead, max(1, behind.num_slots // SLOT_SHARE)), left)
            left = self._move_wanted(tier, behind, left)

    def _evicted_next(self, ahead: int, next_victim: int | None) -> Iterator[int]:
        """Yield that number of blocks in the order in which they are evicted, the free ones first."""
        pool = self._pool
        yield from islice(pool.free, ahead)
        if next_victim is not None and pool.num_free < ahead:
            tables = chain.from_iterable(reversed(one.table[next_victim]) for one in self._managers)
            yield from islice(filter(None, tables), ahead - pool.num_free)

    def _save(self, blocks: Iterator[int], room: int) -> int:
        """Save some of the blocks that are evicted next; returns how many further jobs may begin."""
        tiers, retained = self._tiers, self._pool.retained.of_key
        only_used = tiers.each[0].wanted.policy is SavePolicy.REUSE
        for block in blocks:
            key = self._full_key(block)
            if key is None or not self._is_executed(block):
                continue
            if tiers.has(key):
                self._keep(key)
                continue
            if only_used and key not in retained:
                continue
            if room <= 0:
                tiers.counters.no_job += len(tiers.jobs) >= MAX_JOBS
                return 0
            if not self._order_save(block, key):
                return room
            room -= 1
        return room

    def _save_wanted(self, room: int) -> int:
        """Save some of the blocks that the first tier wants early, in order; returns as `_save`."""
        pool, tiers = self._pool, self._tiers
        wanted = tiers.each[0].wanted
        while len(wanted) and room > 0:
            block, stamp = wanted.first()
            key = self._full_key(block) if pool.stamp[block] == stamp else None
            if key is not None and not self._is_executed(block):
                return room  # those behind it wait a step or two longer
            wanted.remove_first()
            if key is None or tiers.has(key):
                continue
            if not self._order_save(block, key):
                return room
            room -= 1
        return room

    def _full_key(self, block: int) -> Key | None:
        """Return the key of a block; None if it has none, or more tokens will follow in it."""
        key = self._pool.key_of(block)
        return None if key is None or self._pool.key_tokens[block] % self._sizes[key[1]] else key

    def _order_save(self, block: int, key: Key) -> bool:
        """Order the save of a block; returns False if there is no slot for it."""
        tiers = self._tiers
        slot = tiers.begin_write(tiers.each[0], key)
        if slot is None:
            return False
        job, save = tiers.next_job(), Save(key, block, self._pool.stamp[block], 0, slot)
        tiers.jobs.saves[job] = save
        tiers.order(SAVE_COLUMNS, (job, block, key[1], save.stamp, 0, slot, seal_key(key)))
        return True

    def _is_executed(self, block: int) -> bool:
        """Whether the page has what its key says: a launch in flight may still write it, or never run."""
        return self._pool.key_step[block] <= self._pool.executed_through

    def _keep(self, key: Key) -> None:
        """The device evicts the key soon, so its copy in a tier is no shadow any more."""
        for tier in self._tiers.each:
            if key in tier.shadows:
                tier.refresh(key)

    def _move(self, tier: Tier, behind: Tier, ahead: int, room: int) -> int:
        """Copy some of the keys that a tier evicts next to the tier behind it; returns as `_save`."""
        tiers, wanted = self._tiers, list[int]()
        num_others = len(tier.shadows) + len(tier.recent)
        next_slots: Iterator[int] = islice(tier.retained, max(0, ahead - num_others))
        if behind.wanted.policy is not SavePolicy.REUSE:
            next_slots = chain(next_slots, islice(chain(tier.shadows.values(), tier.recent.values()), ahead))
        for slot in next_slots:
            if len(wanted) >= room:
                break
            if not behind.has(tier.key[slot]):
                wanted.append(slot)
        for slot in wanted:
            if not tiers.order_move(tier, slot, behind):
                return 0
        return room - len(wanted)

    def _move_wanted(self, tier: Tier, behind: Tier, room: int) -> int:
        """Copy some of what a tier wants early from the tier before it, in order; returns as `_save`."""
        wanted = behind.wanted
        while len(wanted) and room > 0:
            slot, version = wanted.first()
            key = tier.key[slot] if tier.version.get(slot) == version else None
            wanted.remove_first()
            if key is None or key in behind.writing or behind.find(key) is not None:
                continue
            if not self._tiers.order_move(tier, slot, behind):
                return room
            room -= 1
        return room
