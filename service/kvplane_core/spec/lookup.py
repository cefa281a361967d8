"""Finds the longest prefix that is cached in all groups of a replica.

Groups of equal format are looked up jointly, as one *look-up class*. Each class accepts a candidate length or shortens
it. This repeats until no class shortens it, and ends because lengths only decrease (as in vLLM's hybrid coordinator).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvplane.base.groups import CommitRule, ReplicaSpec
from kvplane_core.face.interface import Hit
from kvplane_core.spec.managers import GroupManager
from kvplane_core.spec.managers.base import FOREVER
from kvplane_core.spec.managers.questions import KeyIndex, Query


@dataclass(frozen=True, slots=True)
class LookupClass:
    """Groups that are looked up jointly, because their formats are equal.

    Attributes:
        groups: ids of the groups.
        manager: manager of the first group, which looks up for all groups of the class.
        drops_last_block: whether look-ups leave out the last matched block, which drafters compute again.
        downward_closed: whether a hit of n tokens implies every shorter aligned hit.
    """

    groups: tuple[int, ...]
    manager: GroupManager
    drops_last_block: bool
    downward_closed: bool

    def reach(self, longest: int, margin: int) -> int:
        """Return how many tokens must be looked up to find a hit of `longest` tokens behind which a block of `margin`
        tokens is left out: the key of a whole block may be the only one for a prefix that ends inside the block.
        """
        size = self.manager.block_size
        return -(-(longest + margin) // size) * size if self.downward_closed else longest + margin


class PrefixLookup:
    """Looks prefixes up in all groups of a replica, by the keys of an index. Changes nothing."""

    def __init__(self, spec: ReplicaSpec, managers: Sequence[GroupManager], index: KeyIndex) -> None:
        self.index = index
        self._spec = spec
        self._managers = managers
        self._classes = _classes(spec, managers)

    def find(self, digests: Sequence[bytes], domain: str, max_tokens: int, horizon: int, longest: int = FOREVER) -> Hit:
        """Find the longest prefix of at most `longest` tokens that is cached in every group.

        At most `max_tokens` tokens are looked up: those behind `longest` can prove a hit, so a limit equal to the
        length of a hit finds this hit. Keys that were registered by steps after `horizon` are ignored.
        """
        empty: tuple[list[int], ...] = tuple([] for _ in self._managers)
        if self._spec.commit is CommitRule.REFERENCE:  # as in vLLM, nothing behind the limit is looked up
            max_tokens = min(max_tokens, longest)
        if not self._spec.enable_caching or min(max_tokens, longest) <= 0 or not self._classes:
            return Hit(0, 0, empty)
        if longest < max_tokens:
            longest -= longest % self._spec.hit_alignment
        search = Search(self, digests, domain, horizon)
        if len(self._managers) > 1:
            hit = search.run(max_tokens, longest)
            if hit.num_tokens < longest < max_tokens:
                # Which class leaves a block out depends on where each search begins: the other one may keep more.
                whole = Search(self, digests, domain, horizon).run(max_tokens)
                return whole if hit.num_tokens < whole.num_tokens <= longest else hit
            return hit
        only = self._classes[0]
        reach = only.reach(longest, only.manager.drop_margin() if only.drops_last_block else 0)
        rows, length = only.manager.find(search.query(only, min(max_tokens, reach), only.drops_last_block))
        length = min(length, longest)
        return Hit(length, 0, tuple(row[: -(-length // only.manager.block_size)] for row in rows))

    def find_each(
        self, digests: Sequence[bytes], domain: str, max_tokens: int, horizon: int
    ) -> tuple[list[list[int]], list[int]]:
        """Find, for each group by itself, its longest cached prefix of at most `max_tokens` tokens: the blocks and the
        length in tokens, by group. The groups of a look-up class have one length.

        A request cannot adopt hits of different lengths; KV connectors use them to limit a load.
        """
        rows: list[list[int]] = [[] for _ in self._managers]
        lengths = [0] * len(self._managers)
        if self._spec.enable_caching and max_tokens > 0:
            search = Search(self, digests, domain, horizon)
            for number, one in enumerate(self._classes):
                length = search.ask(number, one, max_tokens)
                for group in one.groups:
                    rows[group], lengths[group] = search.row(group), length
        return rows, lengths

    @property
    def classes(self) -> tuple[LookupClass, ...]:
        """The look-up classes, in the order in which they are searched."""
        return self._classes

    @property
    def num_groups(self) -> int:
        """Number of groups of the replica, including groups that are never cached."""
        return len(self._managers)


class Search:
    """One search for the longest hit of all look-up classes; the candidate length shrinks until all accept it."""

    def __init__(self, lookup: PrefixLookup, digests: Sequence[bytes], domain: str, horizon: int) -> None:
        self._lookup = lookup
        self._digests = digests
        self._domain = domain
        self._horizon = horizon
        self._rows: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}  # by class
        self._dropped: set[int] = set()  # classes whose dropped block the candidate already excludes
        self._longest = 0
        self._readable = 0  # tokens that may be looked up behind a candidate that is shorter by a limit

    def query(self, one: LookupClass, max_tokens: int, drop: bool) -> Query:
        """Make the query for a look-up of at most `max_tokens` tokens in one class."""
        return Query(self._digests, self._domain, one.groups, max_tokens, drop, self._horizon, self._lookup.index)

    def run(self, max_tokens: int, longest: int = FOREVER) -> Hit:
        """Shorten the candidate length until all classes accept it; returns the hit."""
        self._readable = max_tokens if longest < max_tokens else 0
        classes = self._lookup.classes
        two_pass_enough = len(classes) == 2 and classes[0].downward_closed
        candidate = min(max_tokens, longest)
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
        """Search in one look-up class; returns the longest length, at most `length` tokens, that this class has cached.

        `number`: index of the class.
        """
        if one.downward_closed and number in self._lengths:
            return min(length, self._lengths[number])  # every shorter length is cached too, so one look-up is enough
        drop = one.drops_last_block and number not in self._dropped
        margin = one.manager.drop_margin() if drop else 0
        reach = max(length, min(one.reach(length, margin) - margin, self._readable)) + margin
        if drop:
            reach = min(reach, len(self._digests) * one.manager.hash_size)
        rows, found = one.manager.find(self.query(one, reach, drop))
        if drop:
            self._dropped.add(number)
        elif found < length:
            self._dropped.clear()
        self._lengths[number] = found
        self._rows.update(zip(one.groups, rows, strict=True))
        found = min(found, length)
        self._longest = max(self._longest, found)
        return found

    def row(self, group: int) -> list[int]:
        """Return the blocks that the last search in the group's class found."""
        return self._rows.get(group, [])

    def _hit(self, length: int) -> Hit:
        for one in self._lookup.classes:
            if one.downward_closed:
                keep = -(-length // one.manager.block_size)
                for group in one.groups:
                    del self._rows[group][keep:]
        single_group_hit = self._longest if self._longest > length else 0
        return Hit(length, single_group_hit, tuple(self.row(group) for group in range(self._lookup.num_groups)))


def _classes(spec: ReplicaSpec, managers: Sequence[GroupManager]) -> tuple[LookupClass, ...]:
    """Make the look-up classes of the groups that can be cached. Full attention comes first, since its hit limits all
    others.
    """
    members: dict[int, list[GroupManager]] = {}
    for manager, number in zip(managers, spec.lookup_classes, strict=True):
        if manager.spec.is_cached:
            members.setdefault(number, []).append(manager)
    classes = [
        LookupClass(
            tuple(one.group for one in same),
            same[0],
            any(one.spec.drops_last_block for one in same),
            same[0].is_downward_closed(),
        )
        for same in members.values()
    ]
    return tuple(sorted(classes, key=lambda one: not one.downward_closed))
