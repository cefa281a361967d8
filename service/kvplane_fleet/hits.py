"""How much of a prompt a place has cached: the rules of `kvplane_core.face.hit_rules`, over columns of the index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from kvplane.base.groups import CommitRule
from kvplane_core.face.hit_rules import Column, ColumnOf, HitRules
from kvplane_fleet import native
from kvplane_fleet.index import Index
from kvplane_fleet.native import NativeIndex


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


class HitRule(HitRules):
    """Computes claims for one layout of groups."""

    @cached_property
    def native(self) -> object:
        """The rule for the compiled index."""
        spec = self.spec
        classes = [
            (one.groups, one.rule.form, first.block_size, first.window, first.chunk, one.drops)
            for one, first in ((one, one.rule.spec) for one in self.classes)
        ]
        safe = spec.commit is CommitRule.SAFE
        return native.layout(
            (spec.hash_block_size, spec.hit_alignment, int(spec.partial_hits), int(safe), len(spec.groups)), classes
        )

    def claim(self, column_of: ColumnOf, num_units: int, num_tokens: int) -> Claim:
        """Return the hit of a prompt of `num_tokens` tokens, which has `num_units` hash blocks.

        `column_of` returns, for groups, which hash blocks have their key in all of these groups. The last token of a
        prompt is never part of a hit, because the engine computes it for its logits.
        """
        search = self.search(column_of, num_units)
        return Claim(search.longest(num_tokens - 1), tuple(search.alone(num_tokens - 1)))


@dataclass(frozen=True, slots=True)
class Asked:
    """A place whose hit is asked for.

    Attributes:
        rule: the rule of its groups.
        cells: the cell of each group.
        others: another cell of each group, which may have a key instead, or several times as many; () = none.
        shared: the same, and one object for all places that share it, which is read once.
    """

    rule: HitRule
    cells: Sequence[int]
    others: Sequence[int] = ()
    shared: Sequence[int] = ()


def claims(index: Index | NativeIndex, keys: Sequence[int], num_tokens: int, asked: Sequence[Asked]) -> list[Claim]:
    """Return the hits of a prompt of `num_tokens` tokens, whose keys are given, at several places."""
    if isinstance(index, NativeIndex):
        places = [(one.rule.native, one.cells, one.others, one.shared) for one in asked]
        return [Claim(*row) for row in index.claims(keys, num_tokens, places)]
    sets: dict[int, int] = {}  # few: the blocks of one request share one
    numbers = np.array([sets.setdefault(bits, len(sets)) for bits in index.find(keys)], np.intp)

    def has(one: Asked, groups: Sequence[int]) -> Column:
        """Return which keys all of these groups have, each in one of its cells."""
        size = len(one.cells)
        others = [*one.others, *one.shared]
        choices = [sum({1 << cell for cell in (one.cells[at], *others[at::size])}) for at in groups]
        return np.array([all(bits & choice for choice in choices) for bits in sets], np.bool_)[numbers]

    return [one.rule.claim(partial(has, one), len(keys), num_tokens) for one in asked]
