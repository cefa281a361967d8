"""Deadlines of blocking reads: one thread per process cancels each stream whose read takes too long.

gRPC's blocking streams have no timeout for a read. A timer per read would start a thread for each step; with the
watchdog a step only stores its deadline.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol
from weakref import WeakSet

TICK_S = 0.1  # a deadline is enforced at most this late
NEVER = float("inf")


class Watched(Protocol):
    """A stream with a deadline for its current read.

    Attributes:
        deadline_s: deadline in seconds of `time.monotonic`; NEVER while no read waits.
    """

    deadline_s: float

    def is_late(self) -> None:
        """End the current read. The watchdog calls this method when the read's deadline has passed."""
        ...


class Watchdog:
    """Cancel each stream whose deadline has passed. The watchdog's thread runs only while streams are watched."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: WeakSet[Watched] = WeakSet()  # weak: a stream that is garbage collected ends itself
        self._is_running = False

    def watch(self, one: Watched) -> None:
        """Enforce the deadline of a stream from now on."""
        with self._lock:
            self._watched.add(one)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="kvplane-deadlines", daemon=True).start()

    def forget(self, one: Watched) -> None:
        """Stop enforcing the deadline of a stream. Does nothing for a stream that is not watched."""
        with self._lock:
            self._watched.discard(one)

    def _run(self) -> None:
        while True:
            time.sleep(TICK_S)
            with self._lock:
                if not self._watched:
                    self._is_running = False
                    return
                now = time.monotonic()
                late = [one for one in self._watched if one.deadline_s <= now]
            for one in late:
                one.is_late()


WATCHDOG = Watchdog()
