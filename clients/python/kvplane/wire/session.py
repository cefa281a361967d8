"""What opens, answers and refuses in a session <-> protobuf."""

from __future__ import annotations

from kvplane.base.errors import KvplaneError
from kvplane.base.session import Opened, OpenRequest
from kvplane.status import error_of_reason
from kvplane.v1 import allocation_pb2, step_pb2
from kvplane.wire.columns import U64, build, pack, unpack
from kvplane.wire.spec import decode_spec, encode_spec

_OPENED = (
    "epoch",
    "seq",
    "next_part",
    "max_steps_in_flight",
    "max_rows",
    "lease_ms",
    "free_blocks",
    "kept_keys",
)


def encode_open(request: OpenRequest) -> allocation_pb2.SessionOpen:
    """The message that opens a session."""
    fields = {
        "replica": request.replica,
        "epoch": request.epoch,
        "nonce": request.nonce,
        "with_events": request.with_events,
        "client": request.client,
        "stamp_table": pack(request.stamp_table, U64, "open", "stamp_table"),
        "incarnation": request.incarnation,
    }
    return build(allocation_pb2.SessionOpen, "open", fields)


def decode_open(message: allocation_pb2.SessionOpen) -> OpenRequest:
    """The request of a message."""
    return OpenRequest(
        replica=message.replica,
        nonce=message.nonce,
        epoch=message.epoch,
        with_events=message.with_events,
        client=message.client,
        stamp_table=tuple(unpack(message.stamp_table, U64, "open", "stamp_table")),
        incarnation=message.incarnation,
    )


def encode_opened(opened: Opened) -> allocation_pb2.SessionOpened:
    """The message that answers an open."""
    fields = {name: getattr(opened, name) for name in _OPENED}
    return build(allocation_pb2.SessionOpened, "opened", {**fields, "spec": encode_spec(opened.spec)})


def decode_opened(message: allocation_pb2.SessionOpened) -> Opened:
    """The answer of a message."""
    return Opened(spec=decode_spec(message.spec), **{name: getattr(message, name) for name in _OPENED})


def encode_step_error(seq: int, part: int, error: KvplaneError) -> step_pb2.StepError:
    """The message that refuses a step."""
    return step_pb2.StepError(
        seq=seq,
        part=part,
        reason=error.reason,
        message=error.message,
        field=error.field,
        remedy=error.remedy,
        metadata=error.metadata,
    )


def decode_step_error(message: step_pb2.StepError) -> KvplaneError:
    """The refusal of a message, of the class that its reason names."""
    return error_of_reason(
        message.reason,
        message.message,
        field=message.field,
        remedy=message.remedy,
        metadata=dict(message.metadata),
    )
