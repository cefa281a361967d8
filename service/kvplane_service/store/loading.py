"""Read logs from a store: the usable entries of a log, and the tasks that read the logs of several replicas."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from kvplane_service.core.entries import Entries
from kvplane_service.runtime.executors import Busy
from kvplane_service.store.errors import STORE_ERRORS, RecordRefused, Refusal
from kvplane_service.store.interface import LogName, StoredChunk
from kvplane_service.store.record import unpack_chunk
from kvplane_service.store.writer import Runtime

_AT_ONCE = 4  # logs that are read at a time
_PAUSE_S = 1.0  # between two attempts to read a log
_NS_PER_S = 10**9

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class LoadedLog:
    """A log as read from the store.

    Attributes:
        chunks: the chunks with their entries; None instead of the entries of a refused chunk.
        rows: number of entries.
        num_bytes: size of all chunks.
        refused: number of refused chunks by reason.
    """

    chunks: list[tuple[StoredChunk, Entries | None]] = field(default_factory=list)
    rows: int = 0
    num_bytes: int = 0
    refused: Counter[Refusal] = field(default_factory=Counter)

    def entries(self) -> list[Entries]:
        """Return the entries of the usable chunks, newest chunk first: so the first of several entries of one block is
        its current one.
        """
        return [entries for _, entries in reversed(self.chunks) if entries is not None]

    def add(self, log: LogName, chunk: StoredChunk) -> None:
        """Decode a chunk of the log and add the chunk's entries (states of blocks)."""
        self.num_bytes += len(chunk.raw)
        try:
            entries = unpack_chunk(log, chunk)
        except RecordRefused as error:
            self.refused[error.why] += 1
            self.chunks.append((chunk, None))
        else:
            self.rows += len(entries)
            self.chunks.append((chunk, entries))

    def add_all(self, log: LogName, chunks: Iterable[StoredChunk]) -> None:
        """Decode several chunks of the log and add the entries (states of blocks) of all of them."""
        for chunk in chunks:
            self.add(log, chunk)


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a log is not read, and since when (monotonic nanoseconds)."""

    error: BaseException
    since_ns: int


class Loads:
    """Reads the logs of replicas in tasks of their own, a few at a time. A log that cannot be read delays no other one.

    Attributes:
        tasks: the reads that have not ended, each with the name of its replica.
        failures: number of attempts that failed.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.tasks: dict[asyncio.Task[None], str] = {}
        self.failures = 0
        self._runtime = runtime
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._failing: dict[str, _Failure] = {}
        self._tried = asyncio.Event()
        self._broken = asyncio.Event()
        self._bug: Exception | None = None

    def start(
        self, name: str, is_due: Callable[[], bool], read: Callable[[], Awaitable[None]], fail: Callable[[str], None]
    ) -> None:
        """Read the log of the replica `name` in a background task, which continues if the caller is cancelled.

        Args:
            is_due: returns False once the log need not be read any more.
            read: reads the log. An error of the store and Busy are retried.
            fail: called with the error's text after any other error, which ends the read and is raised by `supervise`.
        """
        task = asyncio.create_task(self._run(name, is_due, read, fail), name=f"load of {name}")
        self.tasks[task] = name
        task.add_done_callback(self._ended)

    async def wait(self) -> None:
        """Wait until all logs are read, or one of them cannot be read now."""
        self._tried.clear()
        self._note_tried()
        await self._tried.wait()

    async def supervise(self) -> None:
        """Wait until a read ends with an error other than one of the store, and raise it."""
        await self._broken.wait()
        assert self._bug is not None, "set with the event"
        raise self._bug

    def cancel(self) -> None:
        """Cancel all reads."""
        for task in self.tasks:
            task.cancel()

    def problem(self, name: str | None = None) -> str:
        """Return why the log of the replica `name`, or of any replica, cannot be read, and for how long; "" if there is
        no problem.
        """
        name = next(iter(self._failing), "") if name is None else name
        failure = self._failing.get(name)
        if failure is None:
            return ""
        return f"the entries of {name} have not been readable for {self._age_s(failure)} s: {failure.error}"

    async def _run(
        self, name: str, is_due: Callable[[], bool], read: Callable[[], Awaitable[None]], fail: Callable[[str], None]
    ) -> None:
        try:
            while is_due():
                try:
                    async with self._slots:
                        if is_due():
                            await read()
                    break
                except (*STORE_ERRORS, Busy) as error:
                    self._failed(name, error)
                await self._runtime.sleep(_PAUSE_S)
        except Exception as error:  # a bug: the replica must not wait for a read that has ended
            self._failed(name, error)
            fail(f"{type(error).__name__}: {error}")
            self._bug = self._bug or error
            self._broken.set()
            return
        failure = self._failing.pop(name, None)
        if failure is not None:
            _log.info("the entries of %s need not be read any more, %d s after a failure", name, self._age_s(failure))

    def _failed(self, name: str, error: Exception) -> None:
        self.failures += 1
        before = self._failing.get(name)
        if before is None:
            _log.warning("the entries of %s cannot be read, so it stays recovering: %s", name, error)
        self._failing[name] = _Failure(error, before.since_ns if before else self._runtime.clock())
        self._note_tried()

    def _ended(self, task: asyncio.Task[None]) -> None:
        name = self.tasks.pop(task)
        if task.cancelled():
            self._failing.pop(name, None)
        self._note_tried()

    def _note_tried(self) -> None:
        if self._failing or not self.tasks:
            self._tried.set()

    def _age_s(self, failure: _Failure) -> int:
        return (self._runtime.clock() - failure.since_ns) // _NS_PER_S
