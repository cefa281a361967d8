"""The exceptions for every expected refusal of kvplane.

A refusal changes no state: the state digest of a replica is the same before and after. Bugs raise AssertionError, not
these exceptions. The service maps each class to a gRPC status in one table (`kvplane.rpc.status`), and the client maps
`reason` back to the class. So a session raises the same exceptions in the service's process and over gRPC.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar


class KvplaneError(Exception):
    """The service, the client or the worker refused an operation. The base class of all expected refusals.

    Attributes:
        message: what is wrong, with the value that was found.
        reason: stable UPPER_SNAKE name, the same on the wire (`google.rpc.ErrorInfo.reason`).
        field: name of the invalid request field; "" if the refusal is not about a single field.
        remedy: what the caller can do about it, in one sentence.
        metadata: further facts as text, such as the current epoch or the owner's address.
    """

    reason: ClassVar[str] = "KVPLANE_ERROR"

    def __init__(
        self, message: str, *, field: str = "", remedy: str = "", metadata: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.remedy = remedy
        self.metadata = dict(metadata or {})

    def __str__(self) -> str:
        where = f"{self.field}: " if self.field else ""
        return f"{where}{self.message}" + (f" ({self.remedy})" if self.remedy else "")


class InvalidArgument(KvplaneError):
    """A request field has a value that the service never accepts, in any state."""

    reason = "INVALID_ARGUMENT"


class NotFound(KvplaneError):
    """The named replica, slot, request or file does not exist."""

    reason = "NOT_FOUND"


class AlreadyExists(KvplaneError):
    """The name is in use already, with other settings than this request gives."""

    reason = "ALREADY_EXISTS"


class FailedPrecondition(KvplaneError):
    """The request is well formed, but the replica is not in the state that the request requires."""

    reason = "FAILED_PRECONDITION"


class StaleEpoch(FailedPrecondition):
    """The epoch of the call is not the current one: a newer one owns the replica.
    `metadata["epoch"]` is the current epoch.
    """

    reason = "STALE_EPOCH"


class ServiceRestarted(StaleEpoch):
    """The service restarted: it may have recovered the replica and its cache entries, but none of its requests."""

    reason = "SERVICE_RESTARTED"


class OtherWriter(FailedPrecondition):
    """The replica has another writer: a newer session, or, for a unary call, any open session."""

    reason = "OTHER_WRITER"


class SequenceError(FailedPrecondition):
    """The number of a step is wrong: an earlier step is missing, or a different step with this number was applied
    before.
    """

    reason = "SEQUENCE_ERROR"


class ReplicaLapsed(FailedPrecondition):
    """The replica's session has expired: the contents of its pages are unknown until a session opens or continues."""

    reason = "REPLICA_LAPSED"


class Diverged(FailedPrecondition):
    """The service that mirrors an engine has another state than the engine, or none."""

    reason = "DIVERGED"


class OpIdReused(FailedPrecondition):
    """The op_id of a call (its idempotency key) was used before, with another request."""

    reason = "OP_ID_REUSED"


class Moved(FailedPrecondition):
    """Another service process owns the replica; `metadata["address"]` is the address of that process."""

    reason = "MOVED"


class NoPlan(FailedPrecondition):
    """The replica was registered with explicit groups, so the service has no memory layout for it."""

    reason = "NO_PLAN"


class WrongPlan(FailedPrecondition):
    """The pages have another memory layout (`RankPlan`) than the caller requires."""

    reason = "WRONG_PLAN"


class WorkerExists(FailedPrecondition):
    """Another worker is registered for the rank; `metadata` has that worker's "address" and "pid"."""

    reason = "WORKER_EXISTS"


class PermissionDenied(KvplaneError):
    """The caller lacks a permission: it runs as another user, or its token or scope is missing or not sufficient."""

    reason = "PERMISSION_DENIED"


class Unauthenticated(KvplaneError):
    """The service requires authentication, and the call's credentials are missing or not valid."""

    reason = "UNAUTHENTICATED"


class OutOfMemory(KvplaneError):
    """The device has too little memory. `metadata`: bytes "asked" and "free", and "num_blocks", the blocks that would
    fit.
    """

    reason = "OUT_OF_MEMORY"


class LimitExceeded(KvplaneError):
    """A configured limit is reached. (A lack of free blocks is not this error: the step's result reports it.)"""

    reason = "LIMIT_EXCEEDED"


class QuotaExceeded(LimitExceeded):
    """A quota of the caller is exhausted; `metadata["retry_ms"]`, if present, is the time to wait before a retry."""

    reason = "QUOTA_EXCEEDED"


class Unavailable(KvplaneError):
    """The service is unreachable or shutting down; a retry is safe."""

    reason = "UNAVAILABLE"


class DeadlineExceeded(KvplaneError):
    """The deadline passed without an answer; the operation may or may not have been executed."""

    reason = "DEADLINE_EXCEEDED"


class InternalError(KvplaneError):
    """A failure inside the service: a bug, or a violated invariant. The message names it."""

    reason = "INTERNAL"


def _descendants(cls: type[KvplaneError]) -> Iterator[type[KvplaneError]]:
    for child in cls.__subclasses__():
        yield child
        yield from _descendants(child)


_BY_REASON = {cls.reason: cls for cls in _descendants(KvplaneError)}


def error_of_reason(
    reason: str, message: str, *, field: str = "", remedy: str = "", metadata: dict[str, str] | None = None
) -> KvplaneError:
    """Return an exception of the class that has this `reason`; for an unknown reason a KvplaneError with "reason" in
    its metadata.
    """
    cls = _BY_REASON.get(reason, KvplaneError)
    facts = dict(metadata or {})
    if cls is KvplaneError:
        facts["reason"] = reason
    return cls(message, field=field, remedy=remedy, metadata=facts)
