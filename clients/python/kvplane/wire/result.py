"""Conversion of StepResult, its parts, cache events and batches of these to and from protobuf."""

from __future__ import annotations

from typing import Any

from kvplane.base.errors import InvalidArgument
from kvplane.base.events import KEY_BYTES, EventBatch, GroupDigest
from kvplane.base.groups import Medium
from kvplane.base.step import Blocks, CacheEvent, EventKind, PartResult, RemoveReason, StepResult
from kvplane.v1 import events_pb2
from kvplane.v1 import step_pb2 as pb
from kvplane.wire.columns import U32, build, pack, unpack, wrong_total
from kvplane.wire.sections import decode_section, encode_section
from kvplane.wire.tables import BLOCKS, PART_RESULT

_KINDS = {one.value: one for one in EventKind}
_REASONS = {one.value: one for one in RemoveReason}
_MEDIA = {one.value: one for one in Medium}
_BLOCK_FIELDS = [name for name, of in PART_RESULT.inner.items() if of is BLOCKS]


def encode_result(result: StepResult) -> pb.StepResult:
    """Return the message of a step's result."""
    fields = {
        "seq": result.seq,
        "part": result.part,
        "parts": [_encode_part(part, f"parts[{index}]") for index, part in enumerate(result.parts)],
        "published_through": result.published_through,
    }
    return build(pb.StepResult, "result", fields)


def decode_result(message: pb.StepResult) -> StepResult:
    """Return the step's result of a message. Raises InvalidArgument for a malformed message; the error's field names
    the wrong part.
    """
    return StepResult(
        seq=message.seq,
        part=message.part,
        parts=[_decode_part(part, f"parts[{index}]") for index, part in enumerate(message.parts)],
        published_through=message.published_through,
    )


def encode_event(event: CacheEvent) -> pb.CacheEvent:
    """Return the message of one cache event."""
    fields = {
        "kind": int(event.kind),
        "group": event.group,
        "hashes": event.hashes,
        "blocks": pack(event.blocks, U32, "event", "blocks"),
        "domain": event.domain,
        "parent": event.parent,
        "block_size": event.block_size,
        "slot": event.slot,
        "start": event.start,
        "end": event.end,
        "block_starts": pack(event.block_starts, U32, "event", "block_starts"),
        "reason": int(event.reason),
        "tier": int(event.tier),
    }
    return build(pb.CacheEvent, "event", fields)


def decode_event(message: pb.CacheEvent, where: str = "event") -> CacheEvent:
    """Return the cache event of a message. Raises InvalidArgument for an unknown kind, reason or tier."""
    try:
        kind, reason, tier = _KINDS[message.kind], _REASONS[message.reason], _MEDIA[message.tier]
    except KeyError as error:
        raise InvalidArgument(
            f"the event has an unknown kind, reason or tier: {error}",
            field=f"{where}.kind",
            remedy="update the client: the service has kinds of events that it does not know",
        ) from error
    return CacheEvent(
        kind=kind,
        group=message.group,
        hashes=tuple(message.hashes),
        blocks=tuple(unpack(raw, U32, where, "blocks")) if (raw := message.blocks) else (),
        domain=message.domain,
        parent=message.parent,
        block_size=message.block_size,
        slot=message.slot,
        start=message.start,
        end=message.end,
        block_starts=tuple(unpack(raw, U32, where, "block_starts")) if (raw := message.block_starts) else (),
        reason=reason,
        tier=tier,
    )


def _encode_part(part: PartResult, where: str) -> dict[str, Any]:
    fields = encode_section(part, PART_RESULT, where)
    given = vars(part)  # a field that is missing is empty
    if given.get("events") or given.get("tier_events"):
        fields["events"] = [encode_event(event) for event in (*part.events, *part.tier_events)]
    return fields


def _decode_part(message: pb.PartResult, where: str) -> PartResult:
    fields = decode_section(message, PART_RESULT, where, to_lists=False)
    if preempted := fields.get("preempted"):
        fields["preempted"] = preempted.tolist()  # a queue of requests, not a column of rows
    for name in _BLOCK_FIELDS:
        if name in fields:
            _check_blocks(fields[name], f"{where}.{name}")
    if message.events:
        events = [decode_event(event, f"{where}.events[{at}]") for at, event in enumerate(message.events)]
        fields["events"] = [event for event in events if not event.tier]
        fields["tier_events"] = [event for event in events if event.tier]
    return PartResult(**fields)


def _check_blocks(blocks: Blocks, where: str) -> None:
    if len(blocks.ids) != sum(blocks.count):
        raise wrong_total(f"{where}.ids", len(blocks.ids), "ids", sum(blocks.count), f"{where}.count")


_SAME = ("seq", "epoch", "gap", "withdrawn", "restored")


def encode_batch(batch: EventBatch) -> events_pb2.SubscribeResponse:
    """Return the message of a batch."""
    fields = {name: getattr(batch, name) for name in _SAME}
    digests = [
        events_pb2.GroupDigest(group=one.group, keys=one.keys, sum=one.sum.to_bytes(KEY_BYTES, "big"))
        for one in batch.digests
    ]
    events = [encode_event(one) for one in batch.events]
    return build(events_pb2.SubscribeResponse, "batch", {**fields, "events": events, "digests": digests})


def decode_batch(message: events_pb2.SubscribeResponse) -> EventBatch:
    """Return the batch of a message."""
    events = tuple(decode_event(event, f"events[{at}]") for at, event in enumerate(message.events))
    digests = tuple(GroupDigest(one.group, one.keys, int.from_bytes(one.sum, "big")) for one in message.digests)
    return EventBatch(events=events, digests=digests, **{name: getattr(message, name) for name in _SAME})
