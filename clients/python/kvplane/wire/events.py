"""Conversion of batches of cache events to and from protobuf."""

from __future__ import annotations

from kvplane.base.events import KEY_BYTES, EventBatch, GroupDigest
from kvplane.v1 import events_pb2 as pb
from kvplane.wire.columns import build
from kvplane.wire.result import decode_event, encode_event

_SAME = ("seq", "epoch", "gap", "withdrawn", "restored")


def encode_batch(batch: EventBatch) -> pb.SubscribeResponse:
    """Return the message of a batch."""
    fields = {name: getattr(batch, name) for name in _SAME}
    digests = [
        pb.GroupDigest(group=one.group, keys=one.keys, sum=one.sum.to_bytes(KEY_BYTES, "big")) for one in batch.digests
    ]
    events = [encode_event(one) for one in batch.events]
    return build(pb.SubscribeResponse, "batch", {**fields, "events": events, "digests": digests})


def decode_batch(message: pb.SubscribeResponse) -> EventBatch:
    """Return the batch of a message."""
    events = tuple(decode_event(event, f"events[{at}]") for at, event in enumerate(message.events))
    digests = tuple(GroupDigest(one.group, one.keys, int.from_bytes(one.sum, "big")) for one in message.digests)
    return EventBatch(events=events, digests=digests, **{name: getattr(message, name) for name in _SAME})
