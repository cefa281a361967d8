"""How long the event loop was held at a time. Whoever is served by this process waits as long."""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_left

BOUNDS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 10.0)
_PAUSE_S = 0.01
_LONG_S = 1.0

_log = logging.getLogger(__name__)


class Holds:
    """Histogram of how late a timer comes that is set a hundred times a second.

    Attributes:
        counts: by bucket, not cumulative; one more than there are bounds.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, late_s: float) -> None:
        """A timer came so late."""
        self.counts[bisect_left(BOUNDS_S, late_s)] += 1
        self.sum_s += max(0.0, late_s)
        if late_s > _LONG_S:
            _log.warning("the event loop was held for %.1f s: nothing was answered meanwhile", late_s)

    async def watch(self) -> None:
        """Measure until cancelled."""
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(_PAUSE_S)
            self.add(time.monotonic() - began_s - _PAUSE_S)
