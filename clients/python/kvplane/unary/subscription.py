"""A subscription to cache events through broken streams, and from service to service: without I/O, for both clients."""

from __future__ import annotations

from dataclasses import replace
from typing import Generic, TypeVar

from kvplane.base.errors import InvalidArgument, KvplaneError, Unavailable
from kvplane.base.events import EventBatch
from kvplane.sansio.owners import Owners, Route
from kvplane.sansio.retry import Attempts, RetryPolicy

C = TypeVar("C")


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


class Feed(Generic[C]):
    """A subscription through broken streams, and from service to service."""

    def __init__(self, owners: Owners[C], retry: RetryPolicy, after_seq: int | None) -> None:
        self._owners, self._retry = owners, retry
        self._place = Place(after_seq)
        self._attempts, self._route = Attempts(retry), Route(owners)

    @property
    def channel(self) -> C:
        """Whom to ask now."""
        return self._route.channel

    def seek(self) -> int | None:
        """The batch after which to subscribe there."""
        return self._place.seek(self._route.channel)

    def take(self, batch: EventBatch) -> EventBatch:
        """A batch has come."""
        self._attempts = Attempts(self._retry)
        self._route.hops = 0
        return self._place.pass_on(batch)

    def broken(self, failed: KvplaneError) -> float:
        """How long to wait before it is asked again; raises `failed` where that is of no use."""
        if self._place.is_gone(failed):
            return 0.0
        try:
            self._route.after(failed)
        except Unavailable as away:
            self._route = Route(self._owners)
            return self._attempts.pause_s(away)
        return 0.0
