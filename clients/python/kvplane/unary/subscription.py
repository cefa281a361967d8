"""A subscription to cache events that survives broken streams and changes of service. Without I/O, for both clients."""

from __future__ import annotations

from dataclasses import replace
from typing import Generic, TypeVar

from kvplane.base.errors import InvalidArgument, KvplaneError, Unavailable
from kvplane.base.events import EventBatch
from kvplane.sansio.owners import Owners, Route
from kvplane.sansio.retry import Attempts, RetryPolicy

C = TypeVar("C")


class Position:
    """The position of a subscriber: the last batch that the subscriber received, and the service that sent this batch.

    Each service numbers its own batches. So after a change of service the position starts again at 0, and the next
    batch is marked as coming after a gap (`EventBatch.gap`).
    """

    def __init__(self, after_seq: int | None) -> None:
        """Start after batch `after_seq`; None = only batches from now on."""
        self._after_seq = after_seq
        self._source: object = None  # of the last batch; None before the first
        self._asked: object = None
        self._moved = False

    def seek(self, source: object) -> int | None:
        """Return the `after_seq` with which to subscribe at this service (`source`)."""
        if self._source is not None and source is not self._source:
            self._begin_again()
        self._asked = source
        return self._after_seq

    def pass_on(self, batch: EventBatch) -> EventBatch:
        """Record a batch from the service of the last `seek` and return the batch. After a change of service, `gap` of
        the returned batch is set.
        """
        gap, self._moved = batch.gap or self._moved, False
        self._after_seq, self._source = batch.seq, self._asked
        return replace(batch, gap=gap)

    def is_gone(self, refusal: KvplaneError) -> bool:
        """Return whether the service restarted and no longer has the batch of this position. If so, the position is set
        to 0.
        """
        gone = isinstance(refusal, InvalidArgument) and refusal.field == "after_seq" and self._source is not None
        if gone:
            self._begin_again()
        return gone

    def _begin_again(self) -> None:
        self._after_seq, self._source, self._moved = 0, None, True


class Feed(Generic[C]):
    """One subscription, over all the streams that it opens, one at a time."""

    def __init__(self, owners: Owners[C], retry: RetryPolicy, after_seq: int | None) -> None:
        self._owners, self._retry = owners, retry
        self._position = Position(after_seq)
        self._attempts, self._route = Attempts(retry), Route(owners)

    @property
    def channel(self) -> C:
        """The channel of the service to subscribe at."""
        return self._route.channel

    def seek(self) -> int | None:
        """Return the `after_seq` of the next subscription: the number of the last batch that the subscriber has."""
        return self._position.seek(self._route.channel)

    def take(self, batch: EventBatch) -> EventBatch:
        """Record a batch that arrived and return the batch for the subscriber, with `gap` set after a change of
        service.
        """
        self._attempts = Attempts(self._retry)
        self._route.hops = 0
        return self._position.pass_on(batch)

    def broken(self, failed: KvplaneError) -> float:
        """Return the seconds to wait before subscribing again. Raises `failed` if a retry cannot help."""
        if self._position.is_gone(failed):
            return 0.0
        try:
            self._route.after(failed)
        except Unavailable as away:
            self._route = Route(self._owners)
            return self._attempts.pause_s(away)
        return 0.0
