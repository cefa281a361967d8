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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, Protocol

from kvplane.base.groups import Medium
from kvplane.base.values import MAX_RETAINED, MAX_RETAINED_PER_BLOCK
from kvplane_core.face.keys import Key
from kvplane_core.spec.freelist import FreeList

DEVICE = 0  # the first place


class Pool(Protocol):
    """What is read of a `BlockPool`."""

    num_blocks: int
    free: FreeList
    key: list[Key | None]
    more_keys: dict[int, dict[Key, int]]
    references: list[int]

    def blocks_of(self, key: Key) -> list[int]: ...  # noqa: D102


class Slots(Protocol):
    """What is read of a `Tier`."""

    number: int
    place: int
    num_slots: int
    most_retained: int
    medium: Medium

    def has(self, key: Key) -> bool: ...  # noqa: D102
    def place_again(self, key: Key) -> None: ...  # noqa: D102


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
        lost: keys that a block, or a slot, lost in this part.
        is_active: False while an engine life ends; then no block is in a list.
        tiers: those that retain, the nearest first.
        holders: all tiers, if one of them retains: what any of them has may move to that.
    """

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self._pool = pool
        self.each: dict[Name, Retention] = {}
        self.of_key: dict[Key, set[Name]] = {}
        self.lost: list[Key] = []
        self.is_active = True
        self.tiers: list[Slots] = []
        self.holders: Sequence[Slots] = ()

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
        keys = (self._pool.key[block], *self._pool.more_keys.get(block, ()))
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
        for key in retention.keys:
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

    def used_by(self, owner: str, without: Name | None = None, also: Mapping[Key, int] | None = None) -> list[int]:
        """Count the keys of an owner in each place, `without` one of its retentions and `also` with these."""
        first: dict[Key, int] = dict(also or {})
        for name, one in self.each.items():
            for key, place in one.keys.items() if name.owner == owner and name != without else ():
                first[key] = min(place, first.get(key, place))
        return [sum(1 for one in first.values() if one <= place) for place in range(self.num_places)]

    def has_room(self, name: Name, count: int) -> bool:
        """Return whether a retention with this name may have `count` keys: what all of them need is limited, since
        prefixes of many owners can share their blocks.
        """
        before = self.each.get(name)
        named = count + sum(len(one.keys) for one in self.each.values() if one is not before)
        has_place = before is not None or len(self.each) < MAX_RETAINED
        num_blocks = self._pool.num_blocks + sum(tier.num_slots for tier in self.tiers)
        return has_place and named <= MAX_RETAINED_PER_BLOCK * num_blocks

    def _forget(self, name: Name, keys: Iterable[Key]) -> None:
        for key in keys:
            self._forget_key(name, key)
        del self.each[name]

    def _forget_key(self, name: Name, key: Key) -> None:
        self.of_key[key].remove(name)
        if not self.of_key[key]:
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
        expected = dict[int, int]()
        for name, one in self.each.items():
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
        if sum(map(len, self.of_key.values())) != named:
            yield "a key leads to a name that does not retain it"

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
