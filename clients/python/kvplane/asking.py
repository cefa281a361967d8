"""Whom unary calls and subscriptions ask, and when they ask again: without I/O, for both clients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from kvplane.base.errors import KvplaneError, Unavailable
from kvplane.calls import Call
from kvplane.driving import Pause, Work
from kvplane.events import EventBatch, Place
from kvplane.owners import Owners, Route
from kvplane.retry import Attempts, RetryPolicy

Answer = TypeVar("Answer", bound=Message)
C = TypeVar("C")


@dataclass(slots=True)
class Ask(Generic[C]):
    """The action of making one call at one service; comes to its answer."""

    channel: C
    call: Call[Any]


def asked(owners: Owners[C], call: Call[Answer], retry: RetryPolicy) -> Work[Ask[C] | Pause, Answer]:
    """The answer to a call: of the service that the list names now, or of the owner that it names; after Unavailable
    the next one is asked, unless the call must not be repeated.
    """
    attempts = Attempts(retry if call.repeatable else replace(retry, attempts=0))
    while True:
        route = Route(owners)
        try:
            while True:
                try:
                    answer: Answer = yield Ask(route.channel, call)
                    return answer
                except KvplaneError as failed:
                    route.after(failed)
        except Unavailable as failed:
            yield Pause(attempts.pause_s(failed))


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
