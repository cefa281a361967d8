"""Measure how long the event loop is blocked at a time. Meanwhile every client of this process waits."""

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
    """Histogram of the delays of a timer that fires a hundred times per second.

    Attributes:
        counts: number of delays in each bucket of BOUNDS_S, not cumulative; the last bucket has no upper bound.
        sum_s: sum of the delays in seconds.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, late_s: float) -> None:
        """Count a delay of `late_s` seconds."""
        self.counts[bisect_left(BOUNDS_S, late_s)] += 1
        self.sum_s += max(0.0, late_s)

    async def watch(self) -> None:
        """Measure until cancelled. If the loop was blocked for more than _LONG_S seconds, log the function that blocked
        it.
        """
        monitor = LoopMonitor(threading.get_ident())
        monitor.start()
        try:
            while True:
                monitor.back_s = began_s = time.monotonic()
                await asyncio.sleep(_PAUSE_S)
                away_s = time.monotonic() - began_s  # measured as in LoopMonitor, which then has a sample to log
                self.add(away_s - _PAUSE_S)
                if away_s > _LONG_S:
                    _log.warning("the event loop was blocked for %.2f s: %s", away_s, monitor.take())
        finally:
            monitor.end()


class LoopMonitor:
    """A thread that samples the stack of the event loop's thread while the loop is blocked for more than _LONG_S
    seconds.

    Attributes:
        back_s: time at which the loop last ran its timer (time.monotonic).
        seen: functions of the service on the last sampled stack.
    """

    def __init__(self, thread: int) -> None:
        """`thread` is the identifier of the event loop's thread."""
        self.back_s = time.monotonic()
        self.seen = ""
        self._watched = thread
        self._ended = threading.Event()

    def start(self) -> None:
        """Start the sampling thread."""
        threading.Thread(target=self._run, name="kvplane loop holds", daemon=True).start()

    def end(self) -> None:
        """End the sampling thread."""
        self._ended.set()

    def take(self) -> str:
        """Return the functions of the last sample, and clear it."""
        seen, self.seen = self.seen, ""
        return seen or "by the machine, or by code outside of kvplane_service"

    def _run(self) -> None:
        while not self._ended.wait(_LONG_S / 2):
            if time.monotonic() - self.back_s > _LONG_S:
                self.seen = _describe(sys._current_frames().get(self._watched)) or self.seen


def _describe(frame: FrameType | None) -> str:
    """Return the outermost and the innermost function of the service on the stack, "" if there is none."""
    ours = []
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith(("kvplane_core.", "kvplane_service.")):
            ours.append(f"{module.removeprefix('kvplane_service.').removeprefix('kvplane_')}.{frame.f_code.co_name}")
        frame = frame.f_back
    return ", in ".join(dict.fromkeys((ours[-1], ours[0]))) if ours else ""
