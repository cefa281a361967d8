"""Retained prefixes: whose free blocks are evicted after all others, until when, and in which order.

    free list of the policy ──▶ retained, priority 0 ──▶ ... ──▶ retained, priority 100

A *retention* names keys: those that a hit of its prefix needs. Every block with such a key is retained, while it is
held too, but only free blocks are in a list of this module. A key that no block has any more is not retained any more,
from the end of the part on; so what is evicted, reset or dropped ends by itself, and what moves to another block stays.

With tiers that retain, the *places* are the device, 0, and these tiers, 1 on. A key is retained in the place where it
was found and in those behind it, to which it may move: it counts in all of them, so that what is retained in a place
for an owner is never more than what was permitted there. `Tier` has the lists of its slots.

Retention decides the order of free blocks, and nothing else: what may be allocated does not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from kvplane.base.retain import MAX_RETAINED, MAX_RETAINED_PER_BLOCK
from kvplane_core.face.keys import Key

if TYPE_CHECKING:
    from kvplane_core.spec.pool import BlockPool
    from kvplane_core.spec.tiers.tier import Tier

DEVICE = 0  # the first place


class Name(NamedTuple):
    """What a retention is called: its owner, and the last hash of its prefix in its domain."""

    owner: str
    domain: str
    digest: bytes


@dataclass(slots=True)
class Retention:
    """One retained prefix.

    Attributes:
        priority: 0 to 100.
        until_ns: its end.
        keys: by group, the one at the end of the prefix first: of these the first is evicted first; with the first
            place where each is retained.
    """

    priority: int
    until_ns: int
    keys: dict[Key, int] = field(default_factory=dict)


class PriorityLists:
    """Free blocks, or slots, that are retained: a list for each priority.

    Attributes:
        num_free: number of them.
        priority: of each.
    """

    def __init__(self) -> None:
        self.num_free = 0
        self.priority: dict[int, int] = {}
        self._lists: dict[int, dict[int, None]] = {}  # by priority, the one to evict first first

    def __iter__(self) -> Iterator[int]:
        """Yield them in order of eviction."""
        return chain.from_iterable(self._lists[priority] for priority in sorted(self._lists))

    def put(self, priority: int, one: int) -> None:
        """Add one, which is evicted last of its priority."""
        self._lists.setdefault(priority, {})[one] = None
        self.priority[one] = priority
        self.num_free += 1

    def remove(self, one: int) -> bool:
        """Remove one; returns whether it was in a list."""
        priority = self.priority.pop(one, None)
        if priority is None:
            return False
        others = self._lists[priority]
        del others[one]
        if not others:
            del self._lists[priority]
        self.num_free -= 1
        return True


class RetainedBlocks(PriorityLists):
    """The retentions of a replica, and the lists of the free blocks that they retain.

    Attributes:
        each: by name, the one that was made or renewed last last.
        of_key: names of the retentions of each key.
        used: number of keys by owner, in each place.
        num_named: number of keys, counted once per retention.
        lost: keys that a block, or a slot, lost in this part.
        is_active: False while an engine life ends; then no block is in a list.
        tiers: those that retain, the nearest first.
        holders: all tiers, if one of them retains: what any of them has may move to that.
    """

    def __init__(self, pool: BlockPool) -> None:
        super().__init__()
        self._pool = pool
        self.each: dict[Name, Retention] = {}
        self.of_key: dict[Key, set[Name]] = {}
        self.used: dict[str, list[int]] = {}
        self.num_named = 0
        self.lost: list[Key] = []
        self.is_active = True
        self.tiers: list[Tier] = []
        self.holders: Sequence[Tier] = ()

    # -- free blocks -------------------------------------------------------------------------------------------------

    def pop(self, count: int) -> list[int]:
        """Remove and return the first `count` blocks."""
        taken = [block for block, _ in zip(self, range(count), strict=False)]
        for block in taken:
            self.remove(block)
        return taken

    def next_victims(self, count: int) -> list[int]:
        """Remove and return the first `count` blocks of the free list and of these lists behind it."""
        free = self._pool.free
        if count <= free.count:
            return free.pop(count)
        others = free.count
        return [*free.pop(others), *self.pop(count - others)]

    def leave_free(self, block: int) -> None:
        """Remove a free block from the list that has it."""
        if not (self.num_free and self.remove(block)):
            self._pool.free.remove(block)

    def renew(self, blocks: Sequence[int]) -> None:
        """Count free blocks as used now."""
        for block in blocks:
            self.leave_free(block)
        self._pool.free.append(self.enter(blocks))

    def enter(self, blocks: Sequence[int]) -> Sequence[int]:
        """Take those of these free blocks that are retained, the last one to be evicted last; returns the others."""
        if not self.of_key or not self.is_active:
            return blocks
        others = []
        for block in blocks:
            priority = self._priority_of(block)
            if priority is None:
                others.append(block)
            else:
                self.put(priority, block)
        return others

    def _priority_of(self, block: int) -> int | None:
        """Return the highest priority of the keys of a block; None if none is retained."""
        keys = (self._pool.key_of(block), *self._pool.more_keys.get(block, ()))
        return self.priority_of([key for key in keys if key is not None], DEVICE)

    def priority_of(self, keys: Iterable[Key], place: int) -> int | None:
        """Return the highest priority that these keys have in a place; None if none is retained there."""
        named = ((key, self.each[name]) for key in keys for name in self.of_key.get(key, ()))
        return max((one.priority for key, one in named if one.keys[key] <= place), default=None)

    # -- retentions --------------------------------------------------------------------------------------------------

    def add(self, name: Name, retention: Retention) -> None:
        """Add a retention, instead of an earlier one with this name."""
        before = self.each.get(name)
        if before is not None:
            self._forget(name, before.keys)
        self._enlist(name, retention)
        self._place_again(chain(before.keys if before is not None else (), retention.keys))

    def _enlist(self, name: Name, retention: Retention) -> None:
        self.each[name] = retention
        self.num_named += len(retention.keys)
        used = self.used.setdefault(name.owner, [0] * self.num_places)
        for key, place in retention.keys.items():
            for one in range(place, self._first_place(name.owner, key)):
                used[one] += 1
            self.of_key.setdefault(key, set()).add(name)

    def remove_all(self, names: Iterable[Name]) -> None:
        """End these retentions."""
        for name in names:
            keys = self.each[name].keys
            self._forget(name, keys)
            self._place_again(keys)

    @property
    def num_places(self) -> int:
        """Number of places: the device, and the tiers that retain."""
        return 1 + len(self.tiers)

    def used_by(self, owner: str) -> list[int]:
        """Return the number of keys of an owner in each place."""
        return self.used.get(owner, [0] * self.num_places)[:]

    def count_new(self, name: Name, keys: dict[Key, int]) -> list[int]:
        """Count the keys of the owner in each place if it retained these instead of those of the retention with this
        name.
        """
        before, used = self.each.get(name), self.used_by(name.owner)
        for counted, sign in ((before.keys if before is not None else {}, -1), (keys, 1)):
            for key, place in counted.items():
                for one in range(place, self._first_place(name.owner, key, without=name)):
                    used[one] += sign
        return used

    def has_room(self, name: Name, count: int) -> bool:
        """Return whether a retention with this name may have `count` keys: what all of them need is limited, since
        prefixes of many owners can share their blocks.
        """
        before = self.each.get(name)
        named = self.num_named + count - (len(before.keys) if before is not None else 0)
        has_place = before is not None or len(self.each) < MAX_RETAINED
        num_blocks = self._pool.num_blocks + sum(tier.num_slots for tier in self.tiers)
        return has_place and named <= MAX_RETAINED_PER_BLOCK * num_blocks

    def _first_place(self, owner: str, key: Key, without: Name | None = None) -> int:
        """Return the first place where the owner retains a key, except by one retention; `num_places` if nowhere."""
        names = (one for one in self.of_key.get(key, ()) if one.owner == owner and one != without)
        return min((self.each[one].keys[key] for one in names), default=self.num_places)

    def _forget(self, name: Name, keys: Iterable[Key]) -> None:
        for key in keys:
            self._forget_key(name, key)
        del self.each[name]

    def _forget_key(self, name: Name, key: Key) -> None:
        names, used = self.of_key[key], self.used[name.owner]
        for one in range(self.each[name].keys[key], self._first_place(name.owner, key, without=name)):
            used[one] -= 1
        if not any(used):
            del self.used[name.owner]
        names.remove(name)
        self.num_named -= 1
        if not names:
            del self.of_key[key]

    def _place_again(self, keys: Iterable[Key]) -> None:
        """Put the free blocks and the slots with these keys where they belong now: those that are not retained any more
        at the back of the free list, as if they were used now.
        """
        pool, moved = self._pool, list[int]()
        for key in keys:
            for tier in self.tiers:
                tier.place_again(key)
            for block in pool.blocks_of(key):
                if not pool.references[block] and self._priority_of(block) != self.priority.get(block):
                    self.leave_free(block)
                    moved += self.enter([block])
        pool.free.append(moved)

    # -- loss --------------------------------------------------------------------------------------------------------

    def note_lost(self, block: int, keys: Iterable[Key]) -> None:
        """Record that a block lost these keys. A free one is evicted next: it cannot hit any more."""
        self.lost += [key for key in keys if key in self.of_key]
        if self.remove(block):
            self._pool.free.prepend([block])

    def forget_lost(self) -> None:
        """End the retention of the keys that no block and no tier has any more, of those that were lost."""
        lost, self.lost = self.lost, []
        self._forget_absent(lost)

    def _forget_absent(self, keys: Iterable[Key]) -> None:
        for key in keys:
            if key not in self.of_key or not self._is_absent(key):
                continue
            for name in list(self.of_key[key]):
                self._forget_key(name, key)
                del self.each[name].keys[key]
                if not self.each[name].keys:
                    del self.each[name]

    def _is_absent(self, key: Key) -> bool:
        return not self._pool.blocks_of(key) and not any(tier.has(key) for tier in self.holders)

    def suspend(self) -> None:
        """Put all blocks at the back of the free list, in order: an engine life ends, and its keys are verified."""
        self.is_active = False
        blocks = self.pop(self.num_free)
        self._pool.free.append(blocks)

    def resume(self) -> None:
        """Retain again what the next engine life has kept."""
        self.is_active, self.lost = True, []
        self._forget_absent(list(self.of_key))
        self._place_again(chain.from_iterable(one.keys for one in self.each.values()))

    def clear(self) -> None:
        """End all retentions."""
        self.remove_all(list(self.each))

    def faults(self, is_free: bytearray) -> Iterator[str]:
        """Yield what contradicts itself: exactly the free blocks with a retained key are in these lists, each in that
        of its priority, and names, keys and counts agree. Sets `is_free[block]` for these blocks.
        """
        pool, blocks = self._pool, list(self)
        if len(set(blocks)) != len(blocks) or len(blocks) != self.num_free or any(is_free[block] for block in blocks):
            yield f"{len(blocks)} retained free blocks, counted {self.num_free}, or a block in two lists"
        for block in blocks:
            is_free[block] = True
        owners, expected = dict[str, list[set[Key]]](), dict[int, int]()
        for name, one in self.each.items():
            for place, kept in enumerate(owners.setdefault(name.owner, [set() for _ in range(self.num_places)])):
                kept.update(key for key, first in one.keys.items() if first <= place)
            on_device = (key for key, first in one.keys.items() if first == DEVICE)
            for block in chain.from_iterable(map(pool.blocks_of, on_device)):
                if not pool.references[block] and self.is_active:
                    expected[block] = max(expected.get(block, 0), one.priority)
            if not one.keys or any(name not in self.of_key.get(key, ()) for key in one.keys):
                yield f"the keys of {name.owner!r} do not lead to the name"
        if self.is_active and not self.lost and any(map(self._is_absent, self.of_key)):
            yield "a key is retained that no block and no tier has"
        if expected != self.priority:
            yield f"free blocks {blocks[:9]} are retained, expected {list(expected.items())[:9]}"
        named = sum(len(one.keys) for one in self.each.values())
        if (sum(map(len, self.of_key.values())), self.num_named) != (named, named):
            yield "a key leads to a name that does not retain it, or keys are not counted"
        if self.used != {owner: list(map(len, places)) for owner, places in owners.items()}:
            yield f"the owners have {self.used} keys, counted {[list(map(len, one)) for one in owners.values()]}"

    # -- state -------------------------------------------------------------------------------------------------------

    def state(self) -> list[Any]:
        """Return the retentions, and the blocks of each list by priority."""
        each = [
            [*name, one.priority, one.until_ns, [kept_key(key, place) for key, place in one.keys.items()]]
            for name, one in self.each.items()
        ]
        return [each, [[priority, list(self._lists[priority])] for priority in sorted(self._lists)]]

    def load(self, state: Sequence[Any]) -> None:
        """Load the state, into an object without retentions, of a pool that has its keys."""
        each, lists = state
        for owner, domain, digest, priority, until_ns, keys in each:
            retention = Retention(priority, until_ns)
            for group, key, *place in keys:
                retention.keys[domain, group, key] = place[0] if place else DEVICE
            self._enlist(Name(owner, domain, digest), retention)
        for priority, blocks in lists:
            for block in blocks:
                self.put(priority, block)


def kept_key(key: Key, place: int) -> list[Any]:
    """Return a retained key without its domain, and its first place if that is a tier."""
    return [*key[1:], place] if place != DEVICE else [*key[1:]]
