"""The cache events of a part. Consecutive removals are stored as columns and become single events on iteration.

With a full pool every allocation evicts, so a step may have thousands of removals. Most readers need only their
columns: `runs_of`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from kvplane.base.step import CacheEvent, EventKind, RemoveReason
from kvplane_service.core.keys import Key


class CacheEvents(Sequence[CacheEvent]):
    """Events in the order in which they happened. Iteration yields REMOVED events of one hash each.

    Attributes:
        runs: the same in order, with consecutive removals of one group, domain and reason as one CacheEvent.
    """

    __slots__ = ("_blocks", "_hashes", "_open", "runs")

    def __init__(self, runs: Iterable[CacheEvent] = ()) -> None:
        self.runs = list(runs)
        self._open: tuple[str, int, RemoveReason] | None = None  # of the last run, while further removals can join it
        self._hashes: list[bytes] = []
        self._blocks: list[int] = []

    def append(self, event: CacheEvent) -> None:
        """STORED, CLEARED, or a whole run of removals."""
        self.runs.append(event)
        self._open = None

    def removed(self, block: int, keys: Iterable[Key], reason: RemoveReason) -> None:
        """The block lost these keys."""
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
    """The events in runs; a list of single events is returned unchanged."""
    return events.runs if isinstance(events, CacheEvents) else events
