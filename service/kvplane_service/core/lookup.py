"""How long a prefix is cached when several groups with different rules must agree.

Groups of equal format are looked up jointly, as one *class*. Each class accepts a candidate length or shortens it; this
repeats until none shortens it further, which it must since lengths only fall (vLLM's hybrid coordinator, fixed point).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvplane.base.groups import ReplicaSpec
from kvplane_service.core.managers import GroupManager
from kvplane_service.core.managers.base import Query


@dataclass(frozen=True, slots=True)
class Hit:
    """Outcome of a look-up.

    Attributes:
        num_tokens: length of the hit.
        single_group_hit: longest prefix, in tokens, that some class has cached alone, if longer than the hit; else 0.
            Groups that keep few blocks keep the ones at this boundary once they pass it.
        blocks: per group, null blocks where the hit needs none.
    """

    num_tokens: int
    single_group_hit: int
    blocks: tuple[list[int], ...]


@dataclass(frozen=True, slots=True)
class LookupClass:
    """Groups looked up jointly."""

    groups: tuple[int, ...]
    manager: GroupManager
    drops: bool


class PrefixLookup:
    """Looks prefixes up over all groups of a replica; reads only."""

    def __init__(self, spec: ReplicaSpec, managers: Sequence[GroupManager]) -> None:
        self._spec = spec
        self._managers = managers
        self._classes = _classes(managers)

    def find(self, digests: Sequence[bytes], domain: str, max_tokens: int, horizon: int) -> Hit:
        """The longest prefix of at most `max_tokens` tokens that every group has."""
        empty: tuple[list[int], ...] = tuple([] for _ in self._managers)
        if not self._spec.enable_caching or max_tokens <= 0 or not self._classes:
            return Hit(0, 0, empty)
        search = Search(self, digests, domain, horizon)
        if len(self._managers) == 1:
            only = self._classes[0]
            rows, length = only.manager.find(search.query(only, max_tokens, only.drops))
            return Hit(length, 0, tuple(rows))
        return search.run(max_tokens)

    @property
    def classes(self) -> tuple[LookupClass, ...]:
        """In the order in which they are asked."""
        return self._classes

    @property
    def num_groups(self) -> int:
        """Groups of the replica, cacheable or not."""
        return len(self._managers)

    def keys_asked(self, hit: Hit, digests: Sequence[bytes]) -> Sequence[bytes]:
        """Those digests that decided a hit: no other key that comes or goes changes it."""
        if not self._classes or not self._classes[0].manager.downward_closed:
            return digests  # looked for from the end
        # The first class bounds the others; each looks past its length by a block, and by what it drops.
        longest = max(hit.num_tokens, hit.single_group_hit) + 3 * max(one.block_size for one in self._managers)
        return digests[: -(-longest // self._spec.hash_block_size)]

    def drop_margin(self, one: LookupClass) -> int:
        """How far past the candidate a class looks that drops its last unit: one hash unit, or one block."""
        fine = self._spec.partial_hits and one.manager.fine_grained
        if fine and one.manager.block_size > self._spec.hash_block_size:
            return self._spec.hash_block_size
        return one.manager.block_size


class Search:
    """One run of the fixed point."""

    def __init__(self, lookup: PrefixLookup, digests: Sequence[bytes], domain: str, horizon: int) -> None:
        self._lookup = lookup
        self._digests = digests
        self._domain = domain
        self._horizon = horizon
        self._rows: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}  # by class
        self._dropped: set[int] = set()  # classes whose drop is part of the current candidate
        self._longest = 0

    def query(self, one: LookupClass, max_tokens: int, drop: bool) -> Query:
        """A look-up in one class."""
        return Query(self._digests, self._domain, one.groups, max_tokens, drop, self._horizon)

    def run(self, max_tokens: int) -> Hit:
        """Shorten the candidate until all classes accept it."""
        classes = self._lookup.classes
        two_pass_enough = len(classes) == 2 and classes[0].manager.downward_closed
        candidate = max_tokens
        while True:
            length = candidate
            for number, one in enumerate(classes):
                length = self.ask(number, one, length)
            if length >= candidate:
                break
            candidate = length
            if two_pass_enough:
                break
        return self._hit(min(candidate, length))

    def ask(self, number: int, one: LookupClass, length: int) -> int:
        """The candidate length after this class."""
        if one.manager.downward_closed and number in self._lengths:
            return min(length, self._lengths[number])  # looked up once, later only trimmed
        drop = one.drops and number not in self._dropped
        reach = length
        if drop and not one.manager.never_drops:
            hashed = len(self._digests) * one.manager.hash_size
            reach = min(length + self._lookup.drop_margin(one), hashed)
        rows, found = one.manager.find(self.query(one, reach, drop))
        if drop:
            self._dropped.add(number)
        elif found < length:
            self._dropped.clear()
        self._lengths[number] = found
        self._rows.update(zip(one.groups, rows, strict=True))
        self._longest = max(self._longest, found)
        return found

    def _hit(self, length: int) -> Hit:
        for one in self._lookup.classes:
            if one.manager.downward_closed:
                keep = -(-length // one.manager.block_size)
                for group in one.groups:
                    del self._rows[group][keep:]
        blocks = tuple(self._rows.get(group, []) for group in range(self._lookup.num_groups))
        return Hit(length, self._longest if self._longest > length else 0, blocks)


def _classes(managers: Sequence[GroupManager]) -> tuple[LookupClass, ...]:
    """Cacheable groups by look-up class in order of first appearance, full attention first: its one scan bounds the
    rest.
    """
    members: dict[int, list[GroupManager]] = {}
    for manager in managers:
        if manager.cacheable:
            members.setdefault(manager.spec.lookup_class, []).append(manager)
    classes = [
        LookupClass(tuple(one.group for one in same), same[0], any(one.spec.drops_last_block for one in same))
        for same in members.values()
    ]
    return tuple(sorted(classes, key=lambda one: not one.manager.downward_closed))
