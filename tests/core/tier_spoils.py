"""What is evicted or reset must not be found again, in no copy: slots of tiers that hold it are spoilt.

Of an eviction the engine knows what it evicted by the keys that a subscriber has of the block. Final once the stamps of
its step are written; of a step whose stamps were never written, the slots hold what they held, and the next engine life
may send the evictions again, as clients do. Jobs in flight are left out: what they write counts only if its source did
not change meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from random import Random
from typing import Any

from kvplane.base.groups import Medium
from kvplane.base.step import Cache, Orders, Part, PartResult
from kvplane_core.face.entries import Entries
from tests.core.follower import Follower
from tests.core.page_memory import Page

Slot = tuple[int, int]  # tier and slot
_NOWHERE = 1 << 31  # a block that no replica has
Key = tuple[str, int, bytes]


def spread(parts: list[Part], rng: Random) -> list[Part]:
    """Move some of what the first part says of the cache into a last part: an engine may say it in any."""
    first, last = parts[0].cache, Cache()
    names = [("reset",), ("evicted",), ("loads_over",), ("costs_ns",), ("jobs_done", "jobs_failed", "jobs_before")]
    for group in names:
        if rng.random() < 0.5:
            for name in group:
                setattr(last, name, getattr(first, name))
                setattr(first, name, getattr(Cache(), name))
    return parts if last == Cache() else [*parts, Part(cache=last)]


def slots_of(core: Any) -> object:
    """What the service reads of the tiers."""
    tiers = core.tiers
    names = ("num_slots", "num_held", "num_shadows", "num_retained", "num_free", "hit_tokens", "uses")
    counts = [[getattr(tier, name) for name in names] for tier in tiers.each]
    return counts, tiers.counters, tiers.has_keys, tiers.open_jobs(), tiers.stored_events()


def holed(stored: Entries, rng: Random) -> Entries:
    """A copy without some records."""
    found, share = copy(stored), rng.choice([0.2, 0.5, 0.9])
    found.block = [_NOWHERE if rng.random() < share else block for block in stored.block]
    return found


def part_of(stored: Entries, first: int, lacks_slots: bool) -> Entries:
    """A copy without the records of blocks, or of slots, whose ids are at least `first`."""
    found = copy(stored)
    found.block = [_NOWHERE if (block >= first) == lacks_slots else block for block in stored.block]
    return found


def shown_of(follower: Follower, blocks: set[int]) -> dict[int, frozenset[Key]]:
    """The keys that a subscriber has of each of these blocks."""
    keys: dict[int, set[Key]] = {block: set() for block in blocks}
    for one in follower.view if blocks else ():
        if one.tier is Medium.DEVICE and one.block in blocks:
            keys[one.block].add((one.domain, one.group, one.digest))
    return {block: frozenset(some) for block, some in keys.items()}


class Hidden:
    """What pages hold although a store has lost it: by block, the stamp and the keys of earlier engine lives."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, frozenset[Key]]] = {}

    def note(self, shown: dict[int, frozenset[Key]], stamps: Sequence[int]) -> None:
        """An engine life, in which these keys were shown, has ended. A stamp of 0 means that the page is lost."""
        self._seen |= {block: (stamps[block], keys) for block, keys in shown.items() if keys and stamps[block]}

    def keys(self, given: Sequence[int], stamps: Sequence[int]) -> dict[int, frozenset[Key]]:
        """Those of pages that are as they were, and that the core never knew: it has `given` them no stamp."""
        self._seen = {block: one for block, one in self._seen.items() if stamps[block] == one[0]}
        return {block: keys for block, (_, keys) in self._seen.items() if not given[block]}


class Spoils:
    """The slots that were spoilt in an engine life.

    Attributes:
        lost: blocks with their keys, whose eviction no rank has carried out; the next engine life may repeat it.
    """

    def __init__(self, slots: dict[Slot, tuple[int, Page]], tokens_of: Callable[[str, bytes], int]) -> None:
        """`tokens_of` says how long the prefix is that a digest of a domain stands for."""
        self._slots, self._tokens_of = slots, tokens_of
        self._keys: dict[int, frozenset[Key]] = {}  # by version: that of all that the saved page held
        self._gone: list[tuple[int, Slot, tuple[int, Page]]] = []  # step, slot, what it held
        self._evicted: list[tuple[int, int, frozenset[Key]]] = []  # step, block, keys
        self.lost: dict[int, frozenset[Key]] = {}
        self.count = 0

    def keys_of(self, parts: Sequence[Part], follower: Follower) -> dict[int, frozenset[Key]]:
        """The keys of all blocks that the step evicts, before it is sent."""
        keys = shown_of(follower, {block for part in parts for block in part.cache.evicted})
        return {block: some | self.lost.get(block, frozenset()) for block, some in keys.items()}

    def copied(self, keys: frozenset[Key]) -> bool:
        """Whether a slot holds what was saved from a page with one of these keys."""
        return any(keys.intersection(self._keys.get(version, ())) for version, _ in self._slots.values())

    def ordered(self, orders: Orders, follower: Follower) -> None:
        """Jobs that write slots: what their versions will hold.

        A page with keys of prefixes that end inside it is named by the longest one: evicting another block, which holds
        such a prefix and no more, evicts no copy of this page.
        """
        keys = shown_of(follower, set(orders.save_block))
        for job, block in zip(orders.save_job, orders.save_block, strict=True):
            longest = max((self._tokens_of(domain, digest) for domain, _, digest in keys[block]), default=0)
            named = (one for one in keys[block] if self._tokens_of(one[0], one[2]) == longest)
            self._keys[job] = frozenset(named)
        for job, version in zip(orders.move_job, orders.move_version, strict=True):
            self._keys[job] = self._keys.get(version, frozenset())

    def answered(
        self, seq: int, parts: Sequence[Part], results: Sequence[PartResult], keys: dict[int, frozenset[Key]]
    ) -> Iterable[Key]:
        """What the step has evicted: of a block that an earlier part gave away, something else."""
        given = set[int]()
        for part, result in zip(parts, results, strict=True):
            for block in set(part.cache.evicted) - given:
                self._evicted.append((seq, block, keys[block]))
                yield from keys[block]
            given.update(result.orders.stamp_block)

    def spoil(self, seq: int, keys: Iterable[Key], was_reset: bool, flying: set[int]) -> None:
        """The slots with this content, or all, hold garbage under the version that they had."""
        keys = set(keys)
        if not keys and not was_reset:
            return
        for slot, held in list(self._slots.items()):
            version, page = held
            if version not in flying and (was_reset or keys.intersection(self._keys.get(version, ()))):
                self._gone.append((seq, slot, held))
                self._slots[slot] = version, Page(page.group, [None] * len(page.slots))
                self.count += 1

    def has_open(self, stamped: int) -> bool:
        """Whether no rank has carried out an eviction of this life that had keys."""
        return any(seq > stamped and keys for seq, _, keys in self._evicted)

    def die(self, stamped: int) -> None:
        """The engine life has ended: what no rank has carried out is as it was."""
        for seq, slot, held in self._gone:
            now = self._slots.get(slot)
            if seq > stamped and now is not None and now[0] == held[0]:
                self._slots[slot] = held
        self.lost = {block: keys for seq, block, keys in self._evicted if seq > stamped and keys}
        self._gone, self._evicted = [], []
