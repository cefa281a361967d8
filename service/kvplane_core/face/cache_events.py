"""The cache events (keys stored or removed) of one part of a step. Consecutive removals, and keys that are stored in
slots of a tier, are stored as columns.

With a full pool every allocation evicts a key, so a step may remove thousands of keys. Iteration makes one event per
removed key; most readers need only the columns, which `runs_of` returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from kvplane.base.groups import Medium
from kvplane.base.list_like import ListLike
from kvplane.base.step import CacheEvent, EventKind, RemoveReason
from kvplane_core.face.keys import Key


class CacheEvents(ListLike[CacheEvent]):
    """A sequence of events in the order in which they happened; iteration yields REMOVED events with one hash each.

    Attributes:
        runs: the same events; consecutive removals of one group, domain, reason and tier are joined into one.
    """

    __slots__ = ("_blocks", "_hashes", "_open", "runs")
    marks = 7  # those of events that are packed, see NativeEvents

    def __init__(self, runs: Iterable[CacheEvent] = ()) -> None:
        self.runs = list(runs)
        self._open: tuple[object, ...] | None = None  # of the last run, while further keys can join it
        self._hashes: list[bytes] = []
        self._blocks: list[int] = []

    def append(self, event: CacheEvent) -> None:
        """Append an event: STORED, CLEARED, or a REMOVED event with any number of hashes."""
        self.runs.append(event)
        self._open = None

    def removed(self, block: int, keys: Iterable[Key], reason: RemoveReason, tier: Medium = Medium.DEVICE) -> None:
        """Append one REMOVED event for keys of one block, or of one slot of a tier."""
        for domain, group, digest in keys:
            if self._open != (domain, group, reason, tier):
                self._open = domain, group, reason, tier
                self._begin(CacheEvent(EventKind.REMOVED, group, domain=domain, reason=reason, tier=tier))
            self._hashes.append(digest)
            self._blocks.append(block)

    def stored_in_tier(self, slot: int, key: Key, block_size: int, tier: Medium) -> None:
        """Append a key that a slot of a tier has now; consecutive keys of one group and domain are one STORED event."""
        domain, group, digest = key
        if self._open != (domain, group, tier):
            self._open = domain, group, tier
            self._begin(CacheEvent(EventKind.STORED, group, domain=domain, block_size=block_size, tier=tier))
        self._hashes.append(digest)
        self._blocks.append(slot)

    def removals(self) -> Sequence[int]:
        """Count the removed keys by the number of the reason."""
        counts = [0] * len(RemoveReason)
        for run in self.runs:
            if run.kind is EventKind.REMOVED:
                counts[run.reason] += len(run.hashes)
        return counts

    def _begin(self, run: CacheEvent) -> None:
        self._hashes, self._blocks = [], []
        self.runs.append(replace(run, hashes=self._hashes, blocks=self._blocks))

    def __iter__(self) -> Iterator[CacheEvent]:
        for run in self.runs:
            if run.kind is EventKind.REMOVED:
                for digest, block in zip(run.hashes, run.blocks, strict=True):
                    one = (digest,), (block,)
                    yield CacheEvent(run.kind, run.group, *one, run.domain, reason=run.reason, tier=run.tier)
            else:
                yield run

    def __len__(self) -> int:
        return sum(len(run.hashes) if run.kind is EventKind.REMOVED else 1 for run in self.runs)


def runs_of(events: Sequence[CacheEvent]) -> Sequence[CacheEvent]:
    """Return the events of a `CacheEvents` with consecutive removals joined (its `runs`); return any other sequence
    unchanged.
    """
    return events.runs if isinstance(events, CacheEvents) else events
