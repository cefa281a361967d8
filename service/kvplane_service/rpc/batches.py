"""Batches of events as messages. A full pool evicts thousands of keys in a step, so no event becomes an object here."""

from __future__ import annotations

import sys
from array import array
from dataclasses import replace
from weakref import WeakKeyDictionary

from google.protobuf.message import Message

from kvplane import wire
from kvplane.base.step import CacheEvent, EventKind
from kvplane.v1 import events_pb2, step_pb2
from kvplane_service.core.cache_events import runs_of
from kvplane_service.replicas.events import Batch, EventLog

_BLOCK_BYTES = 4
_KEPT_MESSAGES = 2


def encode_batch(batch: Batch) -> bytes:
    """The bytes of a batch's message."""
    head = events_pb2.SubscribeResponse(
        seq=batch.seq, epoch=batch.epoch, gap=batch.gap, withdrawn=batch.withdrawn, restored=batch.restored
    )
    # Messages one behind the other are one, with the events of all.
    return b"".join([head.SerializeToString(), *[_encode_run(run) for run in runs_of(batch.events)]])


class NewestMessages:
    """The messages of the newest batches of each log, made once for all who follow it closely."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[EventLog, dict[int, bytes]] = WeakKeyDictionary()

    def encode(self, log: EventLog, batch: Batch) -> bytes:
        """The message of a batch; of one with events, the same as others were given."""
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
    """The bytes of `events` entries: an event, or one for each hash of a run of removals."""
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
    """What stands before a field of bytes."""
    return _varint(message.DESCRIPTOR.fields_by_name[name].number << 3 | 2)


_IS_SWAPPED = sys.byteorder == "big"
_EVENTS = _tag(events_pb2.SubscribeResponse, "events")
_HASHES, _BLOCKS = _tag(step_pb2.CacheEvent, "hashes"), _tag(step_pb2.CacheEvent, "blocks")
