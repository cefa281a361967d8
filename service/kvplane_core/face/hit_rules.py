"""How much of a prompt a cache holds, over columns: by group and hash block of the prompt, whether the key is there.

The router asks it of the caches that it follows, an explanation of the present and of past states. The allocators have
look-ups of their own, which also find the blocks; tests compare all of them.

    hash blocks      0 1 2 3 4 5 6 7        group with blocks of 2 hash blocks: its keys are those of 1, 3, 5, 7
    full             x x x x x . x x        5 hash blocks
    window of 2      . . x x . x x .        ends at 7, at 4
    state            . . . x . . . x        ends at 8, at 4
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvplane.base.groups import DENSE_RETENTION, CommitRule, GroupKind, GroupSpec, ReplicaSpec
from kvplane_core.face.setup import replay_boundaries

Column = NDArray[np.bool_]
FULL, WINDOW, CHUNKED, STATE = range(4)  # what a group needs cached
ColumnOf = Callable[[tuple[int, ...]], Column]  # of groups: where all of them have the key


class MissingPrefix(NamedTuple):
    """The cached content that is missing for a longer hit: the KV of tokens [start, end) in one group.

    `num_hashes`: number of hash blocks up to `end`.
    """

    group: int
    start: int
    end: int
    num_hashes: int


@dataclass(frozen=True, slots=True)
class LookupExplanation:
    """A hit and the reason for its length.

    Attributes:
        hit: tokens of the hit.
        longest: tokens of the longest possible hit, which leaves out the last token of the prompt.
        alone: by group, tokens of the hit of a look-up in this group only; 0 for groups that are never cached.
        cut_by: groups of the look-up class that shortened the hit last; empty when the hit is the longest possible.
        wanted: length of the hit, in tokens, before the groups `cut_by` shortened it.
        missing: the first content that the groups `cut_by` lack; None: they have all, but leave out the last matched
            block.
    """

    hit: int
    longest: int
    alone: tuple[int, ...]
    cut_by: tuple[int, ...]
    wanted: int
    missing: MissingPrefix | None


class GroupRule:
    """What a group of one kind accepts.

    Attributes:
        form: its name in the compiled index of the router.
        is_downward_closed: whether a hit of n tokens implies every shorter aligned hit.
        margin: tokens that a look-up reads behind the wanted length, if it leaves out the last matched block.
    """

    form: ClassVar[int] = -1
    is_downward_closed: ClassVar[bool] = False

    def __init__(self, spec: GroupSpec, replica: ReplicaSpec) -> None:
        self.spec, self._replica = spec, replica
        self.block_size, self._hash_size = spec.block_size, replica.hash_block_size
        self._unit, self.margin = replica.hit_alignment, spec.block_size

    def length(self, column: Column, limit: int, drops: bool) -> int:
        """Return the length of the longest hit of at most `limit` tokens. `drops`: without the last matched block."""
        raise NotImplementedError

    def kept(self, num_tokens: int, hits: Sequence[int]) -> Iterable[int]:
        """Return the hash blocks whose keys the group has once a prompt of this length was computed; `hits`: where
        later hits can end, in tokens. All full blocks by default.
        """
        return self._units(0, num_tokens // self.block_size)

    def needed_ends(self, found: int, wanted: int) -> Iterable[int]:
        """Return the ends, in tokens, of prefixes whose keys a hit of `wanted` tokens needs, not one of `found`."""
        size = self.block_size
        return (min((index + 1) * size, wanted) for index in range(self.first(wanted) // size, -(-wanted // size)))

    def first(self, wanted: int) -> int:
        """Return the first token whose KV the token behind a hit of `wanted` tokens needs."""
        return 0

    def count_kept(self, start: int, end: int, hit: int) -> int:
        """Return how many of the group's blocks [start, end), computed in one step, get a key where later hits can end
        at `hit` tokens.
        """
        return end - start

    def _units(self, first: int, end: int) -> range:
        """Return the hash blocks that have the keys of the group's blocks [first, end)."""
        step = self.block_size // self._hash_size
        return range((max(first, 0) + 1) * step - 1, end * step, step)

    def _blocks(self, column: Column, limit: int) -> Column:
        """Return whether each of the group's own blocks up to `limit` tokens is cached."""
        step = self.block_size // self._hash_size
        return column[step - 1 :: step][: max(limit, 0) // self.block_size]

    def _aligned(self, num_blocks: int) -> int:
        """Return the largest number of blocks up to this one at which a hit may end."""
        return num_blocks - num_blocks % (self._unit // math.gcd(self._unit, self.block_size))

    def _stride(self) -> int:
        """Return the tokens of which the length of a hit is a multiple."""
        unit, size = self._unit, self.block_size
        return unit if unit < size and size % unit == 0 else math.lcm(size, unit)


class _FullRule(GroupRule):
    """All blocks from the first on; with partial hits also the key of a prefix that ends inside the next one."""

    form = FULL
    is_downward_closed = True

    def __init__(self, spec: GroupSpec, replica: ReplicaSpec) -> None:
        super().__init__(spec, replica)
        if replica.partial_hits:
            self.margin = min(self._hash_size, self.block_size)

    def length(self, column: Column, limit: int, drops: bool) -> int:
        unit, size = self._unit, self.block_size
        length = _run(self._blocks(column, limit)) * size
        if unit < size and size % unit == 0:
            ends = np.arange(min(length + size - unit, limit // unit * unit), length, -unit)
            inside = ends[column[ends // unit - 1]]
            length = int(inside[0]) if len(inside) else length
        if drops and length > 0:
            length -= min(unit, size)
        return length - length % unit

    def needed_ends(self, found: int, wanted: int) -> Iterable[int]:
        step = min(self._unit, self.block_size)
        return range(found // step * step + step, wanted + 1, step)


class _WindowRule(GroupRule):
    """The blocks of the last window; fewer if they begin with the first block."""

    form = WINDOW

    def _needed(self, drop: int) -> int:
        return max(self._of_window(drop), 1)

    def _of_window(self, drop: int) -> int:
        return -(-(self.spec.window - 1) // self.block_size) + drop

    def kept(self, num_tokens: int, hits: Sequence[int]) -> Iterable[int]:
        blocks = self._kept_blocks(0, num_tokens // self.block_size, hits)
        return chain.from_iterable(self._units(index, index + 1) for index in blocks)

    def length(self, column: Column, limit: int, drops: bool) -> int:
        end = self._end(self._blocks(column, limit), self._needed(int(drops)), int(drops))
        if drops and end > 0:
            end = self._aligned(end - 1)
        return end * self.block_size

    def _end(self, blocks: Column, needed: int, drop: int) -> int:
        index = np.arange(len(blocks))
        runs = index - np.maximum.accumulate(np.where(blocks, -1, index)) if len(blocks) else index
        enough = runs >= np.minimum(needed, index + 1)
        starts = np.flatnonzero(blocks & enough & ((index + 1 - drop) * self.block_size % self._unit == 0))
        if not len(starts):
            return 0
        end = int(starts[-1]) + 1
        return end if end >= needed or self._replica.commit is CommitRule.SAFE else self._aligned(end)

    def first(self, wanted: int) -> int:
        return max(0, wanted - self.spec.window + 1)

    def count_kept(self, start: int, end: int, hit: int) -> int:
        return len(self._kept_blocks(start, end, [hit]))

    def _kept_blocks(self, start: int, end: int, hits: Sequence[int]) -> Collection[int]:
        """Return which of the group's blocks [start, end) get a key, where later hits can end at `hits` tokens."""
        drop, size, every = int(self.spec.drops_last_block), self.block_size, self._replica.kept_every
        needed, segment = self._of_window(drop), (self._unit if every == DENSE_RETENTION else every) // size
        if self._unit % size or (every and needed >= segment):
            return range(start, end)
        of_segment = range(max(start, drop), end) if every else ()
        kept = {index for index in of_segment if (index - drop) % segment >= segment - needed}
        for hit in hits if every != DENSE_RETENTION else ():
            last = hit // self._unit * self._unit // size + drop
            kept.update(range(max(start, last - needed), min(end, last)))
        return kept


class _ChunkedRule(GroupRule):
    """The blocks of the chunk in which the hit ends; the chunks before it need none."""

    form = CHUNKED

    def length(self, column: Column, limit: int, drops: bool) -> int:
        chunk, size, blocks = self.spec.chunk, self.block_size, self._blocks(column, limit)
        while True:
            first = len(blocks) * size // chunk * chunk // size
            end = first + _run(blocks[first:])
            if end * size // chunk * chunk // size == first:
                return end * size
            blocks = blocks[:end]  # it ends in an earlier chunk

    def first(self, wanted: int) -> int:
        return wanted // self.spec.chunk * self.spec.chunk


class _StateRule(GroupRule):
    """The one state at the end of the hit."""

    form = STATE

    def __init__(self, spec: GroupSpec, replica: ReplicaSpec) -> None:
        super().__init__(spec, replica)
        self.margin = 0

    def kept(self, num_tokens: int, hits: Sequence[int]) -> Iterable[int]:
        size = self._stride()
        return [end // self._hash_size - 1 for hit in hits if (end := hit // self._unit * self._unit // size * size)]

    def length(self, column: Column, limit: int, drops: bool) -> int:
        stride = self._stride()
        step = stride // self._hash_size
        ends = np.flatnonzero(column[step - 1 :: step][: max(limit, 0) // stride])
        return (int(ends[-1]) + 1) * stride if len(ends) else 0

    def first(self, wanted: int) -> int:
        return max(wanted - 1, 0)

    def count_kept(self, start: int, end: int, hit: int) -> int:
        every, segment = self._replica.kept_every, self._replica.kept_every // self.block_size
        if (
            every == DENSE_RETENTION
            or (every and segment <= 1)
            or end * self.block_size == hit // self._unit * self._unit
        ):
            return int(end > start)  # the state at its end is the only one that a step has
        crosses = segment and end // segment > start // segment
        return int(bool(crosses and (self._replica.checkpoint_percent or end % segment == 0)))


class _NoRule(GroupRule):
    """A group that is never cached; no look-up asks it."""

    def kept(self, num_tokens: int, hits: Sequence[int]) -> Iterable[int]:
        return ()


_RULES: dict[GroupKind, type[GroupRule]] = {
    GroupKind.FULL_ATTENTION: _FullRule,
    GroupKind.MLA: _FullRule,
    GroupKind.SINK_FULL: _FullRule,
    GroupKind.R_SWA: _FullRule,
    GroupKind.SLIDING_WINDOW: _WindowRule,
    GroupKind.SLIDING_WINDOW_MLA: _WindowRule,
    GroupKind.CHUNKED_LOCAL: _ChunkedRule,
    GroupKind.MAMBA: _StateRule,
    GroupKind.CROSS: _NoRule,
    GroupKind.RING: _NoRule,
}


def blocks_of_hit(spec: ReplicaSpec, num_tokens: int) -> list[int]:
    """Return the number of blocks of each group that the hit of a prefix needs; 0 for groups that are not looked up.

    `num_tokens`: length of the prefix, a multiple of the block size of every group that is looked up.
    """
    rules = [_RULES[one.kind](one, spec) for one in spec.groups]
    return [
        num_tokens // one.block_size - one.first(num_tokens) // one.block_size if one.spec.is_cached else 0
        for one in rules
    ]


def blocks_kept(spec: ReplicaSpec, num_tokens: int, chunk_tokens: int) -> list[int]:
    """Return the number of blocks of each group that have keys when a prompt is computed and its end can be hit.

    `num_tokens` as for `blocks_of_hit`; `chunk_tokens`: of a step, a multiple of the same. A state exists only where a
    chunk ends.
    """
    kept = []
    for one, size in ((_RULES[group.kind](group, spec), group.block_size) for group in spec.groups):
        starts = range(0, num_tokens if one.spec.is_cached else 0, chunk_tokens)
        ends = [min(start + chunk_tokens, num_tokens) for start in starts]
        kept.append(
            sum(one.count_kept(start // size, end // size, num_tokens) for start, end in zip(starts, ends, strict=True))
        )
    return kept


def _run(blocks: Column) -> int:
    """Return the number of cached blocks before the first missing one."""
    missing = np.flatnonzero(~blocks)
    return int(missing[0]) if len(missing) else len(blocks)


class LookupClass(NamedTuple):
    """Groups of equal form, which are looked up jointly; `drops`: without the last matched block."""

    groups: tuple[int, ...]
    rule: GroupRule
    drops: bool


class HitRules:
    """The rules of a replica's groups.

    Attributes:
        classes: its look-up classes, in the order in which they are asked; none if nothing is cached.
    """

    def __init__(self, spec: ReplicaSpec) -> None:
        self.spec = spec
        self._rules = [_RULES[one.kind](one, spec) for one in spec.groups]
        members: dict[int, list[int]] = {}
        for group, number in enumerate(spec.lookup_classes):
            if spec.groups[group].is_cached and spec.enable_caching:
                members.setdefault(number, []).append(group)
        classes = [
            LookupClass(tuple(same), self._rules[same[0]], any(spec.groups[one].drops_last_block for one in same))
            for same in members.values()
        ]
        self.classes = sorted(classes, key=lambda one: not one.rule.is_downward_closed)

    def kept(self, num_tokens: int, single_group: int = 0) -> list[list[int]]:
        """Return, by group, the hash blocks whose keys the engine has once it has computed a prompt of this length, if
        it evicts none of them. `single_group`: tokens that one group alone hit of the prompt, if it is more than all.

        Windows and states are kept where a later prompt can begin: that is the last token if the prompt is repeated.
        """
        spec = self.spec
        drops = any(group.drops_last_block for group in spec.groups)
        hits = [*replay_boundaries(num_tokens, spec.scheduler_block_size, drops, spec.keep_divergence_boundary)]
        hits += [single_group] if single_group else []
        return [sorted(set(rule.kept(self._registered(rule.spec, num_tokens), hits))) for rule in self._rules]

    def _registered(self, group: GroupSpec, num_tokens: int) -> int:
        """Return how many of the first tokens have blocks with keys: up to where a hit can end, if other groups have a
        say in it, and one block more for a group whose last matched block is left out.
        """
        if len(self._rules) == 1 or self.spec.partial_hits:
            return num_tokens
        aligned = num_tokens // self.spec.scheduler_block_size * self.spec.scheduler_block_size
        return min(num_tokens, aligned + group.block_size) if group.drops_last_block and aligned else aligned

    def num_held(self, num_tokens: int) -> int:
        """Return how many blocks a request holds that has computed this number of tokens."""
        return sum(-(-num_tokens // one.block_size) - one.first(num_tokens) // one.block_size for one in self._rules)

    def search(self, column_of: ColumnOf, num_units: int) -> Search:
        """Return the look-ups in a prompt of `num_units` hash blocks."""
        return Search(self, column_of, num_units)

    def explain(self, columns: Sequence[bytes], most: int) -> LookupExplanation:
        """Explain the length of the hit of at most `most` tokens. `columns`: by group, a byte for each hash block of
        the prompt, 1 where the group has its key.
        """
        held = [np.frombuffer(column, np.bool_) for column in columns]
        num_units = len(columns[0])
        search = self.search(lambda groups: np.logical_and.reduce([held[group] for group in groups]), num_units)
        unit, hit, alone = self.spec.hit_alignment, search.longest(most), search.alone(most)
        longest = min(most, num_units * self.spec.hash_block_size) // unit * unit
        none = LookupExplanation(hit, longest, tuple(max(one, 0) for one in alone), (), 0, None)
        if hit >= longest:
            return none
        search.run(most)
        asked = [ask._replace(wanted=min(ask.wanted, longest) // unit * unit) for ask in search.asks]
        cuts = [ask for ask in asked if ask.found < ask.wanted]
        if not cuts:
            return none
        missing = self._missing(cuts[-1], held)
        return LookupExplanation(hit, longest, none.alone, cuts[-1].one.groups, cuts[-1].wanted, missing)

    def _missing(self, ask: _Ask, held: Sequence[Column]) -> MissingPrefix | None:
        """Return the first block that must be cached, up to its end or to a position inside it, for a longer hit in the
        class of `ask`.
        """
        size, block_size = self.spec.hash_block_size, ask.one.rule.block_size
        for end in ask.one.rule.needed_ends(ask.found, ask.wanted):
            for group in ask.one.groups:
                if not held[group][end // size - 1]:
                    return MissingPrefix(group, (end - 1) // block_size * block_size, end, end // size)
        return None


class _Ask(NamedTuple):
    """A query of one look-up class: the length that it asked for, and the length that was found, in tokens."""

    one: LookupClass
    wanted: int
    found: int


class Search:
    """The look-ups of one prompt. A class that does not accept a candidate length shortens it, until all accept it.

    Attributes:
        asks: the queries of the last look-up of all classes.
    """

    def __init__(self, rules: HitRules, column_of: ColumnOf, num_units: int) -> None:
        self._classes, self._num_groups = rules.classes, len(rules.spec.groups)
        self._num_tokens = num_units * rules.spec.hash_block_size
        self._column_of, self._columns = column_of, dict[int, Column]()
        self._restart()

    def longest(self, most: int) -> int:
        """Return the length of the longest hit of at most `most` tokens."""
        if most <= 0 or not self._classes:
            return 0
        return self._length(0, most, self._classes[0].drops) if self._num_groups == 1 else self.run(most)

    def alone(self, most: int) -> list[int]:
        """Return, by group, the hit of a look-up in this group only; -1 for groups that are never cached."""
        self._restart()
        alone = [-1] * self._num_groups
        for number, one in enumerate(self._classes):
            length = self._ask(number, most) if most > 0 else 0
            for group in one.groups:
                alone[group] = length
        return alone

    def run(self, most: int) -> int:
        """Shorten the candidate length until all classes accept it."""
        self._restart()
        two_pass_enough = len(self._classes) == 2 and self._classes[0].rule.is_downward_closed
        candidate = most
        while True:
            length = candidate
            for number in range(len(self._classes)):
                length = self._ask(number, length)
            if length >= candidate or two_pass_enough:
                return min(candidate, length)
            candidate = length

    def _restart(self) -> None:
        self.asks: list[_Ask] = []
        self._lengths: dict[int, int] = {}  # by class
        self._dropped: set[int] = set()  # classes whose dropped block the candidate already excludes

    def _ask(self, number: int, wanted: int) -> int:
        one = self._classes[number]
        if one.rule.is_downward_closed and number in self._lengths:
            found = self._lengths[number]  # every shorter length is cached too, so one look-up is enough
        else:
            drops = one.drops and number not in self._dropped
            reach = min(wanted + one.rule.margin, self._num_tokens) if drops else wanted
            found = self._lengths[number] = self._length(number, reach, drops)
            if drops:
                self._dropped.add(number)
            elif found < wanted:
                self._dropped.clear()
        self.asks.append(_Ask(one, wanted, min(found, wanted)))
        return min(found, wanted)

    def _length(self, number: int, most: int, drops: bool) -> int:
        one = self._classes[number]
        if number not in self._columns:
            self._columns[number] = self._column_of(one.groups)
        return one.rule.length(self._columns[number], min(most, self._num_tokens), drops)
