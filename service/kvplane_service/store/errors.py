"""Errors of stores. A call that raises one of them has not changed the store."""

from __future__ import annotations

from enum import Enum

from kvplane.base.errors import FailedPrecondition, Unavailable


class StoreNewer(FailedPrecondition):
    """A newer version of kvplane wrote the store, in a format that this version does not support."""

    reason = "STORE_NEWER"


class StoreForeign(FailedPrecondition):
    """The file or the Redis keys contain data that kvplane did not write."""

    reason = "STORE_FOREIGN"


class StoreDenied(FailedPrecondition):
    """The store rejects the user, or does not permit the user to make the call."""

    reason = "STORE_DENIED"


class StoreReadOnly(FailedPrecondition):
    """The store cannot be written."""

    reason = "STORE_READ_ONLY"


class StoreInUse(FailedPrecondition):
    """Another process has the store, which is for one process."""

    reason = "STORE_IN_USE"


class StoreFull(FailedPrecondition):
    """The disk is full, or the server has reached its memory limit."""

    reason = "STORE_FULL"


class StoreDamaged(FailedPrecondition):
    """The store as a whole is damaged. The old data are kept under another name, and the store starts empty."""

    reason = "STORE_DAMAGED"


class StoreUnavailable(Unavailable):
    """The store does not answer. The call can be retried."""

    reason = "STORE_UNAVAILABLE"


class LogSuperseded(FailedPrecondition):
    """The log of a replica has, or had, a chunk with a higher number than the one to append: another process writes or
    wrote the log.

    Attributes:
        number: the higher number.
    """

    reason = "LOG_SUPERSEDED"

    def __init__(self, number: int) -> None:
        what, remedy = f"another process has written chunk {number} to the log", "check which service owns the replica"
        super().__init__(what, field="store", remedy=remedy)
        self.number = number


STORE_ERRORS = (
    StoreNewer,
    StoreForeign,
    StoreDenied,
    StoreReadOnly,
    StoreInUse,
    StoreFull,
    StoreDamaged,
    StoreUnavailable,
)


class Refusal(Enum):
    """The reason for which a stored record is not used."""

    TRUNCATED = "truncated"  # shorter than its header states
    FOREIGN = "foreign"  # not a record of kvplane
    OTHER_VERSION = "other version"
    DAMAGED = "damaged"  # the checksum does not match
    OTHER_KIND = "other kind"
    OTHER_NAMESPACE = "other namespace"  # of another registration, in which equal keys mean other page contents
    OTHER_INCARNATION = "other incarnation"  # another incarnation of the page memory
    MISPLACED = "misplaced"  # its number is not the number under which it is stored
    NOT_PROVEN = "not proven"  # no key of the service seals it: forged, copied from another place, or without a seal
    SEALED = "sealed"  # by a key, and this service has none
    FROM_THE_FUTURE = "from the future"  # it was written after this machine's time
    IMPOSSIBLE = "impossible"  # its fields contradict each other or are out of range


class RecordRefused(FailedPrecondition):
    """A stored record is not used.

    Attributes:
        why: the reason.
    """

    reason = "RECORD_REFUSED"

    def __init__(self, why: Refusal, message: str) -> None:
        remedy = "nothing to do: the service writes the record again, and uses the other records"
        super().__init__(f"{why.value}: {message}", remedy=remedy)
        self.why = why
