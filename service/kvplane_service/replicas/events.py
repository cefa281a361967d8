"""Cache events of one replica, in numbered batches, after each of which a subscriber can resume.

    StepResult -> PublicationHold -> EventLog -> Subscription (a cursor into the log)

Only executed content is published: STORED events are held until their step has been executed. REMOVED events are
published at once, because the page may be overwritten from now on.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias, cast

from kvplane.base.errors import InvalidArgument, KvplaneError, LimitExceeded
from kvplane.base.step import CacheEvent, EventKind, Step
from kvplane_core.face.cache_events import CacheEvents, runs_of
from kvplane_service.decisions.packed_log import LogBudget, PackedLog
from kvplane_service.decisions.packing import Packing, pack_events, unpack_events

if TYPE_CHECKING:
    from kvplane_core.face.native.views import NativeEvents, NativeTierEvents

Wake = Callable[[], None]
Share: TypeAlias = "tuple[NativeEvents, int, int]"  # see `NativeEvents.pack`
_EVER = 1 << 63  # above every step number
_HEAD = struct.Struct("<BQ")  # head of a packed batch: flags and epoch
_GAP, _WITHDRAWN, _RESTORED = 1, 2, 4
_STORED_EVENTS, _OTHER_EVENTS, _CONCERNS_HELD = 1, 2, 4  # marks of a part's events


@dataclass(frozen=True, slots=True)
class Batch:
    """One message of the Events service; `seq` increases by one per batch.

    Attributes:
        gap: earlier batches are lost; the subscriber must discard all keys that it has of the replica.
        withdrawn: the lease of the replica's session lapsed; its keys must not be used until a batch with `restored`.
        restored: the replica is live again and its keys are valid.
    """

    seq: int
    epoch: int
    events: Sequence[CacheEvent] = ()
    gap: bool = False
    withdrawn: bool = False
    restored: bool = False

    @property
    def bits(self) -> int:
        """The flags of the batch, packed into an integer."""
        return self.gap * _GAP | self.withdrawn * _WITHDRAWN | self.restored * _RESTORED

    def pack(self) -> Packing[bytes]:
        """Return the batch as bytes, without its number; yields between pieces of a long batch."""
        return _HEAD.pack(self.bits, self.epoch) + (yield from pack_events(self.events))

    @classmethod
    def unpack(cls, seq: int, raw: bytes) -> Batch:
        """Return the batch with this number from the bytes that `pack` returned."""
        bits, epoch = _HEAD.unpack_from(raw)
        events = unpack_events(raw, _HEAD.size)
        return cls(seq, epoch, events, bool(bits & _GAP), bool(bits & _WITHDRAWN), bool(bits & _RESTORED))


class _Stored:
    """A STORED event that is held until its step is executed, with the hashes that were removed since."""

    __slots__ = ("_at", "event", "gone")

    def __init__(self, event: CacheEvent) -> None:
        self.event = event
        self.gone: set[int] = set()
        self._at: dict[tuple[int, bytes], int] = {}  # built when it is first asked for

    def forget(self, removed: CacheEvent, block: int, digest: bytes) -> bool:
        """Remove a key from the event. Returns False if the event does not have this key."""
        event = self.event
        if event.group != removed.group or event.domain != removed.domain:
            return False
        at = self._index().pop((block, digest), -1)
        if at >= 0:
            self.gone.add(at)
        return at >= 0

    def left(self) -> CacheEvent | None:
        """Return the event without the removed hashes; None if no hash is left."""
        event = self.event
        if not self.gone:
            return event
        return next(iter(part_of(event, [at for at in range(len(event.hashes)) if at not in self.gone])), None)

    def has(self, block: int, digest: bytes, of: CacheEvent) -> bool:
        """Return whether the event still has a key, whose group and domain are those of another event."""
        event = self.event
        return event.group == of.group and event.domain == of.domain and (block, digest) in self._index()

    def _index(self) -> dict[tuple[int, bytes], int]:
        if not self._at and not self.gone:
            self._at = {pair: at for at, pair in enumerate(zip(self.event.blocks, self.event.hashes, strict=True))}
        return self._at


def part_of(event: CacheEvent, kept: Sequence[int]) -> list[CacheEvent]:
    """Return the event with only some of its keys, by their indexes; [] without any."""
    if len(kept) == len(event.hashes):
        return [event]
    if not kept:
        return []
    hashes, blocks = tuple(event.hashes[at] for at in kept), tuple(event.blocks[at] for at in kept)
    starts = tuple(event.block_starts[at] for at in kept) if event.block_starts else ()
    return [replace(event, hashes=hashes, blocks=blocks, block_starts=starts)]


class PublicationHold:
    """Holds STORED events until their steps have been executed; works on runs of events (`cache_events`).

    The core reports every change of a block's keys, moves included: a key is stored only in a block that does not have
    the key, and removed only from a block that has it. So if the STORED event of a removed key is still held, neither
    event is published; otherwise the key was published, and its removal is published too.
    """

    def __init__(self) -> None:
        self._packed: deque[tuple[int, NativeEvents]] = deque()  # their STORED events are held, later than all others
        self._has_others = False  # events that are held may be unknown to the core, which marks no event for them
        self._steps: deque[tuple[int, _Stored]] = deque()
        self._held: dict[int, tuple[_Stored, ...]] = {}  # by block: held STORED events with a key of the block

    def step(self, seq: int, executed_through: int, parts: Iterable[Sequence[CacheEvent]]) -> list[CacheEvent]:
        """Process the events of the parts of step `seq`, which reports `executed_through`. Returns the events to
        publish now, in order.
        """
        shown = self.release(executed_through)
        self._has_others = self._has_others and bool(self._steps)
        for events in parts:
            if self._has_others or not isinstance(events, CacheEvents) or events.marks & _CONCERNS_HELD:
                shown += self._add(seq, runs_of(events))
                continue
            shown += [run for run in events.runs if run.kind is not EventKind.STORED]
            if events.marks & _STORED_EVENTS:
                self._packed.append((seq, cast("NativeEvents", events)))
        return shown

    def step_packed(self, seq: int, executed_through: int, parts: Iterable[Sequence[CacheEvent]]) -> list[Share] | None:
        """Process the events of the parts of a step as `step` does, without reading them, where a compiled core has
        marked that this is enough: no event of the step concerns a held one. Returns what to publish, as
        `NativeEvents.pack` takes it, or None and changes nothing.
        """
        if self._steps and (self._has_others or self._steps[0][0] <= executed_through):
            return None
        packed: list[NativeEvents] = []
        for events in parts:
            if events:
                if getattr(events, "marks", _CONCERNS_HELD) & _CONCERNS_HELD:
                    return None
                packed.append(cast("NativeEvents", events))
        self._has_others, shown, waiting = False, [], self._packed
        while waiting and waiting[0][0] <= executed_through:
            shown.append((waiting.popleft()[1], _STORED_EVENTS, 0))
        for of_part in packed:
            if of_part.marks & _OTHER_EVENTS:
                shown.append((of_part, _OTHER_EVENTS, 0))
            if of_part.marks & _STORED_EVENTS:
                waiting.append((seq, of_part))
        return shown

    def begin_life(self, events: Iterable[CacheEvent]) -> list[CacheEvent]:
        """Process the removals with which an engine life begins.

        Returns the events to publish: the removals, and all STORED events that are still held, because the remaining
        keys are verified.
        """
        return [*self.add(0, events), *self.release(_EVER)]

    def clear(self) -> None:
        """Forget all held events: their keys are not those of the replica any more."""
        self._packed.clear()
        self._steps.clear()
        self._held.clear()

    def add(self, seq: int, events: Iterable[CacheEvent]) -> list[CacheEvent]:
        """Process the events of step `seq`, in order. Returns the events to publish at once: removals of published
        keys.

        A key that is removed while its STORED event is held is never published.
        """
        self._has_others = True
        return self._add(seq, events)

    def _add(self, seq: int, events: Iterable[CacheEvent]) -> list[CacheEvent]:
        at_once: list[CacheEvent] = []
        self._unpack()
        for event in events:
            if event.kind is EventKind.STORED:
                self._hold(seq, event)
            elif event.kind is EventKind.CLEARED:
                self.clear()
                at_once.append(event)
            elif self._held.keys().isdisjoint(event.blocks):
                at_once.append(event)
            else:
                at_once.extend(self._forget(event))
        return at_once

    def release(self, executed_through: int) -> list[CacheEvent]:
        """Remove and return, in order, the held events of steps up to `executed_through`, which are now published."""
        shown: list[CacheEvent] = []
        while self._steps and self._steps[0][0] <= executed_through:
            stored = self._steps.popleft()[1]
            for at, block in enumerate(stored.event.blocks):
                if at not in stored.gone:
                    self._unhold(block, stored)
            event = stored.left()
            if event is not None:
                shown.append(event)
        while self._packed and self._packed[0][0] <= executed_through:
            shown += [run for run in self._packed.popleft()[1].runs if run.kind is EventKind.STORED]
        return shown

    def without_held(self, event: CacheEvent) -> list[CacheEvent]:
        """Return a STORED event without the keys whose STORED event is held: the core may have published them, where
        they moved from another block.
        """
        self._unpack()
        held = self._held
        if held.keys().isdisjoint(event.blocks):
            return [event]
        kept = [
            at
            for at, (block, digest) in enumerate(zip(event.blocks, event.hashes, strict=True))
            if not any(one.has(block, digest, event) for one in held.get(block, ()))
        ]
        return part_of(event, kept)

    def _unpack(self) -> None:
        """Read the events that are held as they came."""
        while self._packed:
            seq, events = self._packed.popleft()
            for event in events.runs:
                if event.kind is EventKind.STORED:
                    self._hold(seq, event)

    def _hold(self, seq: int, event: CacheEvent) -> None:
        stored = _Stored(event)
        self._steps.append((seq, stored))
        if self._held.keys().isdisjoint(event.blocks):
            self._held.update(dict.fromkeys(event.blocks, (stored,)))
        else:
            for block in event.blocks:
                self._held[block] = (*self._held.get(block, ()), stored)

    def _unhold(self, block: int, stored: _Stored) -> None:
        held = self._held[block]
        if len(held) == 1:
            del self._held[block]
        else:
            self._held[block] = tuple(one for one in held if one is not stored)

    def _forget(self, removed: CacheEvent) -> list[CacheEvent]:
        """Remove keys from held events. Returns a REMOVED event for the other keys, which were published already."""
        shown = []
        for digest, block in zip(removed.hashes, removed.blocks, strict=True):
            stored = next((one for one in self._held.get(block, ()) if one.forget(removed, block, digest)), None)
            if stored is None:
                shown.append((digest, block))
            else:
                self._unhold(block, stored)
        hashes, blocks = [digest for digest, _ in shown], [block for _, block in shown]
        return [replace(removed, hashes=hashes, blocks=blocks)] if shown else []


class EventLog(PackedLog[Batch, bytes]):
    """The last event batches of one replica, and their subscribers. Batches are stored packed, within a
    memory budget.

    Attributes:
        is_withdrawn: whether the replica's keys must not be used, as the newest batches state; read only.
    """

    def __init__(self, max_batches: int, budget: LogBudget, max_subscribers: int) -> None:
        super().__init__(max_batches, budget)
        self._max_subscribers = max_subscribers
        self._subscribers: dict[Subscription, None] = {}
        self._last_seq = 0
        self._epoch = 0
        self.is_withdrawn = False
        self._withdrawn_before = False  # state before the oldest kept batch
        self.num_withdrawals = 0
        self.closed: KvplaneError | None = None

    @property
    def last_seq(self) -> int:
        """Number of the newest batch; 0 before the first batch."""
        return self._last_seq

    @property
    def num_subscribers(self) -> int:
        """Number of current subscribers."""
        return len(self._subscribers)

    @property
    def oldest_resumable(self) -> int:
        """The lowest batch number after which a subscriber can continue without a gap."""
        return self._last_seq - len(self)

    def publish(self, epoch: int, events: Iterable[CacheEvent]) -> None:
        """Append a batch with these events; does nothing if there are none."""
        shown = CacheEvents(events)
        self._epoch = epoch
        if shown.runs:
            self._append(Batch(self._last_seq + 1, epoch, shown))

    def publish_step(
        self,
        hold: PublicationHold,
        step: Step,
        events: Sequence[Sequence[CacheEvent]],
        tier_events: Sequence[Sequence[CacheEvent]],
    ) -> None:
        """Publish what an applied step changed: the parts in their order, and of each the device before the tiers.

        So a reset of the device, which clears the tiers too, is published behind what earlier parts stored in tiers;
        within a part it takes back what tiers stored before. What tiers store is executed, and waits for nothing.
        """
        of_tiers = [of_part for of_part in tier_events if of_part]
        if all(hasattr(of_part, "shares") for of_part in of_tiers):
            shares = hold.step_packed(step.seq, step.executed_through, events)
            if shares is not None:  # without a CLEARED event, so in any order
                for of_part in of_tiers:
                    shares += cast("NativeTierEvents", of_part).shares()
                self.publish_packed(step.epoch, shares)
                return
        shown: list[CacheEvent] = []
        for of_device, of_part in zip(events, tier_events, strict=True):
            shown += hold.step(step.seq, step.executed_through, [of_device])
            shown += of_part
        self.publish(step.epoch, shown)

    def publish_packed(self, epoch: int, shares: Sequence[Share]) -> None:
        """Append a batch with events that stay packed, see `NativeEvents.pack`; does nothing if there are none."""
        self._epoch = epoch
        if shares:
            self._keep(shares[0][0].pack(_HEAD.pack(0, epoch), shares))
            self._last_seq += 1
            self._wake()

    def withdraw(self) -> None:
        """Publish that the lease of the replica's session has lapsed; does nothing if this was published already."""
        if not self.is_withdrawn:
            self.is_withdrawn = True
            self.num_withdrawals += 1
            self._append(Batch(self._last_seq + 1, self._epoch, withdrawn=True))

    def restore(self) -> None:
        """Publish that the replica is live again; does nothing unless `withdraw` was published last."""
        if self.is_withdrawn:
            self.is_withdrawn = False
            self._append(Batch(self._last_seq + 1, self._epoch, restored=True))

    def subscribe(self, after_seq: int | None, wake: Wake) -> Subscription:
        """Subscribe to the batches after number `after_seq`, or only to new batches if `after_seq` is None.

        `wake` is called when batches are available.

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
                remedy="end a subscription, or raise max_subscribers",
            )
        if after_seq is not None and after_seq > self._last_seq:
            raise InvalidArgument(
                f"{after_seq} is above the last batch, {self._last_seq}",
                field="after_seq",
                remedy="omit it after a restart of the service",
            )
        subscription = Subscription(self, self._opening(after_seq), wake)
        self._subscribers[subscription] = None
        return subscription

    def close(self, reason: KvplaneError) -> None:
        """End every subscription with `reason`, each one once it has taken the remaining batches."""
        self.closed = reason
        self.leave_budget()
        self._wake()

    def after(self, seq: int, at_most: int | None = None) -> list[Batch]:
        """Return the batches after number `seq`, which must be at least `oldest_resumable`; at most `at_most`."""
        start = seq - self.oldest_resumable
        assert start >= 0, (seq, self.oldest_resumable)
        stop = None if at_most is None else start + at_most
        return [
            Batch.unpack(number, kept) if isinstance(kept, bytes) else kept
            for number, kept in enumerate(islice(self._kept, start, stop), seq + 1)
        ]

    def discard(self, subscription: Subscription) -> None:
        """Remove a subscriber."""
        self._subscribers.pop(subscription, None)

    def _opening(self, after_seq: int | None) -> Batch:
        """Return the first batch for a new subscriber; the next batch of the log has the number after it."""
        if after_seq is None:
            return Batch(self._last_seq, self._epoch, withdrawn=self.is_withdrawn)
        if after_seq < self.oldest_resumable:
            return Batch(self.oldest_resumable, self._epoch, gap=True, withdrawn=self._withdrawn_before)
        return Batch(after_seq, self._epoch)

    def _append(self, batch: Batch) -> None:
        self._keep(batch)
        self._last_seq = batch.seq
        self._wake()

    def _pack(self, entry: Batch) -> Packing[bytes]:
        return entry.pack()

    def _dropped(self, entry: Batch | bytes) -> None:
        bits = _HEAD.unpack_from(entry)[0] if isinstance(entry, bytes) else entry.bits
        self._withdrawn_before = bool(bits & _WITHDRAWN or (self._withdrawn_before and not bits & _RESTORED))

    def _wake(self) -> None:
        for subscription in self._subscribers:
            subscription.wake()


class Subscription:
    """The position of one subscriber in an event log. A subscriber that needs a batch which is no longer kept
    is ended.
    """

    def __init__(self, log: EventLog, opening: Batch, wake: Wake) -> None:
        self._log = log
        self._seq = opening.seq
        self._opening = [opening] if opening.gap or opening.withdrawn else []
        self.wake = wake

    def take(self, at_most: int | None = None) -> list[Batch]:
        """Return the next batches, at most `at_most`; an empty list if there is nothing new.

        Raises:
            LimitExceeded: the next batch is no longer kept.
            KvplaneError: the log was closed and all batches have been taken.
        """
        if self._seq < self._log.oldest_resumable:
            raise LimitExceeded(
                f"batch {self._seq + 1} is no longer kept: the subscriber is too slow",
                remedy=f"subscribe again with after_seq = {self._seq}, or raise events_resume and log_bytes",
                metadata={"after_seq": str(self._seq)},
            )
        batches = self._opening + self._log.after(self._seq, at_most)
        self._opening = []
        if batches:
            self._seq = batches[-1].seq
        elif self._log.closed is not None:
            raise self._log.closed
        return batches

    def cancel(self) -> None:
        """End the subscription."""
        self._log.discard(self)
