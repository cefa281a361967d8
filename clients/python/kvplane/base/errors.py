"""Every refusal that kvplane makes on purpose, as one small tree of exceptions.

A refusal changes nothing: the state digest of a replica is the same before and after. Bugs are assertions,
not members of this tree. The service maps each class to a gRPC status in one table; the client maps `reason`
back to the class, so the same exception arrives whether the session runs in process or over the wire.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar


class KvplaneError(Exception):
    """An expected refusal.

    Attributes:
        reason: stable UPPER_SNAKE name, the same on the wire (`google.rpc.ErrorInfo.reason`).
        field: name of the request field at fault, "" when no single field is.
        remedy: what the caller can do about it, one sentence.
        metadata: further facts as text, such as the epoch that holds or the owner's address.
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
    """A field holds a value that no state of the service could accept."""

    reason = "INVALID_ARGUMENT"


class NotFound(KvplaneError):
    """The named replica, slot, request or file does not exist."""

    reason = "NOT_FOUND"


class AlreadyExists(KvplaneError):
    """The name is taken by something different."""

    reason = "ALREADY_EXISTS"


class FailedPrecondition(KvplaneError):
    """The request is well formed but the state it assumes does not hold."""

    reason = "FAILED_PRECONDITION"


class StaleEpoch(FailedPrecondition):
    """The caller's epoch has ended, a newer engine life owns the replica; `metadata["epoch"]` is current."""

    reason = "STALE_EPOCH"


class ServiceRestarted(StaleEpoch):
    """The service was started anew: it may know the replica and its entries, but nothing of what ran."""

    reason = "SERVICE_RESTARTED"


class OtherWriter(FailedPrecondition):
    """The replica has another writer: a newer session, or a session where a unary call was tried."""

    reason = "OTHER_WRITER"


class SequenceError(FailedPrecondition):
    """A step arrived out of order: from the future, or under a number that was used with other bytes."""

    reason = "SEQUENCE_ERROR"


class ReplicaLapsed(FailedPrecondition):
    """The replica's engine is gone or silent: nothing can be promised about its pages until a session returns."""

    reason = "REPLICA_LAPSED"


class OpIdReused(FailedPrecondition):
    """An op_id was used before, with other bytes."""

    reason = "OP_ID_REUSED"


class Moved(FailedPrecondition):
    """Another service process owns the replica. `metadata["address"]` says where."""

    reason = "MOVED"


class NoPlan(FailedPrecondition):
    """The replica was registered by explicit groups, so nobody knows what its memory looks like."""

    reason = "NO_PLAN"


class WrongPlan(FailedPrecondition):
    """Pages have another plan than is asked for."""

    reason = "WRONG_PLAN"


class WorkerExists(FailedPrecondition):
    """Another worker holds the rank. `metadata` has its "address" and "pid"."""

    reason = "WORKER_EXISTS"


class PermissionDenied(KvplaneError):
    """The caller may not do this: it runs as another user, or has not the token of the place."""

    reason = "PERMISSION_DENIED"


class Unauthenticated(KvplaneError):
    """The service asks who calls, and nothing that holds was shown."""

    reason = "UNAUTHENTICATED"


class OutOfMemory(KvplaneError):
    """The device has too little memory. `metadata`: bytes "asked" and "free", and "num_blocks" that would fit."""

    reason = "OUT_OF_MEMORY"


class LimitExceeded(KvplaneError):
    """A configured limit is reached (never: out of blocks, which is an answer)."""

    reason = "LIMIT_EXCEEDED"


class QuotaExceeded(LimitExceeded):
    """The caller's own limit is reached; `metadata["retry_ms"]`, where it is there, says when to try again."""

    reason = "QUOTA_EXCEEDED"


class Unavailable(KvplaneError):
    """The service cannot be reached or is shutting down; safe to try again."""

    reason = "UNAVAILABLE"


class DeadlineExceeded(KvplaneError):
    """No answer came in time; the operation may or may not have been done."""

    reason = "DEADLINE_EXCEEDED"


class InternalError(KvplaneError):
    """The service failed on its side: a bug, or an invariant that does not hold. The message names it."""

    reason = "INTERNAL"


def _descendants(cls: type[KvplaneError]) -> Iterator[type[KvplaneError]]:
    for child in cls.__subclasses__():
        yield child
        yield from _descendants(child)


_BY_REASON = {cls.reason: cls for cls in _descendants(KvplaneError)}


def error_of_reason(
    reason: str, message: str, *, field: str = "", remedy: str = "", metadata: dict[str, str] | None = None
) -> KvplaneError:
    """The refusal of a reason; an unknown reason becomes a KvplaneError that has it in its metadata."""
    cls = _BY_REASON.get(reason, KvplaneError)
    facts = dict(metadata or {})
    if cls is KvplaneError:
        facts["reason"] = reason
    return cls(message, field=field, remedy=remedy, metadata=facts)
