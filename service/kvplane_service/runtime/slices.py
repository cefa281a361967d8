"""Long work on the event loop: in slices, so that others go on meanwhile, and for one at a time.

A thread would be no better where the work is Python's own: it keeps the interpreter for five milliseconds at a time.
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
    """The items; whoever takes long for some of them leaves others as much time as it takes."""
    ends_s = time.monotonic() + SLICE_S
    for item in work:
        yield item
        if time.monotonic() > ends_s:
            await asyncio.sleep(SLICE_S)
            ends_s = time.monotonic() + SLICE_S


class Turns:
    """Lets one in at a time, and some wait."""

    def __init__(self, resource: str, max_waiting: int) -> None:
        self._resource = resource
        self._max_waiting = max_waiting
        self._pending = 0
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        """Wait for the turn. Raises Busy when too many wait."""
        if self._pending > self._max_waiting:
            raise Busy(f"{self._max_waiting} calls wait for {self._resource}", remedy="try again in a moment")
        self._pending += 1
        try:
            async with self._lock:
                yield
        finally:
            self._pending -= 1
