"""How much of a prompt a place has cached: the core's look-up, over columns of the index instead of a pool of blocks.

The core decides how the groups agree on one length (`kvplane_service.core.lookup`). What each kind of group accepts is
here once more, over a column that says for each hash block of the prompt whether the group has its key:

    hash blocks      0 1 2 3 4 5 6 7        group with blocks of 2 hash blocks: its keys are those of 1, 3, 5, 7
    full             x x x x x . x x        5 hash blocks
    window of 2      . . x x . x x .        ends at 7, at 4
    state            . . . x . . . x        ends at 8, at 4
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from kvplane.base.groups import GroupKind, GroupSpec, ReplicaSpec
from kvplane_fleet import native
from kvplane_fleet.index import Index
from kvplane_fleet.native import NativeIndex
from kvplane_service.core.lookup import PrefixLookup
from kvplane_service.core.managers import GroupManager
from kvplane_service.core.managers.questions import Query
from kvplane_service.core.setup import replay_boundaries

Column = NDArray[np.bool_]
ColumnOf = Callable[[tuple[int, ...]], Column]
_NO_HORIZON = 1 << 62


@dataclass(frozen=True, slots=True)
class Claim:
    """What a place would hit.

    Attributes:
        tokens: length of the hit.
        alone: by group, the tokens that it would hit if it were the only group. Groups that are never cached have -1.
        limits: the groups that have the shortest hits alone, where they limit `tokens`.
    """

    tokens: int
    alone: tuple[int, ...]

    @property
    def limits(self) -> tuple[int, ...]:
        """Groups whose hits alone are shorter than the longest of all groups."""
        longest = max(self.alone, default=0)
        least = min((one for one in self.alone if one >= 0), default=0)
        return tuple(group for group, one in enumerate(self.alone) if one == least < longest)


class _Rule:
    """What a group of one kind accepts; has the members of a GroupManager that a look-up uses.

    Attributes:
        form: what it is called in the compiled index; -1 if it is never asked.
    """

    form: ClassVar[int] = -1

    def __init__(self, group: int, spec: GroupSpec, replica: ReplicaSpec, column_of: ColumnOf) -> None:
        self.group, self.spec, self._replica = group, spec, replica
        self.block_size, self.hash_size = spec.block_size, replica.hash_block_size
        self._unit = replica.hit_alignment
        self._column_of = column_of

    def is_downward_closed(self) -> bool:
        """See GroupManager."""
        return False

    def drop_margin(self) -> int:
        """See GroupManager."""
        return self.block_size

    def find(self, query: Query) -> tuple[list[list[int]], int]:
        """Return the length of the longest hit; the rows, which name no blocks, are empty."""
        limit = min(query.max_tokens, len(query.digests) * self.hash_size)
        return [[] for _ in query.groups], self._length(self._column_of(query.groups), limit, query)

    def kept(self, num_tokens: int, hits: Sequence[int]) -> Iterable[int]:
        """Return the hash blocks whose keys the group has once a prompt of this length was computed; `hits`: where
        later hits can end, in tokens. All full blocks by default.
        """
        del hits
        return self._units(0, num_tokens // self.block_size)

    def _units(self, first: int, end: int) -> range:
        """Return the hash blocks that have the keys of the group's blocks [first, end)."""
        step = self.block_size // self.hash_size
        return range((max(first, 0) + 1) * step - 1, end * step, step)

    def _length(self, column: Column, limit: int, query: Query) -> int:
        raise NotImplementedError

    def _blocks(self, column: Column, limit: int) -> Column:
        """Return whether each of the group's own blocks up to `limit` tokens is cached."""
        step = self.block_size // self.hash_size
        return column[step - 1 :: step][: max(limit, 0) // self.block_size]

    def _aligned(self, num_blocks: int) -> int:
        """Return the largest number of blocks up to this one at which a hit may end."""
        return num_blocks - num_blocks % (self._unit // math.gcd(self._unit, self.block_size))


class _Full(_Rule):
    """All blocks from the first on; with partial hits also the key of a prefix that ends inside the next one."""

    form = native.FULL

    def is_downward_closed(self) -> bool:
        return True

    def drop_margin(self) -> int:
        return min(self.hash_size, self.block_size) if self._replica.partial_hits else self.block_size

    def _length(self, column: Column, limit: int, query: Query) -> int:
        unit, size = self._unit, self.block_size
        length = _run(self._blocks(column, limit)) * size
        if unit < size and size % unit == 0:
            ends = np.arange(min(length + size - unit, limit // unit * unit), length, -unit)
            inside = ends[column[ends // unit - 1]]
            length = int(inside[0]) if len(inside) else length
        if query.drops_last_block and length > 0:
            length -= min(unit, size)
        return length - length % unit


class _Window(_Rule):
    """The blocks of the last window; fewer if they begin with the first block."""

    form = native.WINDOW

    def _needed(self, drop: int) -> int:
        return max(-(-(self.spec.window - 1) // self.block_size) + drop, 1)

    def kept(self, num_tokens: int, hits: Sequence[int]) -> Iterable[int]:
        drop = int(self.spec.drops_last_block)
        needed = -(-(self.spec.window - 1) // self.block_size) + drop
        ends = [hit // self._unit * self._unit // self.block_size + drop for hit in hits]
        last = num_tokens // self.block_size
        return chain.from_iterable(self._units(end - needed, min(end, last)) for end in ends)

    def _length(self, column: Column, limit: int, query: Query) -> int:
        drop = int(query.drops_last_block)
        needed = self._needed(drop)
        end = self._end(self._blocks(column, limit), needed, drop)
        if drop and end > 0:
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
        return end if end >= needed else self._aligned(end)


class _Chunked(_Rule):
    """The blocks of the chunk in which the hit ends; the chunks before it need none."""

    form = native.CHUNKED

    def _length(self, column: Column, limit: int, query: Query) -> int:
        chunk, size, blocks = self.spec.chunk, self.block_size, self._blocks(column, limit)
        while True:
            first = len(blocks) * size // chunk * chunk // size
            end = first + _run(blocks[first:])
            if end * size // chunk * chunk // size == first:
                return end * size
            blocks = blocks[:end]  # it ends in an earlier chunk


class _State(_Rule):
    """The one state at the end of the hit."""

    form = native.STATE

    def drop_margin(self) -> int:
        return 0

    def kept(self, num_tokens: int, hits: Sequence[int]) -> Iterable[int]:
        size = self._stride()
        return [end // self.hash_size - 1 for hit in hits if (end := hit // self._unit * self._unit // size * size)]

    def _stride(self) -> int:
        """Return the tokens of which a hit's length is a multiple."""
        unit, size = self._unit, self.block_size
        return unit if unit < size and size % unit == 0 else math.lcm(size, unit)

    def _length(self, column: Column, limit: int, query: Query) -> int:
        stride = self._stride()
        step = stride // self.hash_size
        ends = np.flatnonzero(column[step - 1 :: step][: max(limit, 0) // stride])
        return (int(ends[-1]) + 1) * stride if len(ends) else 0


class _Never(_Rule):
    """A group that is never cached; no look-up asks it."""

    def kept(self, num_tokens: int, hits: Sequence[int]) -> Iterable[int]:
        del num_tokens, hits
        return ()


_RULES: dict[GroupKind, type[_Rule]] = {
    GroupKind.FULL_ATTENTION: _Full,
    GroupKind.MLA: _Full,
    GroupKind.SINK_FULL: _Full,
    GroupKind.R_SWA: _Full,
    GroupKind.SLIDING_WINDOW: _Window,
    GroupKind.SLIDING_WINDOW_MLA: _Window,
    GroupKind.CHUNKED_LOCAL: _Chunked,
    GroupKind.MAMBA: _State,
    GroupKind.CROSS: _Never,
    GroupKind.RING: _Never,
}


def _run(blocks: Column) -> int:
    """Return the number of cached blocks before the first missing one."""
    missing = np.flatnonzero(~blocks)
    return int(missing[0]) if len(missing) else len(blocks)


class _NoKeys:
    """Rules find keys in columns, not in the index of a query."""

    def find(self, domain: str, groups: Sequence[int], digest: bytes, horizon: int) -> list[int] | None:
        """Return None."""
        del domain, groups, digest, horizon
        return None


class HitRule:
    """Computes claims for one layout of groups."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._spec = spec
        self._columns: Callable[[tuple[int, ...]], Column] = _no_columns
        rules = [
            _RULES[one.kind](group, one, spec, lambda groups: self._columns(groups))
            for group, one in enumerate(spec.groups)
        ]
        self._rules = rules
        # Safe: a look-up uses no other members of a manager than those of _Rule.
        self._lookup = PrefixLookup(spec, cast(Sequence[GroupManager], rules), _NoKeys())

    def kept(self, num_tokens: int, single_group: int = 0) -> list[list[int]]:
        """Return, by group, the hash blocks whose keys the engine has once it has computed a prompt of this length, if
        it evicts none of them. `single_group`: tokens that one group alone hit of the prompt, if it is more than all.

        Windows and states are kept where a later prompt can begin: that is the last token if the prompt is repeated.
        """
        spec = self._spec
        drops = any(group.drops_last_block for group in spec.groups)
        hits = [*replay_boundaries(num_tokens, spec.scheduler_block_size, drops, spec.keep_divergence_boundary)]
        hits += [single_group] if single_group else []
        return [sorted(set(rule.kept(num_tokens, hits))) for rule in self._rules]

    @cached_property
    def native(self) -> object:
        """The rule for the compiled index."""
        spec = self._spec
        classes = [
            (
                one.groups,
                self._rules[one.groups[0]].form,
                first.block_size,
                first.window,
                first.chunk,
                one.drops_last_block,
            )
            for one, first in ((one, spec.groups[one.groups[0]]) for one in self._lookup.classes)
        ]
        head = (spec.hash_block_size, spec.hit_alignment, int(spec.partial_hits), len(spec.groups))
        return native.layout(head, classes if spec.enable_caching else [])

    def claim(self, column_of: ColumnOf, num_units: int, num_tokens: int) -> Claim:
        """Return the hit of a prompt of `num_tokens` tokens, which has `num_units` hash blocks.

        `column_of` returns, for groups, which hash blocks have their key in all of these groups. The last token of a
        prompt is never part of a hit, because the engine computes it for its logits.
        """
        columns: dict[tuple[int, ...], Column] = {}

        def column(groups: tuple[int, ...]) -> Column:
            if groups not in columns:
                columns[groups] = column_of(groups)
            return columns[groups]

        self._columns = column
        units = cast(Sequence[bytes], range(num_units))  # rules read only how many there are
        most = num_tokens - 1
        hit = self._lookup.find(units, "", most, _NO_HORIZON)
        alone = [-1] * len(self._spec.groups)
        lengths = self._lookup.find_each(units, "", most, _NO_HORIZON)[1]
        for one in self._lookup.classes if self._spec.enable_caching else ():
            for group in one.groups:
                alone[group] = lengths[group]
        self._columns = _no_columns
        return Claim(hit.num_tokens, tuple(alone))


@dataclass(frozen=True, slots=True)
class Asked:
    """A place whose hit is asked for.

    Attributes:
        rule: the rule of its groups.
        cells: the cell of each group.
        others: another cell of each group, which may have a key instead, or several times as many; () = none.
    """

    rule: HitRule
    cells: Sequence[int]
    others: Sequence[int] = ()


def claims(index: Index | NativeIndex, keys: Sequence[int], num_tokens: int, asked: Sequence[Asked]) -> list[Claim]:
    """Return the hits of a prompt of `num_tokens` tokens, whose keys are given, at several places."""
    if isinstance(index, NativeIndex):
        places = [(one.rule.native, one.cells, one.others) for one in asked]
        return [Claim(*row) for row in index.claims(keys, num_tokens, places)]
    found = index.find(keys)

    def has(one: Asked, groups: Sequence[int]) -> Column:
        size = len(one.cells)
        others = [one.others[first + group] for first in range(0, len(one.others), size) for group in groups]
        return found.has([one.cells[group] for group in groups], others)

    return [one.rule.claim(partial(has, one), len(keys), num_tokens) for one in asked]


def _no_columns(groups: tuple[int, ...]) -> Column:
    raise AssertionError(f"columns of groups {groups} are read outside a claim")
