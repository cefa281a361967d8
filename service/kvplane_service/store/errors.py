"""What a store refuses, by name. Each changes nothing in the store."""

from __future__ import annotations

from enum import Enum

from kvplane.base.errors import FailedPrecondition, Unavailable


class StoreNewer(FailedPrecondition):
    """A newer version of kvplane wrote the store."""

    reason = "STORE_NEWER"


class StoreForeign(FailedPrecondition):
    """What is there was not written by kvplane."""

    reason = "STORE_FOREIGN"


class StoreDenied(FailedPrecondition):
    """The store does not know the user, or does not let it do this."""

    reason = "STORE_DENIED"


class StoreReadOnly(FailedPrecondition):
    """The store cannot be written."""

    reason = "STORE_READ_ONLY"


class StoreFull(FailedPrecondition):
    """No room is left: the disk is full, or the server is at its memory limit."""

    reason = "STORE_FULL"


class StoreDamaged(FailedPrecondition):
    """More of the store is damaged than single records. What was there is kept beside, and the store begins anew."""

    reason = "STORE_DAMAGED"


class ClockBehindStore(FailedPrecondition):
    """The store holds records of the future: this machine's clock was set back."""

    reason = "CLOCK_BEHIND_STORE"


class StoreUnavailable(Unavailable):
    """The store does not answer; safe to try again."""

    reason = "STORE_UNAVAILABLE"


class LogSuperseded(FailedPrecondition):
    """The log had a chunk with a higher number: another process writes it, or did. `number` is that of such a chunk."""

    reason = "LOG_SUPERSEDED"

    def __init__(self, number: int) -> None:
        super().__init__(f"another process wrote chunk {number} of the log", field="store")
        self.number = number


STORE_ERRORS = (StoreNewer, StoreForeign, StoreDenied, StoreReadOnly, StoreFull, StoreDamaged, StoreUnavailable)


class Refusal(Enum):
    """Why a stored record is not used."""

    TRUNCATED = "truncated"  # shorter than it says
    FOREIGN = "foreign"  # no record of kvplane
    OTHER_VERSION = "other version"
    DAMAGED = "damaged"  # its checksum is another
    OTHER_KIND = "other kind"
    OTHER_NAMESPACE = "other namespace"  # another registration: other bytes under equal names
    OTHER_INCARNATION = "other incarnation"  # another life of the page memory
    MISPLACED = "misplaced"  # stored under another number than it was written for
    IMPOSSIBLE = "impossible"  # its parts contradict each other


class RecordRefused(FailedPrecondition):
    """A stored record that is not used. `why` names it."""

    reason = "RECORD_REFUSED"

    def __init__(self, why: Refusal, message: str) -> None:
        super().__init__(f"{why.value}: {message}", remedy="nothing: the rest is used, and it is written anew in time")
        self.why = why
