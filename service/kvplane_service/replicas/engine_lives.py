"""Begins an engine life on a replica, in slices, so that a large pool does not delay other replicas.

    end the old life -> verify keys by the stamps -> publish what was recovered from a store -> enter the new life

Stamps are the version numbers of block contents, which the page memory has too. The replica cannot be read or written
until the new life is entered. If the session that waits for the new life disappears, the work pauses. The next session
continues this work if its page memory is the same; otherwise the work starts again with the remaining keys.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvplane.base.errors import KvplaneError, LimitExceeded
from kvplane.base.session import OpenRequest
from kvplane.base.stamps import MAX_EPOCH
from kvplane.base.step import CacheEvent, EventKind
from kvplane_core.face.cache_events import CacheEvents
from kvplane_core.face.columns import are_equal
from kvplane_core.face.entries import MAX_HASHES
from kvplane_core.face.interface import ReplicaCore
from kvplane_service.decisions.log import Life
from kvplane_service.replicas.events import EventLog, PublicationHold
from kvplane_service.replicas.recovery import Recovering
from kvplane_service.replicas.sessions import OnEnd
from kvplane_service.replicas.stamps import Contents, newest_epoch, shown_of

Work = Generator[None]
Clock = Callable[[], int]  # monotonic nanoseconds

SLICE_NS = 5_000_000
_RUNS_PER_BATCH, _RUNS_FORGOTTEN = 16, 4  # runs of removed keys that are published, and freed, in one slice
_DONE = object()


@dataclass(slots=True, eq=False)
class Opening:
    """A session that is being opened.

    Attributes:
        request: what the engine sent.
        on_end: called once, with the reason, when another session replaces this one.
        epoch: number of the engine life (epoch) that the session begins or resumes.
        work: the remaining work; None if none is left.
        ended: why the session will not be opened; None unless a newer session replaced it.
        is_left: whether the caller that opens the session no longer waits.
    """

    request: OpenRequest
    on_end: OnEnd
    epoch: int
    work: Work | None = None
    ended: KvplaneError | None = None
    is_left: bool = False

    @property
    def nonce(self) -> int:
        """The nonce (random number) of the session."""
        return self.request.nonce

    def go_on(self) -> bool:
        """Do a slice of the remaining work. Returns whether more work may be left."""
        if self.work is not None and next(self.work, _DONE) is _DONE:
            self.work = None
        return self.work is not None

    def end(self, reason: KvplaneError) -> None:
        """End the opening with `reason`; notify the caller if it still waits."""
        self.ended = reason
        if not self.is_left:
            self.on_end(reason)

    def take_work(self, request: OpenRequest) -> Work | None:
        """Return the remaining work if `request` has the same page memory; otherwise discard the work and
        return None.
        """
        work, self.work = self.work, None
        mine, other = self.request, request
        if work is not None and (
            Contents.named_by(mine) != Contents.named_by(other)
            or mine.busy_blocks != other.busy_blocks
            or not are_equal(mine.stamp_table, other.stamp_table)
        ):
            work.close()
            return None
        return work


def ignore_end(_: KvplaneError) -> None:
    """Do nothing: an `on_end` for sessions that get the reason of their end with the answer to their next message."""


async def in_slices(go_on: Callable[[], bool], clock: Clock, waits: Callable[[], None] | None = None) -> None:
    """Run work to its end, and let the event loop run other tasks after each SLICE_NS.

    Args:
        go_on: does a piece of the work; returns True once all work is done.
        clock: monotonic nanoseconds.
        waits: called each time before other tasks run.
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
    """The keys that are lost when an engine life ends.

    Attributes:
        runs: the REMOVED events of these keys.
        num_looked_at: how many of `runs` were passed to the PublicationHold, which decides what subscribers see.
        shown: the events that the PublicationHold returned, and that must still be published.
    """

    runs: list[CacheEvent] = field(default_factory=list)
    num_looked_at: int = 0
    shown: list[CacheEvent] = field(default_factory=list)


class EngineLives:
    """Begins the engine lives of one replica; an engine life is the time of one epoch.

    Attributes:
        opening: the session whose engine life is beginning; the caller that opens it may no longer wait.
        recovering: entries of a store that wait until an engine sends the stamps that verify them.
        recovered: the entries of `recovering` once they are verified.
        kept_keys: number of keys that were kept when the current life began.
        lost: events of keys that were lost when the current life began; freed in pieces, since freeing millions of
            digests takes long.
    """

    def __init__(
        self, replica: ReplicaCore, events: EventLog, hold: PublicationHold, clock: Clock, num_ranks: int
    ) -> None:
        self._clock = clock
        self._replica = replica
        self._events = events
        self._hold = hold
        self._num_ranks = num_ranks
        self._contents = Contents()  # what engines have stated
        self._loss = _Loss()
        self._came_back = False  # keys were recovered from a store, and subscribers were not notified yet
        self.opening: Opening | None = None
        self.recovering: Recovering | None = None
        self.recovered: Recovering | None = None
        self.kept_keys = 0
        self.lost: list[CacheEvent] = []

    @property
    def is_opening(self) -> bool:
        """Whether a session is being opened and its caller is waiting."""
        return self.opening is not None and not self.opening.is_left

    def next_epoch(self, begun: int, request: OpenRequest) -> int:
        """Return the lowest epoch above every epoch that this service, the page memory or the store has recorded.

        `begun`: the highest epoch that began on this replica, or that its page memory has shown. Raises LimitExceeded
        if all epochs are used.
        """
        begun = max(begun, request.owner_epoch)
        begun = max(begun, newest_epoch(request.stamp_table))
        if self.recovering is not None:
            shown = self.recovering.shown_by(request, self._replica.spec)
            epoch = self.recovering.epoch_above(self._replica, shown, begun)
        else:
            epoch = begun + 1
        if epoch > MAX_EPOCH:
            raise LimitExceeded(f"all {MAX_EPOCH} epochs are used", remedy="deregister and register the replica again")
        return epoch

    def begin(self, request: OpenRequest, began: Callable[[Life], None]) -> Work:
        """Begin the engine life of `opening` on the page memory of its request; yields after each slice of work.

        `began` is called when the life has begun; after that only the removals of lost keys are published.
        """
        stored, spec, now = self.recovering, self._replica.spec, Contents.named_by(request)
        is_other = not now.may_have_pages_of(self._contents)
        # The stamps of another memory describe other pages and host slots: they verify only keys of slots of disks.
        stamp_table = shown_of(request.stamp_table, spec, now, self._contents)
        if stored is None:
            yield from self._replica.end_epoch(stamp_table)
        else:
            self._contents = now.after(stored.contents)
            self.recovering, self.recovered = None, stored
            stored.prove(self._replica, stored.shown_by(request, spec))
            self._came_back = spec.events
            yield
        loss = self._loss
        loss.runs += self._replica.take_events().runs
        for run in loss.runs[loss.num_looked_at :]:
            loss.num_looked_at += 1
            loss.shown += self._hold.add(0, [run])
            yield
        if self._came_back:
            yield from self._announce(frozenset(request.busy_blocks))
            loss.shown.clear()  # the snapshot already excludes them
        yield from self._show(loss)
        self._enter(stamp_table, is_other, began)

    def continue_from(self, life: Life) -> None:
        """The replica continues an engine life that began elsewhere."""
        self._contents = Contents(life.incarnation, life.disk_incarnation).after(self._contents)
        self.recovering, self.kept_keys, self._loss, self._came_back = None, 0, _Loss(), False

    def forget_some(self) -> bool:
        """Free the memory of some of the events of lost keys. Returns whether none is left."""
        del self.lost[-_RUNS_FORGOTTEN:]
        return not self.lost

    def _show(self, loss: _Loss) -> Work:
        """Publish the removal of each lost key once, in slices; one CLEARED event if no key is left."""
        if loss.shown and not self._replica.count_keys() and not self._replica.tiers.has_keys:
            loss.shown = [CacheEvent(EventKind.CLEARED)]
            self._replica.tiers.take_events()  # of keys that this event has removed
        while loss.shown:
            for _ in self._publish(loss.shown[:_RUNS_PER_BATCH]):
                pass
            del loss.shown[:_RUNS_PER_BATCH]
            yield

    def _enter(self, stamp_table: Sequence[int], is_other: bool, began: Callable[[Life], None]) -> None:
        opening, loss = self.opening, self._loss
        assert opening is not None, "a life begins with a session or a unary call"
        request, epoch, busy = opening.request, opening.epoch, opening.request.busy_blocks
        all_new = is_other and self._num_ranks == 1  # with several ranks, some may have kept their pages
        self.kept_keys = self._replica.enter_epoch(epoch, stamp_table, busy, all_new)
        self._contents = Contents.named_by(request).after(self._contents)
        busy_lost = self._replica.take_events().runs
        loss.runs += busy_lost
        shown = [*self._hold.begin_life(busy_lost), *self._replica.tiers.take_events()]
        life = Life(epoch, stamp_table, CacheEvents(loss.runs), self._clock(), request.incarnation, busy, all_new)
        began(replace(life, disk_incarnation=self._contents.disks))
        self.lost = loss.runs if len(loss.runs) > _RUNS_PER_BATCH else []
        if not self._came_back:  # else the keys of busy blocks were not announced
            for _ in self._publish(shown):
                pass
        self._loss, self._came_back = _Loss(), False

    def _announce(self, busy: frozenset[int]) -> Work:
        """Publish all recovered keys except those of busy blocks: a load may overwrite these, and the life drops them.
        A CLEARED event comes first: subscribers then discard the keys that they have of the replica.
        """
        yield from self._publish([CacheEvent(EventKind.CLEARED)])
        announced = (_without(event, busy) for _, event in self._replica.stored_events())
        yield from self._publish(event for event in announced if event.hashes)
        yield from self._publish(self._replica.tiers.stored_events())

    def _publish(self, events: Iterable[CacheEvent]) -> Work:
        """Publish the events in batches that fit into a message; yields between batches."""
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


def _without(event: CacheEvent, blocks: frozenset[int]) -> CacheEvent:
    """Return a STORED event without the keys of these blocks."""
    if blocks.isdisjoint(event.blocks):
        return event
    kept = [at for at, block in enumerate(event.blocks) if block not in blocks]
    return replace(
        event,
        hashes=[event.hashes[at] for at in kept],
        blocks=[event.blocks[at] for at in kept],
        block_starts=[event.block_starts[at] for at in kept] if event.block_starts else (),
    )
