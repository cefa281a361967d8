"""What one replica shows of its prefix cache to others: numbered batches that a subscriber can resume.

    StepResult -> PublicationHold -> EventLog -> Subscription (a cursor into the log)

Only executed content is shown: what a step stored is held until the step has been executed. What is removed
is removed for others at once, because its page may be overwritten from now on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import islice

from kvplane.base.errors import InvalidArgument, KvplaneError, LimitExceeded
from kvplane.base.step import CacheEvent, EventKind

Wake = Callable[[], None]
_Key = tuple[int, str, bytes, int]
_EVENT_BYTES = 400  # what an event takes in memory, about
_HASH_BYTES = 160  # what each of its hashes takes: a digest, a block, a place


@dataclass(frozen=True, slots=True)
class Batch:
    """What the Events service sends at once; `seq` rises by one each.

    Attributes:
        gap: batches before this one are lost to the subscriber, who drops what it knows of the replica.
        withdrawn: the replica lapsed; its entries must not be used until `restored`.
        restored: the replica is back and its entries hold.
    """

    seq: int
    epoch: int
    events: tuple[CacheEvent, ...] = ()
    gap: bool = False
    withdrawn: bool = False
    restored: bool = False

    @property
    def num_bytes(self) -> int:
        """What it takes in memory, about."""
        return _EVENT_BYTES + sum(_EVENT_BYTES + len(event.hashes) * _HASH_BYTES for event in self.events)


@dataclass(slots=True, eq=False)
class _Stored:
    """A held STORED event and which of its hashes have gone since."""

    event: CacheEvent
    gone: set[int] = field(default_factory=set)

    def published(self) -> CacheEvent | None:
        """The event without the hashes that have gone; None when none is left."""
        if not self.gone:
            return self.event
        left = [at for at in range(len(self.event.hashes)) if at not in self.gone]
        if not left:
            return None
        event = self.event
        return replace(
            event,
            hashes=tuple(event.hashes[at] for at in left),
            blocks=tuple(event.blocks[at] for at in left),
            block_starts=tuple(event.block_starts[at] for at in left) if event.block_starts else (),
        )


class PublicationHold:
    """Holds what steps stored until they have been executed."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, _Stored]] = deque()
        self._by_key: dict[_Key, list[tuple[_Stored, int]]] = {}

    def add(self, seq: int, events: Iterable[CacheEvent]) -> list[CacheEvent]:
        """Take the events of step `seq`, in order; returns those that others must see at once.

        These are removals of published keys. A key that is removed while it is held is never shown.
        """
        at_once: list[CacheEvent] = []
        for event in events:
            if event.kind is EventKind.STORED:
                self._hold(seq, event)
            elif event.kind is EventKind.CLEARED:
                self.clear()
                at_once.append(event)
            elif not self._forget(event):
                at_once.append(event)
        return at_once

    def release(self, executed_through: int) -> list[CacheEvent]:
        """What may be shown now that all steps up to `executed_through` have been executed, in order."""
        shown: list[CacheEvent] = []
        while self._steps and self._steps[0][0] <= executed_through:
            _, stored = self._steps.popleft()
            self._unhold(stored)
            event = stored.published()
            if event is not None:
                shown.append(event)
        return shown

    def clear(self) -> None:
        """Forget everything that is held."""
        self._steps.clear()
        self._by_key.clear()

    def _hold(self, seq: int, event: CacheEvent) -> None:
        stored = _Stored(event)
        self._steps.append((seq, stored))
        for at, key in enumerate(_keys(event)):
            self._by_key.setdefault(key, []).append((stored, at))

    def _unhold(self, stored: _Stored) -> None:
        for at, key in enumerate(_keys(stored.event)):
            if at not in stored.gone:
                entries = self._by_key[key]
                entries.remove((stored, at))
                if not entries:
                    del self._by_key[key]

    def _forget(self, removed: CacheEvent) -> bool:
        """Take a removed key out of what is held; True when it was there."""
        found = [entry for key in _keys(removed) for entry in self._by_key.pop(key, ())]
        if not found:
            found = self._moved(removed)
        for stored, at in found:
            stored.gone.add(at)
        return bool(found)

    def _moved(self, removed: CacheEvent) -> list[tuple[_Stored, int]]:
        """A state's key moves to a copy of its page without a word: it is held under the block that it was told for."""
        for group, domain, digest, _ in _keys(removed):
            for key in self._by_key:
                if key[:3] == (group, domain, digest):
                    return self._by_key.pop(key)
        return []


def _keys(event: CacheEvent) -> list[_Key]:
    pairs = zip(event.hashes, event.blocks, strict=True)
    return [(event.group, event.domain, digest, block) for digest, block in pairs]


class EventLog:
    """The last batches of a replica, bounded by number and bytes, and who follows them."""

    def __init__(self, capacity: int, max_bytes: int, max_subscribers: int) -> None:
        self._batches: deque[Batch] = deque()
        self._capacity = capacity
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._max_subscribers = max_subscribers
        self._subscribers: set[Subscription] = set()
        self._last_seq = 0
        self._epoch = 0
        self._withdrawn = False
        self._withdrawn_before = False  # state before the oldest batch that is kept
        self.num_withdrawals = 0
        self.closed: KvplaneError | None = None

    @property
    def last_seq(self) -> int:
        """Number of the newest batch, 0 when there was none."""
        return self._last_seq

    @property
    def num_subscribers(self) -> int:
        """Who follows now."""
        return len(self._subscribers)

    @property
    def oldest_resumable(self) -> int:
        """The lowest `after_seq` that a subscriber can go on from without a gap."""
        return self._last_seq - len(self._batches)

    def publish(self, epoch: int, events: Iterable[CacheEvent]) -> None:
        """Append a batch of events, unless there are none."""
        shown = tuple(events)
        self._epoch = epoch
        if shown:
            self._append(Batch(self._last_seq + 1, epoch, shown))

    def withdraw(self) -> None:
        """Tell that the replica has lapsed; nothing when that is known."""
        if not self._withdrawn:
            self._withdrawn = True
            self.num_withdrawals += 1
            self._append(Batch(self._last_seq + 1, self._epoch, withdrawn=True))

    def restore(self) -> None:
        """Tell that the replica is back; nothing when it was not withdrawn."""
        if self._withdrawn:
            self._withdrawn = False
            self._append(Batch(self._last_seq + 1, self._epoch, restored=True))

    def subscribe(self, after_seq: int | None, wake: Wake) -> Subscription:
        """Follow the log behind batch `after_seq` (None: from now on). `wake` is called when there is
        something to take.

        Raises:
            InvalidArgument: `after_seq` has not been reached yet.
            LimitExceeded: too many subscribers.
            KvplaneError: the log has been closed.
        """
        if self.closed is not None:
            raise self.closed
        if len(self._subscribers) >= self._max_subscribers:
            raise LimitExceeded(
                f"the replica has {self._max_subscribers} subscribers",
                field="replica",
                remedy="end one, or raise max_subscribers",
            )
        if after_seq is not None and after_seq > self._last_seq:
            raise InvalidArgument(
                f"batch {after_seq} has not been reached, the last is {self._last_seq}",
                field="after_seq",
                remedy="leave it out after a restart of the service",
            )
        subscription = Subscription(self, self._opening(after_seq), wake)
        self._subscribers.add(subscription)
        return subscription

    def close(self, reason: KvplaneError) -> None:
        """End every subscription with `reason`, after what it has not taken yet."""
        self.closed = reason
        self._wake()

    def after(self, seq: int) -> list[Batch]:
        """The batches behind `seq`, which must be resumable."""
        start = seq - self.oldest_resumable
        assert start >= 0, (seq, self.oldest_resumable)
        return list(islice(self._batches, start, None))

    def discard(self, subscription: Subscription) -> None:
        """Forget a subscriber."""
        self._subscribers.discard(subscription)

    def _opening(self, after_seq: int | None) -> Batch:
        """What a subscriber has to know first; its number is where the subscriber goes on from."""
        if after_seq is None:
            return Batch(self._last_seq, self._epoch, withdrawn=self._withdrawn)
        if after_seq < self.oldest_resumable:
            return Batch(self.oldest_resumable, self._epoch, gap=True, withdrawn=self._withdrawn_before)
        return Batch(after_seq, self._epoch)

    def _append(self, batch: Batch) -> None:
        self._batches.append(batch)
        self._num_bytes += batch.num_bytes
        while len(self._batches) > self._capacity or (self._num_bytes > self._max_bytes and len(self._batches) > 1):
            self._drop_oldest()
        self._last_seq = batch.seq
        self._wake()

    def _drop_oldest(self) -> None:
        oldest = self._batches.popleft()
        self._num_bytes -= oldest.num_bytes
        self._withdrawn_before = oldest.withdrawn or (self._withdrawn_before and not oldest.restored)

    def _wake(self) -> None:
        for subscription in self._subscribers:
            subscription.wake()


class Subscription:
    """A cursor into a log. The log is the queue: who falls behind its oldest batch is too slow."""

    def __init__(self, log: EventLog, opening: Batch, wake: Wake) -> None:
        self._log = log
        self._seq = opening.seq
        self._opening = [opening] if opening.gap or opening.withdrawn else []
        self.wake = wake

    def take(self) -> list[Batch]:
        """All batches not taken yet; none when there is nothing new.

        Raises:
            LimitExceeded: batches that were not taken are no longer kept.
            KvplaneError: the log was closed and everything has been taken.
        """
        if self._seq < self._log.oldest_resumable:
            raise LimitExceeded(
                f"batch {self._seq + 1} is no longer kept: the subscriber is too slow",
                remedy=f"subscribe again with after_seq = {self._seq}, or raise events_resume and events_resume_bytes",
                metadata={"after_seq": str(self._seq)},
            )
        batches = self._opening + self._log.after(self._seq)
        self._opening = []
        if batches:
            self._seq = batches[-1].seq
        elif self._log.closed is not None:
            raise self._log.closed
        return batches

    def cancel(self) -> None:
        """Follow no longer."""
        self._log.discard(self)
