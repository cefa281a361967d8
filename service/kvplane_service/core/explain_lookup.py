"""Explains the length of a hit: the hit of each group alone, the class that shortened it last, the missing block.

It runs the managers and the search of the look-up itself, so that it cannot disagree with it. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from kvplane.base.groups import ReplicaSpec
from kvplane_service.core.coordinator import Coordinator
from kvplane_service.core.lookup import Hit, LookupClass, PrefixLookup, Search
from kvplane_service.core.pool import BlockPool
from kvplane_service.core.requests import Requests

Found: TypeAlias = list[int] | None


class MissingPrefix(NamedTuple):
    """What a longer hit lacks: the content of tokens [start, end) in a group; `num_hashes`: hash blocks up to `end`."""

    group: int
    start: int
    end: int
    num_hashes: int


@dataclass(frozen=True, slots=True)
class LookupExplanation:
    """A hit and the reason for its length.

    Attributes:
        hit: the result of the look-up.
        longest: the longest hit that is possible; the last token is always computed.
        alone: tokens of the hit of each group alone; 0 for groups that are never cached.
        cut_by: groups of the class that shortened the candidate last; empty when the hit is the longest.
        wanted: the candidate length that it shortened.
        missing: the first prefix that this class lacks; None: none, it drops its last matched block.
    """

    hit: Hit
    longest: int
    alone: tuple[int, ...]
    cut_by: tuple[int, ...]
    wanted: int
    missing: MissingPrefix | None


class Prefix(NamedTuple):
    """A prefix to look up: its hashes, the domain, the longest hit, and the last step whose keys count."""

    digests: Sequence[bytes]
    domain: str
    max_tokens: int
    horizon: int


class LookupExplainer:
    """Explains look-ups in the cache of a replica, or in one that is given by its `find` function."""

    def __init__(self, spec: ReplicaSpec, lookup: PrefixLookup, pool: BlockPool) -> None:
        self._spec = spec
        self._lookup = lookup
        self._pool = pool

    @classmethod
    def over(cls, spec: ReplicaSpec, find: Callable[[str, Sequence[int], bytes], Found]) -> LookupExplainer:
        """For a cache of which only `find(domain, groups, digest)` is known (see BlockPool.find)."""
        sinks = sum(group.sink_tokens // group.block_size for group in spec.groups)
        coordinator = Coordinator(replace(spec, num_blocks=sinks + 2), Requests())
        pool = _Known(find, len(spec.groups))
        for manager in coordinator.managers:
            manager.pool = pool
        return cls(spec, coordinator.lookup, pool)

    def explain(self, prefix: Prefix) -> LookupExplanation:
        """What a look-up of this prefix finds, and why it finds no more."""
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
        """The last query whose answer shortened the candidate."""
        search = _RecordingSearch(self._lookup, prefix.digests, prefix.domain, prefix.horizon)
        search.run(prefix.max_tokens)
        unit, last = self._spec.hit_alignment, None
        for ask in search.asks:
            wanted = min(ask.wanted, longest) // unit * unit
            if ask.found < wanted:
                last = ask._replace(wanted=wanted)
        return last

    def _missing(self, ask: _Ask, prefix: Prefix) -> MissingPrefix | None:
        """The first block, or boundary inside one, that a longer hit needs in this class and that is not cached."""
        size, block_size = self._spec.hash_block_size, ask.one.manager.block_size
        for end in ask.one.manager.needed_ends(ask.found, ask.wanted):
            digest = prefix.digests[end // size - 1]
            for group in ask.one.groups:
                if self._pool.find(prefix.domain, (group,), digest, prefix.horizon) is None:
                    return MissingPrefix(group, (end - 1) // block_size * block_size, end, end // size)
        return None


class _Ask(NamedTuple):
    """A query of one class and its answer, in tokens."""

    one: LookupClass
    wanted: int
    found: int


class _RecordingSearch(Search):
    """Records each query and its answer."""

    def __init__(self, lookup: PrefixLookup, digests: Sequence[bytes], domain: str, horizon: int) -> None:
        super().__init__(lookup, digests, domain, horizon)
        self.asks: list[_Ask] = []

    def ask(self, number: int, one: LookupClass, length: int) -> int:
        """See Search."""
        found = super().ask(number, one, length)
        self.asks.append(_Ask(one, length, found))
        return found


class _Known(BlockPool):
    """A pool without blocks whose look-ups call a function."""

    def __init__(self, find: Callable[[str, Sequence[int], bytes], Found], num_groups: int) -> None:
        super().__init__(2, num_groups, enable_caching=True)
        self._find = find

    def find(self, domain: str, groups: Sequence[int], digest: bytes, horizon: int = 0) -> Found:
        """See BlockPool.find; the horizon is ignored."""
        del horizon
        return self._find(domain, groups, digest)
