"""Long work on the event loop: in slices, so that other tasks run in between, and for one caller at a time.

A thread is no alternative for pure Python work: it holds the interpreter for several milliseconds at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar

from kvplane_service.runtime.executors import Busy

SLICE_S = 0.001

_T = TypeVar("_T")


async def in_slices(work: Iterable[_T]) -> AsyncIterator[_T]:
    """Yield the items. After each SLICE_S of work, sleep as long, so that other tasks of the event loop run."""
    ends_s = time.monotonic() + SLICE_S
    for item in work:
        yield item
        if time.monotonic() > ends_s:
            await asyncio.sleep(SLICE_S)
            ends_s = time.monotonic() + SLICE_S


class Turns:
    """A lock with a bounded number of waiting callers."""

    def __init__(self, resource: str, max_waiting: int) -> None:
        self._resource = resource
        self._max_waiting = max_waiting
        self._pending = 0
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        """Wait for the lock and hold it. Raises Busy when too many callers wait."""
        if self._pending > self._max_waiting:
            what = f"{self._max_waiting} calls wait for {self._resource}"
            raise Busy(what, remedy="retry with fewer concurrent calls")
        self._pending += 1
        try:
            async with self._lock:
                yield
        finally:
            self._pending -= 1
