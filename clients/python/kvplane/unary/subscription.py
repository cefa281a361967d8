"""A subscription to cache events that survives broken streams and changes of service: without I/O, for both clients."""

from __future__ import annotations

from dataclasses import replace
from typing import Generic, TypeVar

from kvplane.base.errors import InvalidArgument, KvplaneError, Unavailable
from kvplane.base.events import EventBatch
from kvplane.sansio.owners import Owners, Route
from kvplane.sansio.retry import Attempts, RetryPolicy

C = TypeVar("C")


class Position:
    """A subscriber's position. Each service numbers batches itself: after a change of service the position is reset,
    and the next batch is marked with a gap.
    """

    def __init__(self, after_seq: int | None) -> None:
        """`after_seq`: the last batch already known; None = only batches from now on."""
        self._after_seq = after_seq
        self._source: object = None  # of the last batch; None before the first
        self._asked: object = None
        self._moved = False

    def seek(self, source: object) -> int | None:
        """The `after_seq` for a subscription at this source."""
        if self._source is not None and source is not self._source:
            self._begin_again()
        self._asked = source
        return self._after_seq

    def pass_on(self, batch: EventBatch) -> EventBatch:
        """Record a batch of the source that `seek` was last called for; returns it, with a gap after a reset."""
        gap, self._moved = batch.gap or self._moved, False
        self._after_seq, self._source = batch.seq, self._asked
        return replace(batch, gap=gap)

    def is_gone(self, refusal: KvplaneError) -> bool:
        """Whether the source restarted, so that it does not have the position, which is then reset to 0."""
        gone = isinstance(refusal, InvalidArgument) and refusal.field == "after_seq" and self._source is not None
        if gone:
            self._begin_again()
        return gone

    def _begin_again(self) -> None:
        self._after_seq, self._source, self._moved = 0, None, True


class Feed(Generic[C]):
    """One subscription over all its streams."""

    def __init__(self, owners: Owners[C], retry: RetryPolicy, after_seq: int | None) -> None:
        self._owners, self._retry = owners, retry
        self._position = Position(after_seq)
        self._attempts, self._route = Attempts(retry), Route(owners)

    @property
    def channel(self) -> C:
        """The channel to subscribe at."""
        return self._route.channel

    def seek(self) -> int | None:
        """The `after_seq` of the next subscription."""
        return self._position.seek(self._route.channel)

    def take(self, batch: EventBatch) -> EventBatch:
        """Record a batch that arrived; returns it as the subscriber receives it."""
        self._attempts = Attempts(self._retry)
        self._route.hops = 0
        return self._position.pass_on(batch)

    def broken(self, failed: KvplaneError) -> float:
        """Seconds to wait before subscribing again. Raises `failed` when a retry cannot help."""
        if self._position.is_gone(failed):
            return 0.0
        try:
            self._route.after(failed)
        except Unavailable as away:
            self._route = Route(self._owners)
            return self._attempts.pause_s(away)
        return 0.0
