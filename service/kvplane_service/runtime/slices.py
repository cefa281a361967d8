"""Run long work on the event loop in time slices, so that other tasks run in between, and for one caller at a time.

Work whose items may be long runs on a thread, which rests as often: the interpreter takes turns within an item too.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent import futures
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol, TypeVar

from kvplane_service.runtime.rota import OWNER, Places, Rota

SLICE_S = 0.001

_T = TypeVar("_T")


async def in_slices(work: Iterable[_T]) -> AsyncIterator[_T]:
    """Yield the items of `work`. After each SLICE_S seconds of work, sleep for the same time so that other tasks
    run.
    """
    ends_s = time.monotonic() + SLICE_S
    for item in work:
        yield item
        if time.monotonic() > ends_s:
            await asyncio.sleep(SLICE_S)
            ends_s = time.monotonic() + SLICE_S


def resting(work: Iterable[_T], ended: threading.Event) -> Iterator[_T]:
    """Yield the items of `work` on a thread. After each SLICE_S seconds of work, sleep for the same time, so that the
    event loop gets the interpreter. Raises CancelledError when `ended` is set: its caller does not wait any more.
    """
    ends_s = time.monotonic() + SLICE_S
    for item in work:
        yield item
        if time.monotonic() > ends_s:
            if ended.wait(SLICE_S):
                raise futures.CancelledError
            ends_s = time.monotonic() + SLICE_S


class Occupied(Protocol):
    """A resource, such as a replica, that long work may occupy: meanwhile only this work uses the resource."""

    @property
    def is_aside(self) -> bool:
        """Whether long work occupies the resource."""

    async def idle(self) -> None:
        """Wait until no long work occupies the resource. No further long work begins before the caller awaits again."""


class Turns:
    """A lock for which a bounded number of callers of each owner may wait; further callers are refused. It is given to
    the owners in turn, see `rota`.

    No caller holds the lock while it waits for long work on a replica, since callers for other replicas would wait too.
    """

    def __init__(self, resource: str, max_waiting: int) -> None:
        """`resource` is the name, in errors, of what the lock protects."""
        self._places = Places(resource, max_waiting + 1)
        self._is_held = False
        self._waiting = Rota[asyncio.Future[None]]()

    @asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        """Wait for the lock, and hold it inside the `with` block. Raises Busy if `max_waiting` callers of the owner
        already wait.
        """
        with self.place():
            async with self.turn():
                yield

    @contextmanager
    def place(self) -> Iterator[None]:
        """Count the caller as one that waits for or holds the lock, until the end of the `with` block. Raises Busy if
        `max_waiting` callers of the owner already wait.
        """
        owner = OWNER.get()
        self._places.take(owner)
        try:
            yield
        finally:
            self._places.leave(owner)

    @asynccontextmanager
    async def turn(self, replica: Occupied | None = None) -> AsyncIterator[None]:
        """Take the lock as `begin` does, and hold it inside the `with` block."""
        await self.begin(replica)
        try:
            yield
        finally:
            self.end()

    async def begin(self, replica: Occupied | None = None) -> None:
        """Wait for the lock, and take it at a moment at which no long work runs on the replica; `end` gives it back.

        A caller that gets the lock while long work occupies its replica releases the lock to other callers, and waits
        again. A caller that is cancelled while it waits does not hold the lock.
        """
        while True:
            if replica is not None:
                await replica.idle()
            await self._acquire()
            if replica is None or not replica.is_aside:
                return
            self.end()

    async def _acquire(self) -> None:
        if not self._is_held:
            self._is_held = True
            return
        given = asyncio.get_running_loop().create_future()
        self._waiting.put(OWNER.get(), given)
        try:
            await given
        except asyncio.CancelledError:
            if given.done() and not given.cancelled():
                self.end()  # it was given, and cannot be used
            raise

    def end(self) -> None:
        """Give the lock to the next caller."""
        while len(self._waiting):
            given = self._waiting.take()
            if not given.done():
                return given.set_result(None)
        self._is_held = False
