"""What a subscriber of cache events gets."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvplane.base.errors import InvalidArgument, KvplaneError
from kvplane.base.step import CacheEvent


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The published events of one step of a replica.

    Attributes:
        seq: number of the batch, +1 each; subscribe again after it.
        epoch: engine life.
        events: in order.
        gap: batches before this one are lost; drop what is known of the replica.
        withdrawn: the replica lapsed; do not route by its entries until `restored`.
        restored: the replica is back and its entries hold.
    """

    seq: int
    epoch: int
    events: tuple[CacheEvent, ...]
    gap: bool = False
    withdrawn: bool = False
    restored: bool = False


class Place:
    """How far a subscriber is. Services count on their own: behind a move it begins again, and says that with a gap."""

    def __init__(self, after_seq: int | None) -> None:
        """`after_seq` is where the subscriber begins; None = from now on."""
        self._after_seq = after_seq
        self._source: object = None  # who told the last batch; None before the first
        self._asked: object = None
        self._moved = False

    def seek(self, source: object) -> int | None:
        """Where to go on with this source of batches."""
        if self._source is not None and source is not self._source:
            self._begin_again()
        self._asked = source
        return self._after_seq

    def pass_on(self, batch: EventBatch) -> EventBatch:
        """Take a batch of the source."""
        gap, self._moved = batch.gap or self._moved, False
        self._after_seq, self._source = batch.seq, self._asked
        return replace(batch, gap=gap)

    def is_gone(self, refusal: KvplaneError) -> bool:
        """Whether the source was started anew, so that the place is not known there; it is 0 then."""
        gone = isinstance(refusal, InvalidArgument) and refusal.field == "after_seq" and self._source is not None
        if gone:
            self._begin_again()
        return gone

    def _begin_again(self) -> None:
        self._after_seq, self._source, self._moved = 0, None, True
