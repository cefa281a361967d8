"""The cache events (keys stored or removed) of one part of a step. Consecutive removals are stored as columns.

With a full pool every allocation evicts a key, so a step may remove thousands of keys. Iteration makes one event per
removed key; most readers need only the columns, which `runs_of` returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from kvplane.base.step import CacheEvent, EventKind, RemoveReason
from kvplane_service.core.keys import Key


class CacheEvents(Sequence[CacheEvent]):
    """A sequence of events in the order in which they happened; iteration yields REMOVED events with one hash each.

    Attributes:
        runs: the same events, with consecutive removals of one group, domain and reason joined into one CacheEvent.
    """

    __slots__ = ("_blocks", "_hashes", "_open", "runs")

    def __init__(self, runs: Iterable[CacheEvent] = ()) -> None:
        self.runs = list(runs)
        self._open: tuple[str, int, RemoveReason] | None = None  # of the last run, while further removals can join it
        self._hashes: list[bytes] = []
        self._blocks: list[int] = []

    def append(self, event: CacheEvent) -> None:
        """Append an event: STORED, CLEARED, or a REMOVED event with any number of hashes."""
        self.runs.append(event)
        self._open = None

    def removed(self, block: int, keys: Iterable[Key], reason: RemoveReason) -> None:
        """Append one REMOVED event for keys of one block."""
        for domain, group, digest in keys:
            if self._open != (domain, group, reason):
                self._open = domain, group, reason
                self._hashes, self._blocks = [], []
                run = CacheEvent(EventKind.REMOVED, group, self._hashes, self._blocks, domain, reason=reason)
                self.runs.append(run)
            self._hashes.append(digest)
            self._blocks.append(block)

    def __iter__(self) -> Iterator[CacheEvent]:
        for run in self.runs:
            if run.kind is EventKind.REMOVED:
                for digest, block in zip(run.hashes, run.blocks, strict=True):
                    yield CacheEvent(run.kind, run.group, (digest,), (block,), run.domain, reason=run.reason)
            else:
                yield run

    def __len__(self) -> int:
        return sum(len(run.hashes) if run.kind is EventKind.REMOVED else 1 for run in self.runs)

    @overload
    def __getitem__(self, at: int) -> CacheEvent: ...
    @overload
    def __getitem__(self, at: slice) -> list[CacheEvent]: ...
    def __getitem__(self, at: int | slice) -> CacheEvent | list[CacheEvent]:
        return list(self)[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


def runs_of(events: Sequence[CacheEvent]) -> Sequence[CacheEvent]:
    """Return the events of a `CacheEvents` with consecutive removals joined (its `runs`); return any other sequence
    unchanged.
    """
    return events.runs if isinstance(events, CacheEvents) else events
