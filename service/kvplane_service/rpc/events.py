"""The Events service (events.proto). A full pool evicts thousands of keys per step, so events are encoded without
creating a protobuf object for each.
"""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import replace
from weakref import WeakKeyDictionary

from kvplane import wire
from kvplane.base.errors import Unavailable
from kvplane.base.events import EventBatch
from kvplane.base.groups import Medium
from kvplane.base.step import CacheEvent, EventKind
from kvplane.v1 import events_pb2 as pb
from kvplane.v1 import step_pb2
from kvplane.wire.columns import tag_of, varint
from kvplane_core.face.cache_events import runs_of
from kvplane_service.auth.visible import VisibleReplicas
from kvplane_service.replicas.events import Batch, EventLog, Subscription, Wake
from kvplane_service.replicas.host import ReplicaHost
from kvplane_service.replicas.published import EntriesDigest

_AT_ONCE = 64  # batches that are unpacked at a time for a subscriber; the others stay packed in the log
_BLOCK_BYTES = 4
_KEPT_MESSAGES = 2
_PAUSE_S = 0.002  # between two slices of the entries


class EventsServicer:
    """Streams the cache events of replicas to subscribers."""

    def __init__(self, registry: VisibleReplicas) -> None:
        self._registry = registry
        self._draining = asyncio.Event()
        self._wakers: dict[asyncio.Event, None] = {}
        self._messages = NewestMessages()

    def drain(self) -> None:
        """End every stream and refuse new ones."""
        self._draining.set()
        for waker in self._wakers:
            waker.set()

    async def Subscribe(self, request: pb.SubscribeRequest) -> AsyncIterator[bytes]:  # noqa: N802
        """Stream the event batches of a replica after batch `after_seq`, then new batches as they appear.

        Raises:
            Unavailable: the service drains.
            KvplaneError: `EventLog.subscribe` or the subscription raised it.
        """
        reader = _Reader(self._registry.get(request.replica).host, request, self._messages)
        waker = asyncio.Event()
        subscription = reader.subscribe(waker.set)
        self._wakers[waker] = None
        try:
            while not self._draining.is_set():
                waker.clear()
                await reader.ready()
                batches = subscription.take(_AT_ONCE)
                # Nothing is awaited between a batch that was not there and the reading of the entries.
                for message in map(reader.encode, batches) if batches else reader.read():
                    yield message
                if not batches:
                    await reader.wait(waker)
        finally:
            self._wakers.pop(waker, None)
            subscription.cancel()
        raise Unavailable("the service is draining", remedy="subscribe at another service")


class _Reader:
    """What one subscriber gets: the batches, and the replica's entries or their digests where it asks for them."""

    def __init__(self, host: ReplicaHost, request: pb.SubscribeRequest, messages: NewestMessages) -> None:
        self._host, self._log, self._messages = host, host.events, messages
        self._after = request.after_seq if request.HasField("after_seq") else None
        self._pool = host.replica.spec.pool
        self._period_s = 0 if self._pool else request.digest_period_s  # a digest is of keys on the device
        after = self._after
        is_lost = after is not None and (after == 0 or after < self._log.oldest_resumable)
        self._scan = host.scan_entries() if request.entries and is_lost and self._log.last_seq else None
        self._digest: EntriesDigest | None = None  # of the scan; None if the entries are sent
        self._begun_s = self._now_s()
        self._has_begun = False

    def subscribe(self, wake: Wake) -> Subscription:
        """Subscribe to the batches. Raises the errors of EventLog.subscribe."""
        return self._log.subscribe(self._log.last_seq if self._scan else self._after, wake)

    async def ready(self) -> None:
        """Wait until the entries can be read, if they are to be."""
        if self._scan is not None:
            await self._host.steps.idle()

    def encode(self, batch: Batch) -> bytes:
        """Return the message of a batch."""
        if self._scan is None:
            return self._messages.encode(self._log, batch, self._pool)
        events = self._scan.follow(runs_of(batch.events))
        if self._digest is None:
            return encode_batch(replace(batch, seq=0, events=events), self._pool)
        self._digest.take(events)
        return self._messages.encode(self._log, batch, self._pool)

    def read(self) -> Iterator[bytes]:
        """Return the messages of the next slice of the entries; all batches were encoded."""
        log, host = self._log, self._host
        if self._scan is None:
            if not self._is_due() or log.is_withdrawn or host.steps.is_aside or host.steps.in_core:
                return
            self._scan, self._digest = host.scan_entries(), EntriesDigest(len(host.replica.spec.groups))
        if self._digest is None and not self._has_begun:
            self._has_begun = True
            yield encode_batch(Batch(0, host.epoch, gap=True, withdrawn=log.is_withdrawn))
        host.steps.check(host.name)
        seq, scan, digest = log.last_seq, self._scan, self._digest
        events, has_ended = scan.read(), scan.has_ended
        if has_ended:
            self._scan = self._digest = None
            self._begun_s = self._now_s()
        if digest is None:
            for event in events:
                yield encode_batch(Batch(0, host.epoch, [event]), self._pool)
            if has_ended:
                yield encode_batch(Batch(seq, host.epoch))
            return
        digest.take(events)
        if has_ended:
            yield wire.encode_batch(
                EventBatch(seq, host.epoch, (), digests=tuple(digest.digests()))
            ).SerializeToString()

    async def wait(self, waker: asyncio.Event) -> None:
        """Wait for the next batch, or until it is time to read on."""
        if self._scan is not None:
            await asyncio.sleep(_PAUSE_S)
        else:
            left_s = self._begun_s + self._period_s - self._now_s() if self._period_s else None
            with suppress(TimeoutError):
                async with asyncio.timeout(None if left_s is None else max(left_s, _PAUSE_S)):
                    await waker.wait()

    def _is_due(self) -> bool:
        return self._period_s > 0 and self._now_s() >= self._begun_s + self._period_s

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()


def encode_batch(batch: Batch, pool: Medium = Medium.DEVICE) -> bytes:
    """Return the serialized message of a batch of cache events. `pool`: where the replica's pool is."""
    head = pb.SubscribeResponse(
        seq=batch.seq, epoch=batch.epoch, gap=batch.gap, withdrawn=batch.withdrawn, restored=batch.restored
    )
    # Protobuf parses concatenated messages as one message that has the events of all of them.
    runs = (replace(run, tier=run.tier or pool) for run in runs_of(batch.events)) if pool else runs_of(batch.events)
    return b"".join([head.SerializeToString(), *[_encode_run(run) for run in runs]])


class NewestMessages:
    """Caches the serialized messages of the newest event batches of each replica's event log, so that several
    subscribers share the messages.
    """

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[EventLog, dict[int, bytes]] = WeakKeyDictionary()

    def encode(self, log: EventLog, batch: Batch, pool: Medium = Medium.DEVICE) -> bytes:
        """Return the serialized message of a batch of cache events; it is serialized once for all subscribers of the
        log.
        """
        if log.num_subscribers == 1 or not batch.events:
            return encode_batch(batch, pool)
        newest = self._of.setdefault(log, {})
        message = newest.get(batch.seq)
        if message is None:
            message = newest[batch.seq] = encode_batch(batch, pool)
            if len(newest) > _KEPT_MESSAGES:
                del newest[min(newest)]
        return message


def _encode_run(run: CacheEvent) -> bytes:
    """Return the serialized `events` entries of a run of events: one entry, or for removals one entry per hash."""
    if run.kind is not EventKind.REMOVED:
        raw = wire.encode_event(run).SerializeToString()
        return _EVENTS + varint(len(raw)) + raw
    rest = wire.encode_event(replace(run, hashes=(), blocks=())).SerializeToString()
    blocks = array("I", run.blocks)
    if _IS_SWAPPED:
        blocks.byteswap()
    raw, entries, size, begin = blocks.tobytes(), list[bytes](), -1, b""
    behind = _BLOCKS + varint(_BLOCK_BYTES)
    for at, digest in enumerate(run.hashes):
        if len(digest) != size:
            size = len(digest)
            named = rest + _HASHES + varint(size)
            begin = _EVENTS + varint(len(named) + size + len(behind) + _BLOCK_BYTES) + named
        entries.append(begin + digest + behind + raw[at * _BLOCK_BYTES : (at + 1) * _BLOCK_BYTES])
    return b"".join(entries)


_IS_SWAPPED = sys.byteorder == "big"
_EVENTS = tag_of(pb.SubscribeResponse, "events")
_HASHES, _BLOCKS = tag_of(step_pb2.CacheEvent, "hashes"), tag_of(step_pb2.CacheEvent, "blocks")
