"""What a service process reports about itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version


@dataclass(slots=True)
class About:
    """Facts about the process, updated as it starts and drains.

    Attributes:
        version: version of kvplane.
        metrics_address: address of the metrics endpoint, "" if disabled.
        tracing: True if traces are exported.
        draining: True once the service drains.
        drain_asked: set when an operator calls Admin.Drain.
        wall_ns, clock_ns: functions that return nanoseconds since 1970, and monotonic nanoseconds.
        started_ns: time of creation by `clock_ns`.
    """

    version: str = field(default_factory=lambda: version("kvplane"))
    metrics_address: str = ""
    tracing: bool = False
    draining: bool = False
    drain_asked: asyncio.Event = field(default_factory=asyncio.Event)
    wall_ns: Callable[[], int] = time.time_ns
    clock_ns: Callable[[], int] = time.monotonic_ns
    started_ns: int = 0

    def __post_init__(self) -> None:
        self.started_ns = self.clock_ns()

    @property
    def uptime_ns(self) -> int:
        """Nanoseconds since this object was created."""
        return self.clock_ns() - self.started_ns
