"""How long the event loop was held at a time. Whoever is served by this process waits as long."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from bisect import bisect_left
from types import FrameType

BOUNDS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 10.0)
_PAUSE_S = 0.01
_LONG_S = 0.1

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

    async def watch(self) -> None:
        """Measure until cancelled; the log says what ran when it was held for long."""
        monitor = LoopMonitor(threading.get_ident())
        monitor.start()
        try:
            while True:
                monitor.back_s = began_s = time.monotonic()
                await asyncio.sleep(_PAUSE_S)
                away_s = time.monotonic() - began_s  # as the monitor counts: what it saw is logged
                self.add(away_s - _PAUSE_S)
                if away_s > _LONG_S:
                    _log.warning("the event loop was held for %.2f s: %s", away_s, monitor.take())
        finally:
            monitor.end()


class LoopMonitor:
    """A thread that looks what another one does when that has not come back for long.

    Attributes:
        back_s: when it was back, by time.monotonic.
        seen: what of ours it did at the last look.
    """

    def __init__(self, thread: int) -> None:
        """`thread`: its identifier."""
        self.back_s = time.monotonic()
        self.seen = ""
        self._watched = thread
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin to look."""
        threading.Thread(target=self._run, name="kvplane loop holds", daemon=True).start()

    def end(self) -> None:
        """Look no longer."""
        self._ended.set()

    def take(self) -> str:
        """What was seen, once."""
        seen, self.seen = self.seen, ""
        return seen or "by the machine, or by what is not ours"

    def _run(self) -> None:
        while not self._ended.wait(_LONG_S / 2):
            if time.monotonic() - self.back_s > _LONG_S:
                self.seen = _describe(sys._current_frames().get(self._watched)) or self.seen


def _describe(frame: FrameType | None) -> str:
    """Our outermost function that the event loop called, and our innermost; "" when none of ours runs."""
    ours = []
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("kvplane_service.") and not module.startswith("kvplane_service.cli"):
            ours.append(f"{module.removeprefix('kvplane_service.')}.{frame.f_code.co_name}")
        frame = frame.f_back
    return ", in ".join(dict.fromkeys((ours[-1], ours[0]))) if ours else ""
