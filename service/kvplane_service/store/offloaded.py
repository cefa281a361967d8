"""Adapt a store with blocking calls to an IndexStore, whose calls are awaited."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial, wraps
from itertools import islice
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from kvplane.base.errors import KvplaneError
from kvplane_service.runtime.executors import Offload
from kvplane_service.runtime.rota import Busy
from kvplane_service.store.errors import StoreUnavailable
from kvplane_service.store.interface import BlockingSharedStore, BlockingStore, LogName, StoredChunk

_PAGE = 64  # chunks that one call reads
_CLOSE_RETRY_S = 0.05
_REMEDY = "check the disk; allocation continues meanwhile"

_log = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")
_S = TypeVar("_S", bound=BlockingStore)


def _on_thread(
    method: Callable[Concatenate[Any, _P], _T],
) -> Callable[Concatenate[Offloaded[Any], _P], Coroutine[Any, Any, _T]]:
    """Return the method that awaits this one of the opened store."""

    @wraps(method)
    async def call(self: Offloaded[Any], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return await self._do(partial(getattr(self._store, method.__name__), *args, **kwargs))

    return call


class Offloaded(Generic[_S]):
    """Implements IndexStore by calling a BlockingStore on a thread. `offload` must have a single thread, because a
    blocking store allows one call at a time.

    A call that exceeds its timeout fails for the caller, and may take effect later, as with a remote store. No further
    call starts before the late one ends, so a disk that hangs blocks one thread, and no queue grows.
    """

    def __init__(self, make: Callable[[], _S], offload: Offload, timeout_s: float = 2.0) -> None:
        """`make` opens the store, and may block. `timeout_s` limits each call except `close`."""
        self._make = make
        self._offload = offload
        self._timeout_s = timeout_s
        self._opened: _S | None = None
        self._late = set[asyncio.Task[Any]]()  # calls that exceeded their timeout and still run

    async def open(self) -> None:
        """Open the store (see IndexStore.open)."""
        if self._opened is None:
            await self._do(self._open)

    def _open(self) -> None:
        """Open the store on the thread. The store stays open if the caller was cancelled meanwhile."""
        if self._opened is None:
            self._opened = self._make()

    async def _do(self, call: Callable[[], _T]) -> _T:
        if self._late:
            what = f"an earlier call has not ended, although its timeout of {self._timeout_s} s has passed"
            raise StoreUnavailable(what, field="store", remedy=_REMEDY)
        task = asyncio.ensure_future(self._offload(call))
        try:
            await asyncio.wait([task], timeout=self._timeout_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if task.done():
            try:
                return task.result()
            except Busy as error:  # the call has not run
                raise StoreUnavailable(error.message, field="store", remedy=_REMEDY) from error
        self._late.add(task)
        task.add_done_callback(self._ended_late)
        raise StoreUnavailable(f"the call did not end within {self._timeout_s} s", field="store", remedy=_REMEDY)

    def _ended_late(self, task: asyncio.Future[Any]) -> None:
        self._late.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.info("a call of the store failed after its timeout: %s", task.exception())

    async def load(self, log: LogName) -> AsyncIterator[list[StoredChunk]]:
        """Yield the chunks of a log (see IndexStore.load). Chunks read before a failure are yielded first."""
        chunks = self._store.load(log)
        while True:
            page, error = await self._do(partial(_read_page, chunks))
            if page:
                yield page
            if error is not None:
                raise error
            if len(page) < _PAGE:
                return

    async def records(self) -> list[tuple[str, bytes]]:
        """Return all pairs of name and record (see IndexStore.records)."""
        return await self._do(lambda: list(self._store.records()))

    append = _on_thread(BlockingStore.append)
    drop = _on_thread(BlockingStore.drop)
    size_bytes = _on_thread(BlockingStore.size_bytes)
    keep_alive = _on_thread(BlockingStore.keep_alive)
    put_record = _on_thread(BlockingStore.put_record)
    get_record = _on_thread(BlockingStore.get_record)
    drop_record = _on_thread(BlockingStore.drop_record)

    async def close(self) -> None:
        """Close the store after calls that exceeded their timeout have ended (see IndexStore.close). Waits as long as
        too many calls of others wait for the thread.
        """
        store, self._opened = self._opened, None
        while store is not None:
            try:
                await self._offload(store.close)
            except Busy:
                await asyncio.sleep(_CLOSE_RETRY_S)
            else:
                return

    @property
    def _store(self) -> _S:
        if self._opened is None:  # a service closes its store before its last callers end
            what = "the service has closed its store, because it is shutting down"
            raise StoreUnavailable(what, field="store", remedy="call another service, or retry later")
        return self._opened


def _read_page(chunks: Iterator[StoredChunk]) -> tuple[list[StoredChunk], KvplaneError | None]:
    page: list[StoredChunk] = []
    try:
        page.extend(islice(chunks, _PAGE))
    except KvplaneError as error:
        return page, error
    return page, None


class OffloadedShared(Offloaded[BlockingSharedStore]):
    """Implements SharedStore by calling a BlockingSharedStore on a thread."""

    announce = _on_thread(BlockingSharedStore.announce)
    lease = _on_thread(BlockingSharedStore.lease)
