"""Explains the length of a hit: the hit of each group alone, which groups shortened it last, and the missing block.

The explanation runs the managers and the search of a real look-up, so the explained hit equals that of the look-up.
Changes nothing. Groups of equal format are looked up jointly, as one look-up class (`lookup.LookupClass`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from kvplane.base.groups import ReplicaSpec
from kvplane_service.core.coordinator import Coordinator
from kvplane_service.core.lookup import Hit, LookupClass, PrefixLookup, Search
from kvplane_service.core.pool import INSIDE, BlockPool
from kvplane_service.core.requests import Requests
from kvplane_service.core.setup import smallest

if TYPE_CHECKING:
    from kvplane_service.core.interface import TiersView

Found: TypeAlias = list[int] | None


class MissingPrefix(NamedTuple):
    """The cached content that is missing for a longer hit: the KV of tokens [start, end) in one group.

    `num_hashes`: number of hash blocks up to `end`. `tier`: number of the tier that has it; None if none has.
    """

    group: int
    start: int
    end: int
    num_hashes: int
    tier: int | None = None


@dataclass(frozen=True, slots=True)
class LookupExplanation:
    """A hit and the reason for its length.

    Attributes:
        hit: the result of the look-up.
        longest: tokens of the longest possible hit, which leaves out the last token of the prompt.
        alone: by group, tokens of the hit of a look-up in this group only; 0 for groups that are never cached.
        cut_by: groups of the look-up class that shortened the hit last; empty when the hit is the longest possible.
        wanted: length of the hit, in tokens, before the groups `cut_by` shortened it.
        missing: the first content that the groups `cut_by` lack; None: they have all, but leave out the last matched
            block.
    """

    hit: Hit
    longest: int
    alone: tuple[int, ...]
    cut_by: tuple[int, ...]
    wanted: int
    missing: MissingPrefix | None


class Prefix(NamedTuple):
    """A prefix to look up. `horizon`: keys that later steps registered are ignored. A hit has at most `max_tokens`
    tokens.
    """

    digests: Sequence[bytes]
    domain: str
    max_tokens: int
    horizon: int = INSIDE


class LookupExplainer:
    """Explains look-ups in the prefix cache of a replica, or in any cache that has a `find` function (`over`)."""

    def __init__(
        self, spec: ReplicaSpec, lookup: PrefixLookup, pool: BlockPool, tiers: TiersView | None = None
    ) -> None:
        """`tiers`: where blocks that the pool lacks may be."""
        self._spec = spec
        self._lookup = lookup
        self._pool = pool
        self._tiers = tiers

    @classmethod
    def over(
        cls, spec: ReplicaSpec, find: Callable[[str, Sequence[int], bytes], Found], tiers: TiersView | None = None
    ) -> LookupExplainer:
        """Return an explainer for another cache: `find(domain, groups, digest)` answers as `BlockPool.find` does."""
        coordinator = Coordinator(smallest(spec), Requests())
        pool = _Known(find, len(spec.groups))
        for manager in coordinator.managers:
            manager.pool = pool
        coordinator.lookup.index = pool
        return cls(spec, coordinator.lookup, pool, tiers)

    def explain(self, prefix: Prefix) -> LookupExplanation:
        """Look the prefix up, and explain what limits the length of its hit."""
        lookup, unit = self._lookup, self._spec.hit_alignment
        hit = lookup.find(prefix.digests, prefix.domain, prefix.max_tokens, prefix.horizon)
        hashed = len(prefix.digests) * self._spec.hash_block_size
        longest = min(prefix.max_tokens, hashed) // unit * unit
        alone = [0] * lookup.num_groups
        for one in lookup.classes:
            found = self._alone(one, prefix)
            for group in one.groups:
                alone[group] = found
        cut = None if hit.num_tokens >= longest else self._cut(prefix, longest)
        if cut is None:
            return LookupExplanation(hit, longest, tuple(alone), (), 0, None)
        return LookupExplanation(hit, longest, tuple(alone), cut.one.groups, cut.wanted, self._missing(cut, prefix))

    def _alone(self, one: LookupClass, prefix: Prefix) -> int:
        search = Search(self._lookup, prefix.digests, prefix.domain, prefix.horizon)
        return one.manager.find(search.query(one, max(prefix.max_tokens, 0), one.drops_last_block))[1]

    def _cut(self, prefix: Prefix, longest: int) -> _Ask | None:
        """Return the last query whose answer was shorter than the length that it asked for; None if there was none."""
        search = _RecordingSearch(self._lookup, prefix.digests, prefix.domain, prefix.horizon)
        search.run(prefix.max_tokens)
        unit, last = self._spec.hit_alignment, None
        for ask in search.asks:
            wanted = min(ask.wanted, longest) // unit * unit
            if ask.found < wanted:
                last = ask._replace(wanted=wanted)
        return last

    def _missing(self, ask: _Ask, prefix: Prefix) -> MissingPrefix | None:
        """Return the first block that must be cached, up to its end or to a position inside it, for a longer hit in the
        class of `ask`.
        """
        size, block_size = self._spec.hash_block_size, ask.one.manager.block_size
        for end in ask.one.manager.needed_ends(ask.found, ask.wanted):
            digest = prefix.digests[end // size - 1]
            for group in ask.one.groups:
                if self._pool.find(prefix.domain, (group,), digest, prefix.horizon) is None:
                    tier = self._tiers.tier_of(prefix.domain, group, digest) if self._tiers is not None else None
                    return MissingPrefix(group, (end - 1) // block_size * block_size, end, end // size, tier)
        return None


class _Ask(NamedTuple):
    """A query of one look-up class: the length that it asked for, and the length that was found, in tokens."""

    one: LookupClass
    wanted: int
    found: int


class _RecordingSearch(Search):
    """A search that records each query and its answer."""

    def __init__(self, lookup: PrefixLookup, digests: Sequence[bytes], domain: str, horizon: int) -> None:
        super().__init__(lookup, digests, domain, horizon)
        self.asks: list[_Ask] = []

    def ask(self, number: int, one: LookupClass, length: int) -> int:
        """Query one class as `Search.ask` does, and record the answer."""
        found = super().ask(number, one, length)
        self.asks.append(_Ask(one, length, found))
        return found


class _Known(BlockPool):
    """A substitute for a block pool that has no content: it passes each look-up to a given function."""

    def __init__(self, find: Callable[[str, Sequence[int], bytes], Found], num_groups: int) -> None:
        super().__init__(2, num_groups, enable_caching=True)
        self._find = find

    def find(self, domain: str, groups: Sequence[int], digest: bytes, horizon: int = 0) -> Found:
        """Return what the given function returns, which is as for `BlockPool.find`; `horizon` is ignored."""
        del horizon
        return self._find(domain, groups, digest)
