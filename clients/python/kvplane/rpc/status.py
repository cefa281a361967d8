"""The conversion between KvplaneErrors and gRPC statuses: the table of status codes, and rich errors
(google.rpc.Status).

The service encodes a KvplaneError as a code and details, and the client decodes them, so that both sides raise the same
exception. The details are in the trailing metadata "grpc-status-details-bin".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Protocol

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from kvplane.base.errors import (
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    KvplaneError,
    LimitExceeded,
    Moved,
    NoPlan,
    NotFound,
    OpIdReused,
    OtherWriter,
    OutOfMemory,
    PermissionDenied,
    QuotaExceeded,
    ReplicaLapsed,
    SequenceError,
    ServiceRestarted,
    StaleEpoch,
    Unauthenticated,
    Unavailable,
    WorkerExists,
    WrongPlan,
    error_of_reason,
)

DOMAIN = "kvplane"
DETAILS_KEY = "grpc-status-details-bin"
MAX_TEXT = 800  # characters of each text, so that all metadata of a call stays under 8 KiB

_CODES: Mapping[type[KvplaneError], grpc.StatusCode] = {
    InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    NotFound: grpc.StatusCode.NOT_FOUND,
    AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    FailedPrecondition: grpc.StatusCode.FAILED_PRECONDITION,
    StaleEpoch: grpc.StatusCode.FAILED_PRECONDITION,
    ServiceRestarted: grpc.StatusCode.FAILED_PRECONDITION,
    OtherWriter: grpc.StatusCode.FAILED_PRECONDITION,
    SequenceError: grpc.StatusCode.FAILED_PRECONDITION,
    ReplicaLapsed: grpc.StatusCode.FAILED_PRECONDITION,
    OpIdReused: grpc.StatusCode.FAILED_PRECONDITION,
    Moved: grpc.StatusCode.FAILED_PRECONDITION,
    NoPlan: grpc.StatusCode.FAILED_PRECONDITION,
    WrongPlan: grpc.StatusCode.FAILED_PRECONDITION,
    WorkerExists: grpc.StatusCode.FAILED_PRECONDITION,
    PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    OutOfMemory: grpc.StatusCode.RESOURCE_EXHAUSTED,
    LimitExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    QuotaExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    InternalError: grpc.StatusCode.INTERNAL,
}
# The class of a code that came without details: from gRPC itself, or from a proxy.
_BY_CODE: Mapping[grpc.StatusCode, type[KvplaneError]] = {
    grpc.StatusCode.CANCELLED: Unavailable,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.RESOURCE_EXHAUSTED: LimitExceeded,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
}


class RpcOutcome(Protocol):
    """The outcome of a gRPC call: the methods that grpc.RpcError and grpc.aio.AioRpcError share."""

    def code(self) -> grpc.StatusCode:
        """Return the status code."""

    def details(self) -> str | None:
        """Return the status message."""

    def trailing_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """Return pairs of key and value; the values of keys that end in "-bin" are bytes."""


def status_code(error: KvplaneError) -> grpc.StatusCode:
    """Return the gRPC status code of an error: the code of its class, or of the nearest base class that is in the
    table.
    """
    for cls in type(error).__mro__:
        if cls in _CODES:
            return _CODES[cls]
    return grpc.StatusCode.INTERNAL


def encode_status(error: KvplaneError) -> status_pb2.Status:
    """Return the google.rpc.Status of an error: ErrorInfo, BadRequest for an invalid field, QuotaFailure for a quota.

    For an exceeded quota the status also has a RetryInfo. Texts are truncated to MAX_TEXT characters.
    """
    metadata = {key: value[:MAX_TEXT] for key, value in error.metadata.items()}
    if error.remedy:
        metadata["remedy"] = error.remedy[:MAX_TEXT]
    status = status_pb2.Status(code=status_code(error).value[0], message=str(error)[: 2 * MAX_TEXT])
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata))
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message[:MAX_TEXT])
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, QuotaExceeded):
        _add_quota(status, error)
    return status


def _add_quota(status: status_pb2.Status, error: QuotaExceeded) -> None:
    """Add the name of the quota and the time to wait before a retry, as details of google.rpc."""
    subject = error.metadata.get("quota", "")[:MAX_TEXT]
    violation = error_details_pb2.QuotaFailure.Violation(subject=subject, description=error.message[:MAX_TEXT])
    status.details.add().Pack(error_details_pb2.QuotaFailure(violations=[violation]))
    if "retry_ms" in error.metadata:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(int(error.metadata["retry_ms"]))
        status.details.add().Pack(retry)


def decode_status(status: status_pb2.Status) -> KvplaneError | None:
    """Return the error that a google.rpc.Status encodes; None if the status is not from kvplane."""
    info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in status.details:
        detail.Unpack(info)
        detail.Unpack(bad_request)
    if info.domain != DOMAIN:
        return None
    metadata = dict(info.metadata)
    field = bad_request.field_violations[0].field if bad_request.field_violations else ""
    remedy = metadata.pop("remedy", "")
    message = status.message.removeprefix(f"{field}: ").removesuffix(f" ({remedy})")
    return error_of_reason(info.reason, message, field=field, remedy=remedy, metadata=metadata)


def error_of_status(status: status_pb2.Status) -> KvplaneError:
    """Return the error of a failed call whose status came as a message: from its details if there are any, otherwise
    from its code.
    """
    with suppress(DecodeError):
        error = decode_status(status)
        if error is not None:
            return error
    code = next((one for one in grpc.StatusCode if one.value[0] == status.code), grpc.StatusCode.UNKNOWN)
    return _BY_CODE.get(code, InternalError)(status.message or code.name, metadata={"code": code.name})


def error_of_rpc(outcome: RpcOutcome) -> KvplaneError:
    """Return the error of a failed call: from the status details if there are any, otherwise from the status code."""
    for key, value in outcome.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            error = _parse_details(value)
            if error is not None:
                return error
    code = outcome.code()
    message = outcome.details() or code.name
    return _BY_CODE.get(code, InternalError)(message, metadata={"code": code.name})


def _parse_details(value: bytes) -> KvplaneError | None:
    try:
        return decode_status(status_pb2.Status.FromString(value))
    except DecodeError:
        return None
