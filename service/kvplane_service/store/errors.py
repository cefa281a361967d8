"""Errors of a store. None of them changes the store."""

from __future__ import annotations

from enum import Enum

from kvplane.base.errors import FailedPrecondition, Unavailable


class StoreNewer(FailedPrecondition):
    """A newer version of kvplane wrote the store."""

    reason = "STORE_NEWER"


class StoreForeign(FailedPrecondition):
    """The existing data were not written by kvplane."""

    reason = "STORE_FOREIGN"


class StoreDenied(FailedPrecondition):
    """The store rejects the user, or does not permit the operation."""

    reason = "STORE_DENIED"


class StoreReadOnly(FailedPrecondition):
    """The store is read-only."""

    reason = "STORE_READ_ONLY"


class StoreFull(FailedPrecondition):
    """The disk is full, or the server has reached its memory limit."""

    reason = "STORE_FULL"


class StoreDamaged(FailedPrecondition):
    """More than single records is damaged. The old data are kept under another name, and the store starts empty."""

    reason = "STORE_DAMAGED"


class ClockBehindStore(FailedPrecondition):
    """The store has records of the future: this machine's clock was set back."""

    reason = "CLOCK_BEHIND_STORE"


class StoreUnavailable(Unavailable):
    """The store does not answer. The call can be retried."""

    reason = "STORE_UNAVAILABLE"


class LogSuperseded(FailedPrecondition):
    """The log has, or had, a chunk with a higher number, `number`: another process writes or wrote the log."""

    reason = "LOG_SUPERSEDED"

    def __init__(self, number: int) -> None:
        super().__init__(f"another process wrote chunk {number} of the log", field="store")
        self.number = number


STORE_ERRORS = (StoreNewer, StoreForeign, StoreDenied, StoreReadOnly, StoreFull, StoreDamaged, StoreUnavailable)


class Refusal(Enum):
    """Why a stored record is not used."""

    TRUNCATED = "truncated"  # shorter than its header states
    FOREIGN = "foreign"  # not a record of kvplane
    OTHER_VERSION = "other version"
    DAMAGED = "damaged"  # the checksum does not match
    OTHER_KIND = "other kind"
    OTHER_NAMESPACE = "other namespace"  # another registration: equal keys stand for other bytes
    OTHER_INCARNATION = "other incarnation"  # another incarnation of the page memory
    MISPLACED = "misplaced"  # stored under another number than it was written with
    IMPOSSIBLE = "impossible"  # its fields contradict each other


class RecordRefused(FailedPrecondition):
    """A stored record is not used; `why` is the reason."""

    reason = "RECORD_REFUSED"

    def __init__(self, why: Refusal, message: str) -> None:
        super().__init__(f"{why.value}: {message}", remedy="none needed: it will be rewritten, and the others are used")
        self.why = why
