"""Conversion of StepResult, its parts and cache events to and from protobuf."""

from __future__ import annotations

from typing import Any

from kvplane.base.declined import Declined
from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import Medium
from kvplane.base.prefetch import Prefetched
from kvplane.base.retain import Retained
from kvplane.base.step import (
    LOAD_COLUMNS,
    MOVE_COLUMNS,
    SAVE_COLUMNS,
    Blocks,
    CacheEvent,
    EventKind,
    Orders,
    PartResult,
    RemoveReason,
    StepResult,
)
from kvplane.v1 import step_pb2 as pb
from kvplane.wire.columns import (
    U32,
    U64,
    Column,
    Columns,
    build,
    pack,
    pack_section,
    unpack,
    unpack_section,
    wrong_total,
)

_RESULT = Columns(
    Column("granted", by_row=False),
    Column("preempted", by_row=False),
    Column("admit_status", highest=7),
    Column("admit_hit"),
    Column("admit_granted"),
    Column("admit_single_group_hit"),
    Column("admit_load_after", U64),
    Column("admit_job", U64),
    Column("admit_tier_tokens"),
    Column("peek_hit", by_row=False),
    Column("peek_single_group_hit", by_row=False),
    Column("num_hashes", by_row=False),
)
_DECLINED = Columns(
    Column("row"), Column("why"), Column("tier"), Column("hit"), Column("load_ns", U64), Column("compute_ns", U64)
)
_PREFETCHED = Columns(Column("hit"), Column("blocks"), Column("outcome"))
_RETAINED = Columns(
    Column("hit"), Column("blocks"), Column("left"), Column("outcome"), Column("next_end_ns", U64, by_row=False)
)
_BLOCKS = Columns(Column("row"), Column("group"), Column("count"), Column("ids", by_row=False))
_STAMPS = Columns(Column("stamp_block"), Column("stamp", U64))
_COPIES = Columns(Column("copy_src"), Column("copy_dst"), Column("copy_group"))
_ZEROES = Columns(Column("zero_block"), Column("zero_group"))
_WIDE = ("load_job", "load_version", "load_stamp", "save_job", "save_stamp", "move_job", "move_version")
_LOADS, _SAVES, _MOVES = (
    Columns(*[Column(name, U64 if name in _WIDE else U32) for name in names])
    for names in (LOAD_COLUMNS, SAVE_COLUMNS, MOVE_COLUMNS)
)
_OF_ORDERS = (_STAMPS, _COPIES, _ZEROES, _LOADS, _SAVES, _MOVES)
_ORDERS = Columns(*[column for columns in _OF_ORDERS for column in columns.each])
_BLOCK_FIELDS = ("new_blocks", "tables", "peek_blocks")


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


def encode_orders(orders: Orders) -> pb.Orders:
    """Return the message of the orders (to stamp, zero and copy pages) of one part."""
    return build(pb.Orders, "orders", pack_section(orders, _ORDERS, "orders"))


def decode_orders(message: pb.Orders, where: str = "orders") -> Orders:
    """Return the orders of a message. Raises InvalidArgument for a malformed message."""
    fields: dict[str, Any] = {}
    for columns in _OF_ORDERS:
        fields.update(unpack_section(message, columns, where, to_lists=False))
    return Orders(**fields)


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
        kind, reason, tier = EventKind(message.kind), RemoveReason(message.reason), Medium(message.tier)
    except ValueError as error:
        raise InvalidArgument(
            f"the event has an unknown kind, reason or tier: {error}",
            field=f"{where}.kind",
            remedy="update the client: the service has kinds of events that it does not know",
        ) from error
    return CacheEvent(
        kind=kind,
        group=message.group,
        hashes=tuple(message.hashes),
        blocks=tuple(unpack(message.blocks, U32, where, "blocks")),
        domain=message.domain,
        parent=message.parent,
        block_size=message.block_size,
        slot=message.slot,
        start=message.start,
        end=message.end,
        block_starts=tuple(unpack(message.block_starts, U32, where, "block_starts")),
        reason=reason,
        tier=tier,
    )


# As in a step, submessages are passed as dicts, which protobuf does not copy.
def _encode_part(part: PartResult, where: str) -> dict[str, Any]:
    fields = pack_section(part, _RESULT, where)
    given = vars(part)  # a field that is missing is empty
    for name in _BLOCK_FIELDS:
        if name in given and (blocks := pack_section(given[name], _BLOCKS, where)):
            fields[name] = blocks
    if "declined" in given and (declined := pack_section(part.declined, _DECLINED, where)):
        fields["declined"] = declined
    if "prefetched" in given and (prefetched := pack_section(part.prefetched, _PREFETCHED, where)):
        fields["prefetched"] = prefetched
    if "retained" in given and (retained := pack_section(part.retained, _RETAINED, where)):
        fields["retained"] = retained
    if "orders" in given and (orders := pack_section(part.orders, _ORDERS, where)):
        fields["orders"] = orders
    if given.get("last_hash"):
        fields["last_hash"] = part.last_hash
    if given.get("events") or given.get("tier_events"):
        fields["events"] = [encode_event(event) for event in (*part.events, *part.tier_events)]
    if part.reset_done:
        fields["reset_done"] = True
    fields["free_blocks"] = part.free_blocks
    return fields


def _decode_part(message: pb.PartResult, where: str) -> PartResult:
    fields = unpack_section(message, _RESULT, where, to_lists=False)
    if preempted := fields.get("preempted"):
        fields["preempted"] = preempted.tolist()  # a queue of requests, not a column of rows
    for name in _BLOCK_FIELDS:
        if message.HasField(name):
            fields[name] = _decode_blocks(getattr(message, name), f"{where}.{name}")
    if message.HasField("declined"):
        fields["declined"] = Declined(**unpack_section(message.declined, _DECLINED, where, to_lists=False))
    if message.HasField("prefetched"):
        fields["prefetched"] = Prefetched(**unpack_section(message.prefetched, _PREFETCHED, where, to_lists=False))
    if message.HasField("retained"):
        fields["retained"] = Retained(**unpack_section(message.retained, _RETAINED, where, to_lists=False))
    if message.HasField("orders"):
        fields["orders"] = decode_orders(message.orders, f"{where}.orders")
    if message.events:
        events = [decode_event(event, f"{where}.events[{at}]") for at, event in enumerate(message.events)]
        fields["events"] = [event for event in events if not event.tier]
        fields["tier_events"] = [event for event in events if event.tier]
    return PartResult(
        last_hash=list(message.last_hash),
        reset_done=message.reset_done,
        free_blocks=message.free_blocks,
        **fields,
    )


def _decode_blocks(message: pb.Blocks, where: str) -> Blocks:
    blocks = Blocks(**unpack_section(message, _BLOCKS, where, to_lists=False))
    if len(blocks.ids) != sum(blocks.count):
        raise wrong_total(f"{where}.ids", len(blocks.ids), "ids", sum(blocks.count), f"{where}.count")
    return blocks
