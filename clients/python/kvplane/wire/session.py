"""Conversion of OpenRequest, Opened and the refusal of a step to and from protobuf."""

from __future__ import annotations

from kvplane.base.errors import FailedPrecondition, InvalidArgument, KvplaneError, error_of_reason
from kvplane.base.groups import CommitRule
from kvplane.base.session import MirrorTerms, Opened, OpenRequest
from kvplane.base.step import STEP_VERSION
from kvplane.base.typed import check
from kvplane.v1 import allocation_pb2, step_pb2
from kvplane.v1.replica_pb2 import CommitRule as CommitRuleValue
from kvplane.wire.columns import U32, U64, build, pack, unpack, unpack_words
from kvplane.wire.parsing import split_field
from kvplane.wire.spec import decode_enum, decode_spec, encode_enum, encode_spec

_OPENED = (
    "epoch",
    "seq",
    "next_part",
    "max_steps_in_flight",
    "max_rows",
    "lease_ms",
    "free_blocks",
    "kept_keys",
    "mirror_window",
    "image_wanted",
)

_OPEN = allocation_pb2.SessionRequest.DESCRIPTOR.fields_by_name["open"]
_STAMP_TABLE = allocation_pb2.SessionOpen.DESCRIPTOR.fields_by_name["stamp_table"]


def encode_open(request: OpenRequest) -> allocation_pb2.SessionOpen:
    """Return the message that opens a session."""
    fields = {
        "replica": request.replica,
        "epoch": request.epoch,
        "nonce": request.nonce,
        "with_events": request.with_events,
        "client": request.client,
        "stamp_table": pack(request.stamp_table, U64, "open", "stamp_table"),
        "incarnation": request.incarnation,
        "busy_blocks": pack(request.busy_blocks, U32, "open", "busy_blocks"),
        "step_version": request.step_version,
        "owner_epoch": request.owner_epoch,
        "life_nonce": request.life_nonce,
        "disk_incarnation": request.disk_incarnation,
    }
    if request.mirror is not None:
        fields["mirror"] = {
            "core_version": request.mirror.core_version,
            "commit": encode_enum(CommitRuleValue, "COMMIT_RULE", request.mirror.commit),
            "takes_rows": request.mirror.takes_rows,
        }
    try:
        return build(allocation_pb2.SessionOpen, "open", fields)
    except InvalidArgument:
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
    return OpenRequest(
        replica=message.replica,
        nonce=message.nonce,
        epoch=message.epoch,
        with_events=message.with_events,
        client=message.client,
        stamp_table=unpack_words(stamps or message.stamp_table, "open", "stamp_table"),
        incarnation=message.incarnation,
        busy_blocks=tuple(unpack(message.busy_blocks, U32, "open", "busy_blocks")),
        step_version=message.step_version or STEP_VERSION,
        owner_epoch=message.owner_epoch,
        life_nonce=message.life_nonce,
        mirror=_decode_terms(message.mirror) if message.HasField("mirror") else None,
        disk_incarnation=message.disk_incarnation,
    )


def _decode_terms(message: allocation_pb2.MirrorTerms) -> MirrorTerms:
    where = "open.mirror.commit"
    rule = decode_enum(CommitRuleValue, "COMMIT_RULE", message.commit, where, CommitRule.SAFE)
    return MirrorTerms(rule, message.core_version, message.takes_rows)


def encode_opened(opened: Opened) -> allocation_pb2.SessionOpened:
    """Return the message with the service's answer to the opening of a session."""
    fields = {name: getattr(opened, name) for name in _OPENED}
    fields |= {"spec": encode_spec(opened.spec), "step_version": STEP_VERSION}
    fields["busy_blocks"] = pack(opened.busy_blocks, U32, "opened", "busy_blocks")
    return build(allocation_pb2.SessionOpened, "opened", fields)


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
    same = {name: getattr(message, name) for name in _OPENED}
    return Opened(spec=decode_spec(message.spec), busy_blocks=busy, **same)


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
