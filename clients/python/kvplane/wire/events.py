"""Conversion of batches of cache events to and from protobuf."""

from __future__ import annotations

from kvplane.base.events import EventBatch
from kvplane.v1 import events_pb2 as pb
from kvplane.wire.columns import build
from kvplane.wire.result import decode_event, encode_event

_SAME = ("seq", "epoch", "gap", "withdrawn", "restored")


def encode_batch(batch: EventBatch) -> pb.SubscribeResponse:
    """Return the message of a batch."""
    fields = {name: getattr(batch, name) for name in _SAME}
    return build(pb.SubscribeResponse, "batch", {**fields, "events": [encode_event(e) for e in batch.events]})


def decode_batch(message: pb.SubscribeResponse) -> EventBatch:
    """Return the batch of a message."""
    events = tuple(decode_event(event, f"events[{at}]") for at, event in enumerate(message.events))
    return EventBatch(events=events, **{name: getattr(message, name) for name in _SAME})
