"""What is evicted must be found again in no copy: slots of tiers that hold it are damaged. So is what operators evict.

The services' decisions say which keys a step evicts, of its engine or of an operator. It is final once every rank has
carried out the orders of the step: then its slots hold garbage under the version that they had, and a load of one is a
wrong hit, whatever the store returns. Jobs in flight are left out, and what is saved later from another page.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from kvplane.base.step import CacheEvent, RemoveReason
from kvplane_core.face.keys import Key
from kvplane_core.spec.replica import Replica
from kvplane_service.decisions.log import Decision
from tests.core.follower import entries
from tests.core.page_memory import Memory, Page
from tests.core.page_requests import Texts

if TYPE_CHECKING:
    from tests.sim.ranks import RankProcess

Decided: TypeAlias = tuple[int, int, int]  # process of a service, epoch, its number of a step
Ordered: TypeAlias = tuple[int, int, int]  # epoch, engine life, its number of the step


@dataclass
class Known:
    """What a service knew before a step: keys by block, and the versions that jobs in flight write."""

    keys: dict[int, list[Key]] = field(default_factory=dict)
    flying: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, replica: Replica) -> Known:
        pool, jobs = replica.coordinator.pool, replica.tiers.jobs
        keyed = ((block, pool.key_of(block)) for block in range(pool.num_blocks))
        keys = {block: [key, *pool.more_keys.get(block, ())] for block, key in keyed if key is not None}
        return cls(keys, {*jobs.saves, *jobs.moves})


class Evictions:
    """The evictions of one replica.

    Attributes:
        blocks: the blocks that a step has evicted.
        damaged: slots that were damaged.
    """

    def __init__(self, texts: Texts, num_ranks: int) -> None:
        self._texts, self._num_ranks = texts, num_ranks
        self._written: dict[int, set[Key]] = defaultdict(set)  # by version: keys of the pages that jobs of it copy
        self._gone: dict[Decided, dict[int, set[Key]]] = defaultdict(lambda: defaultdict(set))  # by version: its keys
        self._named: dict[Ordered, Decided] = {}
        self._obeyed: dict[Ordered, set[RankProcess]] = defaultdict(set)
        self.blocks: dict[Decided, set[int]] = defaultdict(set)
        self.damaged = 0

    def decided(self, name: Decided, known: Known, decision: Decision, replica: Replica) -> None:
        """A service has applied a step, or parts of one; `known` before, `replica` as it is now."""
        jobs, given, keys = replica.tiers.jobs, set[int](), set[Key]()
        for number in (*jobs.saves, *jobs.moves):
            self._written[number].add((jobs.saves.get(number) or jobs.moves[number]).key)
        parts = zip(decision.step.parts, decision.result.parts, decision.events, strict=True)
        for part, result, events in parts:
            self.blocks[name].update(part.cache.evicted)
            evicted = {(block, key) for block in {*part.cache.evicted} - given for key in known.keys.get(block, ())}
            keys.update(key for _, key in evicted - _withdrawn(events))
            given.update(result.orders.stamp_block)
        flying = known.flying.union(jobs.saves, jobs.moves)
        for version, written in self._written.items() if keys else ():
            if version not in flying and written & keys:
                self._gone[name][version] |= written & keys

    def answered(self, ordered: Ordered, name: Decided) -> None:
        """An engine life has the answer to this step."""
        self._named[ordered] = name

    def obeyed(self, ordered: Ordered, rank: RankProcess) -> None:
        """A rank has carried out the orders of a step."""
        self._obeyed[ordered].add(rank)
        if ordered in self._named and len(self._obeyed[ordered]) == self._num_ranks:
            gone = self._gone.get(self._named[ordered], {})
            for each in self._obeyed.pop(ordered) if gone else ():
                for tier in each.memory.tiers.slots:
                    self._damage(tier.slots, gone)

    def _damage(self, slots: dict[int, tuple[Any, Page | None]], gone: dict[int, set[Key]]) -> None:
        for slot, (content, page) in slots.items():
            if page is not None and any(self._holds(page, content.group, gone.get(content.version, set()))):
                slots[slot] = content, Page(page.group, [None] * len(page.slots))
                self.damaged += 1

    def _holds(self, page: Page, number: int, keys: set[Key]) -> Iterator[bool]:
        """Two services may give one version to two pages: so the page is compared too."""
        for domain, group, digest in keys:
            num_tokens, text = self._texts.by_digest[domain, digest]
            yield group == number and Memory(self._texts.spec, {1: page}).holds(group, 1, num_tokens, text)


def _withdrawn(events: Iterable[CacheEvent]) -> set[tuple[int, Key]]:
    """Blocks with keys of launches that did not run: they never held this content, which other places may have."""
    return {
        (one.block, (one.domain, one.group, one.digest))
        for event in events
        if event.reason is RemoveReason.WITHDRAWN
        for one in entries(event)
    }
