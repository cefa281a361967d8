"""Deadlines of blocking reads: one thread per process cancels the streams whose deadline passed.

gRPC's blocking streams have no timeout for a read. A timer per step would cost a thread per step; here a step only sets
a number.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol
from weakref import WeakSet

TICK_S = 0.1  # a deadline is enforced at most this late
NEVER = float("inf")


class Watched(Protocol):
    """Attributes:
    deadline_s: in seconds of `time.monotonic`; NEVER while no read waits.
    """

    deadline_s: float

    def is_late(self) -> None:
        """The deadline passed: end the read."""
        ...


class Watchdog:
    """Its thread runs while there is a stream to watch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: WeakSet[Watched] = WeakSet()  # weak: a stream that is garbage collected ends itself
        self._is_running = False

    def watch(self, one: Watched) -> None:
        """Enforce this stream's deadline from now on."""
        with self._lock:
            self._watched.add(one)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="kvplane-deadlines", daemon=True).start()

    def forget(self, one: Watched) -> None:
        """Stop enforcing it. Idempotent."""
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
