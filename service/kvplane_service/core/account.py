"""How a look-up came to its length: what each group has alone, which class shortened it last, and the block it lacked.

The same managers and the same search as the look-up itself, so that the account cannot disagree with it. Reads only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from kvplane.base.groups import ReplicaSpec
from kvplane_service.core.coordinator import Coordinator
from kvplane_service.core.lookup import Hit, LookupClass, PrefixLookup, Search
from kvplane_service.core.pool import BlockPool
from kvplane_service.core.requests import Requests

Found: TypeAlias = list[int] | None


class Lacking(NamedTuple):
    """What was missing for a longer hit: the content of tokens [start, end) in a group; `num_hashes` end there."""

    group: int
    start: int
    end: int
    num_hashes: int


@dataclass(frozen=True, slots=True)
class Account:
    """Outcome and reason of a look-up.

    Attributes:
        hit: what the look-up answers.
        longest: the longest hit that the rules allow, since the last token is always computed.
        alone: tokens that each group has by itself; 0 for groups that never cache.
        cut_by: groups of the class that shortened the candidate last; empty when the hit is the longest.
        wanted: the candidate that it shortened.
        lacking: what that class lacked; None when it lacked nothing (it drops its last matched block).
    """

    hit: Hit
    longest: int
    alone: tuple[int, ...]
    cut_by: tuple[int, ...]
    wanted: int
    lacking: Lacking | None


class Prefix(NamedTuple):
    """What is looked up: hashes, the domain, the longest hit, and the last step whose keys are seen."""

    digests: Sequence[bytes]
    domain: str
    max_tokens: int
    horizon: int


class Accountant:
    """Accounts for look-ups in the cache of a replica, or in one that is only known by what it holds."""

    def __init__(self, spec: ReplicaSpec, lookup: PrefixLookup, pool: BlockPool) -> None:
        self._spec = spec
        self._lookup = lookup
        self._pool = pool

    @classmethod
    def over(cls, spec: ReplicaSpec, find: Callable[[str, Sequence[int], bytes], Found]) -> Accountant:
        """For a cache in which `find(domain, groups, digest)` tells what is there (see BlockPool.find)."""
        sinks = sum(group.sink_tokens // group.block_size for group in spec.groups)
        coordinator = Coordinator(replace(spec, num_blocks=sinks + 2), Requests())
        pool = _Known(find, len(spec.groups))
        for manager in coordinator.managers:
            manager.pool = pool
        return cls(spec, coordinator.lookup, pool)

    def account(self, prefix: Prefix) -> Account:
        """What a look-up of this prefix finds, and why not more."""
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
            return Account(hit, longest, tuple(alone), (), 0, None)
        return Account(hit, longest, tuple(alone), cut.one.groups, cut.wanted, self._lacking(cut, prefix))

    def _alone(self, one: LookupClass, prefix: Prefix) -> int:
        search = Search(self._lookup, prefix.digests, prefix.domain, prefix.horizon)
        return one.manager.find(search.query(one, max(prefix.max_tokens, 0), one.drops))[1]

    def _cut(self, prefix: Prefix, longest: int) -> _Ask | None:
        """The question with whose answer the candidate became shorter for the last time."""
        search = _ToldSearch(self._lookup, prefix.digests, prefix.domain, prefix.horizon)
        search.run(prefix.max_tokens)
        unit, last = self._spec.hit_alignment, None
        for ask in search.asks:
            wanted = min(ask.wanted, longest) // unit * unit
            if ask.found < wanted:
                last = ask._replace(wanted=wanted)
        return last

    def _lacking(self, ask: _Ask, prefix: Prefix) -> Lacking | None:
        """The first block, or inner boundary of one, that a longer hit needs in this class and that is not there."""
        size, block_size = self._spec.hash_block_size, ask.one.manager.block_size
        for end in self._needed(ask):
            digest = prefix.digests[end // size - 1]
            for group in ask.one.groups:
                if self._pool.find(prefix.domain, (group,), digest, prefix.horizon) is None:
                    return Lacking(group, (end - 1) // block_size * block_size, end, end // size)
        return None

    def _needed(self, ask: _Ask) -> Iterator[int]:
        """Ends of what a hit needs: all that follows, or what the token behind the wanted boundary attends to."""
        manager, unit = ask.one.manager, self._spec.hit_alignment
        block_size = manager.block_size
        if manager.downward_closed:
            step = unit if manager.fine_grained and unit < block_size else block_size
            yield from range(ask.found // step * step + step, ask.wanted + 1, step)
            return
        first = max(manager.skipped_tokens(ask.wanted), 0) // block_size
        for index in range(first, -(-ask.wanted // block_size)):
            yield min((index + 1) * block_size, ask.wanted)


class _Ask(NamedTuple):
    """What one class of groups was asked, and what it answered, in tokens."""

    one: LookupClass
    wanted: int
    found: int


class _ToldSearch(Search):
    """Remembers each question and its answer."""

    def __init__(self, lookup: PrefixLookup, digests: Sequence[bytes], domain: str, horizon: int) -> None:
        super().__init__(lookup, digests, domain, horizon)
        self.asks: list[_Ask] = []

    def ask(self, number: int, one: LookupClass, length: int) -> int:
        """See Search."""
        found = super().ask(number, one, length)
        self.asks.append(_Ask(one, length, found))
        return found


class _Known(BlockPool):
    """A pool without blocks that answers look-ups from elsewhere."""

    def __init__(self, find: Callable[[str, Sequence[int], bytes], Found], num_groups: int) -> None:
        super().__init__(2, num_groups, enable_caching=True)
        self._find = find

    def find(self, domain: str, groups: Sequence[int], digest: bytes, horizon: int = 0) -> Found:
        """See BlockPool.find; what is known is seen, whatever the horizon."""
        del horizon
        return self._find(domain, groups, digest)
