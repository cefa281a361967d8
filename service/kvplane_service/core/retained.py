"""Retained prefixes: whose free blocks are evicted after all others, until when, and in which order.

    free list of the policy ──▶ retained, priority 0 ──▶ ... ──▶ retained, priority 100

A *retention* names keys: those that a hit of its prefix needs. Every block with such a key is retained, while it is
held too, but only free blocks are in a list of this module. A key that no block has any more is not retained any more,
from the end of the part on; so what is evicted, reset or dropped ends by itself, and what moves to another block stays.

Retention decides the order of free blocks, and nothing else: what may be allocated does not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from kvplane.base.retain import MAX_RETAINED, MAX_RETAINED_PER_BLOCK
from kvplane_service.core.keys import Key

if TYPE_CHECKING:
    from kvplane_service.core.pool import BlockPool


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
        keys: by group, the one at the end of the prefix first: of these the first is evicted first.
    """

    priority: int
    until_ns: int
    keys: dict[Key, None] = field(default_factory=dict)


class RetainedBlocks:
    """The retentions of a replica, and the lists of the free blocks that they retain.

    Attributes:
        each: by name, the one that was made or renewed last last.
        of_key: names of the retentions of each key.
        used: number of keys by owner.
        num_named: number of keys, counted once per retention.
        lost: keys that a block lost in this part.
        is_active: False while an engine life ends; then no block is in a list.
        num_free: number of blocks in the lists.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.each: dict[Name, Retention] = {}
        self.of_key: dict[Key, set[Name]] = {}
        self.used: dict[str, int] = {}
        self.num_named = 0
        self.lost: list[Key] = []
        self.is_active = True
        self.num_free = 0
        self._lists: dict[int, dict[int, None]] = {}  # by priority, the block to evict first first
        self._priority: dict[int, int] = {}  # of each block in a list

    # -- free blocks -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[int]:
        """Yield the free blocks in order of eviction."""
        return chain.from_iterable(self._lists[priority] for priority in sorted(self._lists))

    def pop(self, count: int) -> list[int]:
        """Remove and return the first `count` blocks."""
        taken = [block for block, _ in zip(self, range(count), strict=False)]
        for block in taken:
            self.remove(block)
        return taken

    def remove(self, block: int) -> bool:
        """Remove a block; returns whether it was in a list."""
        priority = self._priority.pop(block, None)
        if priority is None:
            return False
        blocks = self._lists[priority]
        del blocks[block]
        if not blocks:
            del self._lists[priority]
        self.num_free -= 1
        return True

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
                self._lists.setdefault(priority, {})[block] = None
                self._priority[block] = priority
                self.num_free += 1
        return others

    def _priority_of(self, block: int) -> int | None:
        """Return the highest priority of the keys of a block; None if none is retained."""
        keys = (self._pool.key_of(block), *self._pool.more_keys.get(block, ()))
        names = chain.from_iterable(self.of_key.get(key, ()) for key in keys if key is not None)
        return max((self.each[name].priority for name in names), default=None)

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
        for key in retention.keys:
            names = self.of_key.setdefault(key, set())
            self.used[name.owner] = self.used.get(name.owner, 0) + (not any(one.owner == name.owner for one in names))
            names.add(name)

    def remove_all(self, names: Iterable[Name]) -> None:
        """End these retentions."""
        for name in names:
            keys = self.each[name].keys
            self._forget(name, keys)
            self._place_again(keys)

    def count_new(self, name: Name, keys: Iterable[Key]) -> int:
        """Count the keys of the owner if it retained these instead of those of the retention with this name."""
        before = self.each.get(name)
        gone = sum(1 for key in (before.keys if before is not None else ()) if self._is_only(name, key))
        ours = (any(one != name and one.owner == name.owner for one in self.of_key.get(key, ())) for key in keys)
        return self.used.get(name.owner, 0) - gone + sum(not one for one in ours)

    def has_room(self, name: Name, count: int) -> bool:
        """Return whether a retention with this name may have `count` keys: what all of them need is limited, since
        prefixes of many owners can share their blocks.
        """
        before = self.each.get(name)
        named = self.num_named + count - (len(before.keys) if before is not None else 0)
        has_place = before is not None or len(self.each) < MAX_RETAINED
        return has_place and named <= MAX_RETAINED_PER_BLOCK * self._pool.num_blocks

    def _is_only(self, name: Name, key: Key) -> bool:
        return not any(one != name and one.owner == name.owner for one in self.of_key[key])

    def _forget(self, name: Name, keys: Iterable[Key]) -> None:
        for key in keys:
            self._forget_key(name, key)
        del self.each[name]

    def _forget_key(self, name: Name, key: Key) -> None:
        names = self.of_key[key]
        if self._is_only(name, key):
            self.used[name.owner] -= 1
            if not self.used[name.owner]:
                del self.used[name.owner]
        names.remove(name)
        self.num_named -= 1
        if not names:
            del self.of_key[key]

    def _place_again(self, keys: Iterable[Key]) -> None:
        """Put the free blocks with these keys where they belong now: those that are not retained any more at the back
        of the free list, as if they were used now.
        """
        pool, moved = self._pool, list[int]()
        for key in keys:
            for block in pool.blocks_of(key):
                if not pool.references[block] and self._priority_of(block) != self._priority.get(block):
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
        """End the retention of the keys that no block has any more, of those that blocks lost."""
        lost, self.lost = self.lost, []
        self._forget_absent(lost)

    def _forget_absent(self, keys: Iterable[Key]) -> None:
        for key in keys:
            if key not in self.of_key or self._pool.blocks_of(key):
                continue
            for name in list(self.of_key[key]):
                self._forget_key(name, key)
                del self.each[name].keys[key]
                if not self.each[name].keys:
                    del self.each[name]

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
        of its priority, and names, keys and counts agree; "" after each slice of work without a fault. Sets
        `is_free[block]` for these blocks.
        """
        pool, blocks = self._pool, list(self)
        if len(set(blocks)) != len(blocks) or len(blocks) != self.num_free or any(is_free[block] for block in blocks):
            yield f"{len(blocks)} retained free blocks, counted {self.num_free}, or a block in two lists"
        for block in blocks:
            is_free[block] = True
        owners, expected = dict[str, set[Key]](), dict[int, int]()
        for name, one in self.each.items():
            owners.setdefault(name.owner, set()).update(one.keys)
            for block in chain.from_iterable(map(pool.blocks_of, one.keys)):
                if not pool.references[block] and self.is_active:
                    expected[block] = max(expected.get(block, 0), one.priority)
            if not one.keys or any(name not in self.of_key.get(key, ()) for key in one.keys):
                yield f"the keys of {name.owner!r} do not lead to the name"
            yield ""
        if expected != self._priority:
            yield f"free blocks {blocks[:9]} are retained, expected {list(expected.items())[:9]}"
        named = sum(len(one.keys) for one in self.each.values())
        if (sum(map(len, self.of_key.values())), self.num_named) != (named, named):
            yield "a key leads to a name that does not retain it, or keys are not counted"
        if self.used != {owner: len(keys) for owner, keys in owners.items()}:
            yield f"the owners have {self.used} keys, counted {list(map(len, owners.values()))}"

    # -- state -------------------------------------------------------------------------------------------------------

    def state(self) -> list[Any]:
        """Return the retentions, and the blocks of each list by priority."""
        each = [[*name, one.priority, one.until_ns, [key[1:] for key in one.keys]] for name, one in self.each.items()]
        return [each, [[priority, list(self._lists[priority])] for priority in sorted(self._lists)]]

    def load(self, state: Sequence[Any]) -> None:
        """Load the state, into an object without retentions, of a pool that has its keys."""
        each, lists = state
        for owner, domain, digest, priority, until_ns, keys in each:
            retention = Retention(priority, until_ns, {(domain, *key): None for key in keys})
            self._enlist(Name(owner, domain, digest), retention)
        self._lists = {priority: dict.fromkeys(blocks) for priority, blocks in lists}
        self._priority = {block: priority for priority, blocks in lists for block in blocks}
        self.num_free = len(self._priority)
