"""Makes a replay watchable: it may run ahead of a wall clock no further than its speed allows."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvplane.base.errors import InvalidArgument
from kvplane_replay.cost import NS_PER_SECOND


class Pace:
    """Holds virtual time to `speed` times real time. What is decided stays the same, only later.

    Args:
        speed: virtual seconds per second; 0 = as fast as it goes.
        now_s, sleep: the clock; passed in for tests.
    """

    def __init__(
        self,
        speed: float,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if speed < 0:
            raise InvalidArgument("must be 0 or more", field="speed")
        self._speed = speed
        self._now_s = now_s
        self._sleep = sleep
        self._started_s = now_s()

    def hold(self, clock_ns: int) -> None:
        """Wait until the wall clock has caught up with the virtual one."""
        if self._speed:
            due_s = self._started_s + clock_ns / NS_PER_SECOND / self._speed
            self._sleep(max(0.0, due_s - self._now_s()))
