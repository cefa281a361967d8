"""Types of states that one package reports and another displays."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class StoreState(Enum):
    """State of the connection to the store."""

    OFF = "off"  # no store is configured
    OK = "ok"
    CATCHING_UP = "catching up"  # all blocks of a replica are being written again
    DEGRADED = "degraded"  # the store is unavailable, or the backlog exceeds its limits


@dataclass(frozen=True, slots=True)
class StoreReport:
    """State of the store as operators see it.

    Attributes:
        lag_entries: number of changes not yet written to the store.
        lag_ms: age in milliseconds of the oldest change that is not yet written.
        resync_left: number of blocks that are still to be written again, after the store lost data or changes were
            dropped.
        failures: number of failed store calls since the start of the process.
        problem: text of the last failure; "" if the last call succeeded.
    """

    state: StoreState
    lag_entries: int = 0
    lag_ms: int = 0
    resync_left: int = 0
    failures: int = 0
    problem: str = ""
