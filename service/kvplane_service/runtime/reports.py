"""States that one room reports and another displays."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class StoreState(Enum):
    """State of the store connection."""

    OFF = "off"  # no store is configured
    OK = "ok"
    CATCHING_UP = "catching up"  # a resync is under way
    DEGRADED = "degraded"  # the store is unavailable, or the backlog exceeds its limits


@dataclass(frozen=True, slots=True)
class StoreReport:
    """State of the store as operators see it.

    Attributes:
        lag_entries, lag_ms: number of unwritten changes, and age of the oldest one.
        resync_left: blocks that a resync has still to process.
        failures: failed store calls since the start.
        problem: the last failure, "" when the last call succeeded.
    """

    state: StoreState
    lag_entries: int = 0
    lag_ms: int = 0
    resync_left: int = 0
    failures: int = 0
    problem: str = ""
