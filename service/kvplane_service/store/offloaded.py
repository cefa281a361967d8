"""Adapts a store with blocking calls to one whose calls are awaited."""

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
_REMEDY = "check the disk; allocation continues meanwhile"

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
_S = TypeVar("_S", bound=BlockingStore)


class Offloaded(Generic[_S]):
    """Implements IndexStore. Calls are serialized if `offload` has one thread, which a blocking store requires.

    A call that exceeds its timeout fails for the caller, and may take effect later, as with a remote store. No further
    call starts before its end: a hanging disk holds one thread, and no queue grows.
    """

    def __init__(self, make: Callable[[], _S], offload: Offload, timeout_s: float = 2.0) -> None:
        """`make` opens the store, and may block; `timeout_s` bounds each call except `close`."""
        self._make = make
        self._offload = offload
        self._timeout_s = timeout_s
        self._opened: _S | None = None
        self._late = set[asyncio.Task[Any]]()  # calls that outlive their callers

    async def open(self) -> None:
        """See IndexStore."""
        if self._opened is None:
            await self._do(self._open)

    def _open(self) -> None:
        """Open the store, even if the caller was cancelled meanwhile."""
        if self._opened is None:
            self._opened = self._make()

    async def _do(self, call: Callable[[], _T]) -> _T:
        if self._late:
            raise StoreUnavailable("an earlier call has not ended", field="store", remedy=_REMEDY)
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
        raise StoreUnavailable(f"a call did not end within {self._timeout_s} s", field="store", remedy=_REMEDY)

    def _ended_late(self, task: asyncio.Future[Any]) -> None:
        self._late.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.info("an abandoned call of the store failed: %s", task.exception())

    async def append(self, log: LogName, chunk: StoredChunk, trim_below: int) -> int:
        """See IndexStore."""
        return await self._do(partial(self._store.append, log, chunk, trim_below))

    async def load(self, log: LogName) -> AsyncIterator[list[StoredChunk]]:
        """See IndexStore. Chunks read before a failure are yielded first."""
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
        """See IndexStore. Waits for calls that outlived their callers."""
        store, self._opened = self._opened, None
        if store is not None:
            await self._offload(store.close)

    @property
    def _store(self) -> _S:
        if self._opened is None:  # a service closes its store before its last callers end
            raise StoreUnavailable("the store is closed", remedy="call another service, or retry later")
        return self._opened


def _read_page(chunks: Iterator[StoredChunk]) -> tuple[list[StoredChunk], KvplaneError | None]:
    page: list[StoredChunk] = []
    try:
        page.extend(islice(chunks, _PAGE))
    except KvplaneError as error:
        return page, error
    return page, None


class OffloadedShared(Offloaded[BlockingSharedStore]):
    """Implements SharedStore, for a BlockingSharedStore."""

    async def announce(self, service: str, lease_ms: int) -> None:
        """See SharedStore."""
        await self._do(partial(self._store.announce, service, lease_ms))

    async def is_announced(self, service: str) -> bool:
        """See SharedStore."""
        return await self._do(partial(self._store.is_announced, service))
