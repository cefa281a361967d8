"""States that one room reports and another shows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class StoreState(Enum):
    """How the durable side is."""

    OFF = "off"  # none is configured
    OK = "ok"
    CATCHING_UP = "catching up"  # a resync is under way
    DEGRADED = "degraded"  # the store is away, or more changes wait than may


@dataclass(frozen=True, slots=True)
class StoreReport:
    """What operators see.

    Attributes:
        lag_entries, lag_ms: changes that wait, and for how long the oldest has.
        resync_left: blocks that must still be gone through.
        failures: calls of the store that failed, since the start.
        problem: the last failure, "" when the last call went well.
    """

    state: StoreState
    lag_entries: int = 0
    lag_ms: int = 0
    resync_left: int = 0
    failures: int = 0
    problem: str = ""
