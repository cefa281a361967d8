"""How an engine life begins on a replica: in slices, so that a large pool keeps no other replica waiting.

    the old life ends -> keys are proven -> what came back from a store is told -> the new life begins, in a moment

Until that moment nobody reads or writes. Work that was begun for a session which is gone waits, at no cost, until the
next session: with the same memory it is continued, otherwise it begins again with what is left of the old life.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field

from kvplane.base.errors import KvplaneError, LimitExceeded
from kvplane.base.session import OpenRequest
from kvplane.base.stamps import MAX_EPOCH
from kvplane.base.step import CacheEvent, EventKind
from kvplane_service.core.cache_events import CacheEvents
from kvplane_service.core.columns import are_equal
from kvplane_service.core.replica import Replica
from kvplane_service.core.retelling import MAX_HASHES
from kvplane_service.decisions.log import Life
from kvplane_service.replicas.events import EventLog, PublicationHold
from kvplane_service.replicas.recovery import Recovering
from kvplane_service.replicas.sessions import OnEnd
from kvplane_service.replicas.stamps import newest_epoch

Work = Generator[None]
Clock = Callable[[], int]  # nanoseconds, never going back

SLICE_NS = 5_000_000
_RUNS_PER_BATCH, _RUNS_FORGOTTEN = 64, 4
_DONE = object()


@dataclass(slots=True, eq=False)
class Opening:
    """A session that is being opened.

    Attributes:
        on_end: called once, with the reason, when the replica is taken from it.
        epoch: that begins with it, or goes on.
        work: what is left to do.
        ended: why it will not be the newest session.
        is_left: its caller is gone.
    """

    request: OpenRequest
    on_end: OnEnd
    epoch: int
    work: Work | None = None
    ended: KvplaneError | None = None
    is_left: bool = False

    @property
    def nonce(self) -> int:
        """Of the request."""
        return self.request.nonce

    def go_on(self) -> bool:
        """Do a slice of the work; whether there may be more."""
        if self.work is not None and next(self.work, _DONE) is _DONE:
            self.work = None
        return self.work is not None

    def end(self, reason: KvplaneError) -> None:
        """Tell the caller that it will not have the session."""
        self.ended = reason
        if not self.is_left:
            self.on_end(reason)

    def take_work(self, request: OpenRequest) -> Work | None:
        """What was begun here, if it is right for this request too; None: it was given up."""
        work, self.work = self.work, None
        mine, other = self.request, request
        if work is not None and (
            mine.incarnation != other.incarnation or not are_equal(mine.stamp_table, other.stamp_table)
        ):
            work.close()
            return None
        return work


def ignore_end(_: KvplaneError) -> None:
    """For sessions that find out with their next message."""


async def in_slices(go_on: Callable[[], bool], clock: Clock, waits: Callable[[], None] | None = None) -> None:
    """Do all of some work; after each SLICE_NS of it whatever else waits for the event loop has its turn.

    Args:
        go_on: does some, and says whether it is done.
        clock: to tell the time by.
        waits: is called before such a turn.
    """
    until_ns = clock() + SLICE_NS
    while not go_on():
        if clock() >= until_ns:
            if waits is not None:
                waits()
            await asyncio.sleep(0)
            until_ns = clock() + SLICE_NS


@dataclass(slots=True)
class _Loss:
    """Keys that went with a life that ends: runs of events, and of those looked at so far what others must see."""

    runs: list[CacheEvent] = field(default_factory=list)
    num_looked_at: int = 0
    shown: list[CacheEvent] = field(default_factory=list)


class EngineLives:
    """The engine lives of one replica.

    Attributes:
        opening: the session whose life begins, or began and was left.
        recovering: entries of a store that wait for the engine.
        recovered: what has become of them.
        kept_keys: that survived into the present life.
        lost: what went with the last one; to be let go of in pieces, since millions of digests at once take long.
    """

    def __init__(self, replica: Replica, events: EventLog, hold: PublicationHold, clock: Clock, num_ranks: int) -> None:
        self._clock = clock
        self._replica = replica
        self._events = events
        self._hold = hold
        self._num_ranks = num_ranks
        self._incarnation = 0  # of the page memory, 0 = no engine has named it
        self._loss = _Loss()
        self._came_back = False  # from a store, and others must be told
        self.opening: Opening | None = None
        self.recovering: Recovering | None = None
        self.recovered: Recovering | None = None
        self.kept_keys = 0
        self.lost: list[CacheEvent] = []

    @property
    def is_opening(self) -> bool:
        """Whether a session is being opened, and its caller waits."""
        return self.opening is not None and not self.opening.is_left

    def next_epoch(self, begun: int, request: OpenRequest) -> int:
        """Above every epoch that has begun, as far as this service, the memory and the store know.

        Raises LimitExceeded.
        """
        epoch = max(begun, request.owner_epoch, newest_epoch(request.stamp_table)) + 1
        if self.recovering is not None:
            epoch = max(epoch, self.recovering.epoch_above(self._replica, request.stamp_table))
        if epoch > MAX_EPOCH:
            raise LimitExceeded(f"there were {MAX_EPOCH} engine lives", remedy="register the replica anew")
        return epoch

    def begin(self, request: OpenRequest, began: Callable[[Life], None]) -> Work:
        """Begin the life of the present opening, whose memory is that of this request.

        `began` is called once nothing of it is missing but that others are told what was lost.
        """
        stored = self.recovering
        is_other = self._is_other(request.incarnation)
        # Of other memory, what its stamps say is of no page that is known here.
        stamp_table: Sequence[int] = () if is_other else request.stamp_table
        if stored is None:
            yield from self._replica.end_epoch(stamp_table)
        else:
            self._incarnation = request.incarnation
            self.recovering, self.recovered = None, stored
            stored.prove(self._replica, stamp_table, request.incarnation)
            self._came_back = self._replica.spec.events
            yield
        loss = self._loss
        loss.runs += self._replica.take_events().runs
        for run in loss.runs[loss.num_looked_at :]:
            loss.num_looked_at += 1
            loss.shown += self._hold.add(0, [run])
            yield
        if self._came_back:
            yield from self._announce()
            loss.shown.clear()  # the announcement was of what is left
        yield from self._show(loss)
        self._enter(stamp_table, is_other, began)

    def _is_other(self, incarnation: int) -> bool:
        """Whether this page memory is not the one that the last life named; who names none has the same one."""
        return 0 != incarnation != self._incarnation != 0

    def forget_some(self) -> bool:
        """Let go of some of what was lost; whether nothing is left."""
        del self.lost[-_RUNS_FORGOTTEN:]
        return not self.lost

    def _show(self, loss: _Loss) -> Work:
        """Tell those who follow what went, each key once."""
        if loss.shown and not self._replica.count_keys():
            loss.shown = [CacheEvent(EventKind.CLEARED)]
        while loss.shown:
            for _ in self._publish(loss.shown[:_RUNS_PER_BATCH]):
                pass
            del loss.shown[:_RUNS_PER_BATCH]
            yield

    def _enter(self, stamp_table: Sequence[int], is_other: bool, began: Callable[[Life], None]) -> None:
        opening, loss = self.opening, self._loss
        assert opening is not None, "a life begins with a session or a unary call"
        request, epoch, busy = opening.request, opening.epoch, opening.request.busy_blocks
        all_new = is_other and self._num_ranks == 1  # of several ranks, some may have the same pages as before
        self.kept_keys = self._replica.enter_epoch(epoch, stamp_table, busy, all_new)
        self._incarnation = request.incarnation or self._incarnation
        self._loss, self._came_back = _Loss(), False
        busy_lost = self._replica.take_events().runs
        loss.runs += busy_lost
        began(Life(epoch, stamp_table, CacheEvents(loss.runs), self._clock(), request.incarnation, busy, all_new))
        self.lost = loss.runs if len(loss.runs) > _RUNS_PER_BATCH else []
        for _ in self._publish(self._hold.begin_life(busy_lost)):
            pass

    def _announce(self) -> Work:
        """Tell those who follow what has come back, in place of what they knew."""
        yield from self._publish([CacheEvent(EventKind.CLEARED)])
        yield from self._publish(self._replica.retold())

    def _publish(self, events: Iterable[CacheEvent]) -> Work:
        """In batches of which each is a message."""
        assert self.opening is not None
        batch, num_hashes = list[CacheEvent](), 0
        for event in events:
            if batch and num_hashes + len(event.hashes) > MAX_HASHES:
                self._events.publish(self.opening.epoch, batch)
                batch, num_hashes = [], 0
                yield
            batch.append(event)
            num_hashes += len(event.hashes)
        self._events.publish(self.opening.epoch, batch)
