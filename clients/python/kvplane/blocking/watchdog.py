"""Deadlines of blocking reads: one thread of the process ends the streams on which nothing came in time.

gRPC's blocking streams take no time-out for a read. A timer for each step would cost a thread for each step; here a
step costs the setting of a number.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol
from weakref import WeakSet

TICK_S = 0.1  # by as much a deadline may be missed
NEVER = float("inf")


class Watched(Protocol):
    """Attributes:
    deadline_s: of `time.monotonic`; NEVER while nobody waits.
    """

    deadline_s: float

    def is_late(self) -> None:
        """End what waits."""
        ...


class Watchdog:
    """Its thread lives while there is something to watch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: WeakSet[Watched] = WeakSet()  # a stream that is dropped ends by itself
        self._is_running = False

    def watch(self, one: Watched) -> None:
        """Look at its deadline from now on."""
        with self._lock:
            self._watched.add(one)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="kvplane-deadlines", daemon=True).start()

    def forget(self, one: Watched) -> None:
        """Look no more. Idempotent."""
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
