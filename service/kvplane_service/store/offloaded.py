"""A store whose calls block, as one whose calls are awaited."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar

from kvplane.base.errors import KvplaneError
from kvplane_service.runtime.executors import Offload
from kvplane_service.store.errors import StoreUnavailable
from kvplane_service.store.interface import BlockingSharedStore, BlockingStore, LogName, StoredChunk

_PAGE = 64  # chunks
_REMEDY = "look at the disk; allocation goes on meanwhile"

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
_S = TypeVar("_S", bound=BlockingStore)


class Offloaded(Generic[_S]):
    """Implements IndexStore. Calls wait for each other where `offload` has one thread, as a blocking store wants it.

    A call that does not end in time fails for its caller, and may be carried out later, as with a store in a network.
    Until it has ended no further call begins: a disk that hangs holds one thread, and no queue grows behind it.
    """

    def __init__(self, make: Callable[[], _S], offload: Offload, timeout_s: float = 2.0) -> None:
        """`make` opens the store, and blocks too; `timeout_s` bounds each call but `close`."""
        self._make = make
        self._offload = offload
        self._timeout_s = timeout_s
        self._opened: _S | None = None
        self._late = set[asyncio.Task[Any]]()  # calls that go on without their callers

    async def open(self) -> None:
        """See IndexStore."""
        if self._opened is None:
            await self._do(self._open)

    def _open(self) -> None:
        """A caller that has gone opens it nevertheless."""
        if self._opened is None:
            self._opened = self._make()

    async def _do(self, call: Callable[[], _T]) -> _T:
        if self._late:
            raise StoreUnavailable("it has not ended an earlier call", field="store", remedy=_REMEDY)
        task = asyncio.ensure_future(self._offload(call))
        try:
            await asyncio.wait([task], timeout=self._timeout_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if task.done():
            return task.result()
        self._late.add(task)
        task.add_done_callback(self._ended_late)
        raise StoreUnavailable(f"no end of a call within {self._timeout_s} s", field="store", remedy=_REMEDY)

    def _ended_late(self, task: asyncio.Future[Any]) -> None:
        self._late.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.info("a call of the store that was given up failed: %s", task.exception())

    async def append(self, log: LogName, chunk: StoredChunk, trim_below: int) -> int:
        """See IndexStore."""
        return await self._do(partial(self._store.append, log, chunk, trim_below))

    async def load(self, log: LogName) -> AsyncIterator[list[StoredChunk]]:
        """See IndexStore. What was read before the store failed is given first."""
        chunks = self._store.load(log)
        while True:
            page, error = await self._do(partial(_read_page, chunks))
            if page:
                yield page
            if error is not None:
                raise error
            if len(page) < _PAGE:
                return

    async def drop(self, log: LogName) -> None:
        """See IndexStore."""
        await self._do(partial(self._store.drop, log))

    async def size_bytes(self, log: LogName) -> int:
        """See IndexStore."""
        return await self._do(partial(self._store.size_bytes, log))

    async def put_record(self, replica: str, record: bytes) -> None:
        """See IndexStore."""
        await self._do(partial(self._store.put_record, replica, record))

    async def get_record(self, replica: str) -> bytes | None:
        """See IndexStore."""
        return await self._do(partial(self._store.get_record, replica))

    async def records(self) -> list[tuple[str, bytes]]:
        """See IndexStore."""
        return await self._do(lambda: list(self._store.records()))

    async def drop_record(self, replica: str) -> None:
        """See IndexStore."""
        await self._do(partial(self._store.drop_record, replica))

    async def keep_alive(self, log: LogName) -> None:
        """See IndexStore."""
        await self._do(partial(self._store.keep_alive, log))

    async def close(self) -> None:
        """See IndexStore. It waits for calls that go on without their callers."""
        store, self._opened = self._opened, None
        if store is not None:
            await self._offload(store.close)

    @property
    def _store(self) -> _S:
        if self._opened is None:  # a service that ends closes it before its last callers have gone
            raise StoreUnavailable("the store is closed", remedy="ask another service, or this one when it is back")
        return self._opened


def _read_page(chunks: Iterator[StoredChunk]) -> tuple[list[StoredChunk], KvplaneError | None]:
    page: list[StoredChunk] = []
    try:
        page.extend(islice(chunks, _PAGE))
    except KvplaneError as error:
        return page, error
    return page, None


class OffloadedShared(Offloaded[BlockingSharedStore]):
    """Implements SharedStore."""

    async def announce(self, service: str, lease_ms: int) -> None:
        """See SharedStore."""
        await self._do(partial(self._store.announce, service, lease_ms))

    async def is_announced(self, service: str) -> bool:
        """See SharedStore."""
        return await self._do(partial(self._store.is_announced, service))
