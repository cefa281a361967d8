"""Conversion of OpenRequest, Opened and the refusal of a step to and from protobuf."""

from __future__ import annotations

from kvplane.base.errors import FailedPrecondition, InvalidArgument, KvplaneError, error_of_reason
from kvplane.base.session import Opened, OpenRequest
from kvplane.base.step import STEP_VERSION
from kvplane.base.typed import check
from kvplane.v1 import allocation_pb2, step_pb2
from kvplane.wire.columns import U32, U64, pack, unpack, unpack_words
from kvplane.wire.parsing import split_field
from kvplane.wire.same import decode_same, encode_same
from kvplane.wire.spec import decode_spec, encode_spec

_OPEN = allocation_pb2.SessionRequest.DESCRIPTOR.fields_by_name["open"]
_STAMP_TABLE = allocation_pb2.SessionOpen.DESCRIPTOR.fields_by_name["stamp_table"]


def encode_open(request: OpenRequest) -> allocation_pb2.SessionOpen:
    """Return the message that opens a session."""
    stamps = pack(request.stamp_table, U64, "open", "stamp_table")
    busy = pack(request.busy_blocks, U32, "open", "busy_blocks")
    try:
        return encode_same(request, allocation_pb2.SessionOpen, "open", stamp_table=stamps, busy_blocks=busy)
    except (InvalidArgument, AttributeError):
        check(request, OpenRequest, "open")
        raise


def split_stamps(raw: bytes) -> tuple[bytes, memoryview]:
    """Return the message that opens a session without its stamp table, and the stamp table, whose
    bytes are not copied.
    """
    return split_field(raw, _OPEN.number, _STAMP_TABLE.number)


def decode_open(message: allocation_pb2.SessionOpen, stamps: bytes | memoryview = b"") -> OpenRequest:
    """Return the OpenRequest of a message. `stamps` is the message's stamp table, if `split_stamps`
    removed it before.
    """
    return decode_same(
        OpenRequest,
        message,
        "open.",
        stamp_table=unpack_words(stamps or message.stamp_table, "open", "stamp_table"),
        busy_blocks=tuple(unpack(message.busy_blocks, U32, "open", "busy_blocks")),
        step_version=message.step_version or STEP_VERSION,
    )


def encode_opened(opened: Opened) -> allocation_pb2.SessionOpened:
    """Return the message with the service's answer to the opening of a session."""
    busy = pack(opened.busy_blocks, U32, "opened", "busy_blocks")
    spec, version = encode_spec(opened.spec), STEP_VERSION
    message = allocation_pb2.SessionOpened
    return encode_same(opened, message, "opened", spec=spec, busy_blocks=busy, step_version=version)


def decode_opened(message: allocation_pb2.SessionOpened) -> Opened:
    """Return the service's answer in a message. Raises FailedPrecondition if the service accepts another version of
    steps.
    """
    version = message.step_version or 1
    if version != STEP_VERSION:
        raise FailedPrecondition(
            f"the service accepts steps of version {version}, this client sends version {STEP_VERSION}",
            field="step_version",
            remedy="use the same version of client and service",
        )
    busy = tuple(unpack(message.busy_blocks, U32, "opened", "busy_blocks"))
    return decode_same(Opened, message, spec=decode_spec(message.spec), busy_blocks=busy)


def encode_step_error(seq: int, part: int, error: KvplaneError) -> step_pb2.StepError:
    """Return the message that refuses a step."""
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
    """Return the refusal in a message, as an exception of the class with its `reason`."""
    return error_of_reason(
        message.reason,
        message.message,
        field=message.field,
        remedy=message.remedy,
        metadata=dict(message.metadata),
    )
