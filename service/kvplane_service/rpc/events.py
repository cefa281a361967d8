"""The Events service (events.proto). A full pool evicts thousands of keys per step, so events are encoded without
creating a protobuf object for each.
"""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import AsyncIterator
from dataclasses import replace
from weakref import WeakKeyDictionary

from google.protobuf.message import Message

from kvplane import wire
from kvplane.base.errors import Unavailable
from kvplane.base.step import CacheEvent, EventKind
from kvplane.v1 import events_pb2 as pb
from kvplane.v1 import step_pb2
from kvplane_service.auth.visible import VisibleReplicas
from kvplane_service.core.cache_events import runs_of
from kvplane_service.replicas.events import Batch, EventLog

_AT_ONCE = 64  # batches that are unpacked at a time for a subscriber; the others stay packed in the log
_BLOCK_BYTES = 4
_KEPT_MESSAGES = 2


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
        log = self._registry.get(request.replica).host.events
        waker = asyncio.Event()
        subscription = log.subscribe(request.after_seq if request.HasField("after_seq") else None, waker.set)
        self._wakers[waker] = None
        try:
            while not self._draining.is_set():
                waker.clear()
                batches = subscription.take(_AT_ONCE)
                for batch in batches:
                    yield self._messages.encode(log, batch)
                if not batches:
                    await waker.wait()
        finally:
            self._wakers.pop(waker, None)
            subscription.cancel()
        raise Unavailable("the service is draining", remedy="subscribe at another service")


def encode_batch(batch: Batch) -> bytes:
    """Return the serialized message of a batch of cache events."""
    head = pb.SubscribeResponse(
        seq=batch.seq, epoch=batch.epoch, gap=batch.gap, withdrawn=batch.withdrawn, restored=batch.restored
    )
    # Protobuf parses concatenated messages as one message that has the events of all of them.
    return b"".join([head.SerializeToString(), *[_encode_run(run) for run in runs_of(batch.events)]])


class NewestMessages:
    """Caches the serialized messages of the newest event batches of each replica's event log, so that several
    subscribers share the messages.
    """

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[EventLog, dict[int, bytes]] = WeakKeyDictionary()

    def encode(self, log: EventLog, batch: Batch) -> bytes:
        """Return the serialized message of a batch of cache events; it is serialized once for all subscribers of the
        log.
        """
        if log.num_subscribers == 1 or not batch.events:
            return encode_batch(batch)
        newest = self._of.setdefault(log, {})
        message = newest.get(batch.seq)
        if message is None:
            message = newest[batch.seq] = encode_batch(batch)
            if len(newest) > _KEPT_MESSAGES:
                del newest[min(newest)]
        return message


def _encode_run(run: CacheEvent) -> bytes:
    """Return the serialized `events` entries of a run of events: one entry, or for removals one entry per hash."""
    if run.kind is not EventKind.REMOVED:
        raw = wire.encode_event(run).SerializeToString()
        return _EVENTS + _varint(len(raw)) + raw
    rest = wire.encode_event(replace(run, hashes=(), blocks=())).SerializeToString()
    blocks = array("I", run.blocks)
    if _IS_SWAPPED:
        blocks.byteswap()
    raw, entries, size, begin = blocks.tobytes(), list[bytes](), -1, b""
    behind = _BLOCKS + _varint(_BLOCK_BYTES)
    for at, digest in enumerate(run.hashes):
        if len(digest) != size:
            size = len(digest)
            named = rest + _HASHES + _varint(size)
            begin = _EVENTS + _varint(len(named) + size + len(behind) + _BLOCK_BYTES) + named
        entries.append(begin + digest + behind + raw[at * _BLOCK_BYTES : (at + 1) * _BLOCK_BYTES])
    return b"".join(entries)


def _varint(number: int) -> bytes:
    raw = bytearray()
    while number > 0x7F:
        raw.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*raw, number])


def _tag(message: type[Message], name: str) -> bytes:
    """Return the serialized tag of a bytes field."""
    return _varint(message.DESCRIPTOR.fields_by_name[name].number << 3 | 2)


_IS_SWAPPED = sys.byteorder == "big"
_EVENTS = _tag(pb.SubscribeResponse, "events")
_HASHES, _BLOCKS = _tag(step_pb2.CacheEvent, "hashes"), _tag(step_pb2.CacheEvent, "blocks")
