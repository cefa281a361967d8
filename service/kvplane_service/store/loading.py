"""Read records and logs from a store: the usable ones, and the tasks that read the logs of several replicas."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from kvplane_core.face.entries import Entries
from kvplane_service.runtime.rota import Busy
from kvplane_service.store.errors import STORE_ERRORS, RecordRefused, Refusal, StoreDamaged
from kvplane_service.store.interface import IndexStore, LogName, StoredChunk
from kvplane_service.store.record import unpack_chunk
from kvplane_service.store.registration import ReplicaRecord, unpack_record
from kvplane_service.store.writer import Runtime

_AT_ONCE = 4  # logs that are read at a time
_PAUSE_S = 1.0  # between two attempts to read a log
_NS_PER_S, _NS_PER_MS = 10**9, 10**6
_CLOCK_TOLERANCE_MS = 5 * 60 * 1000

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
        """Decode a chunk of the log and add the chunk's entries."""
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
        """Decode several chunks of the log and add the entries of all of them."""
        for chunk in chunks:
            self.add(log, chunk)


@dataclass(frozen=True, slots=True)
class Load:
    """How to read the log of one replica.

    Attributes:
        is_due: returns False once the log need not be read any more.
        read: reads the log until the given time (monotonic nanoseconds). An error of the store and Busy are retried.
        give_up: called if the log could not be read in time.
        fail: called with the error's text after any other error, which ends the read and is raised by `supervise`.
    """

    is_due: Callable[[], bool]
    read: Callable[[int], Awaitable[None]]
    give_up: Callable[[], None]
    fail: Callable[[str], None]


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

    def __init__(self, runtime: Runtime, limit_ms: int) -> None:
        """After `limit_ms` milliseconds a log that cannot be read is given up."""
        self._limit_ns = limit_ms * _NS_PER_MS
        self.tasks: dict[asyncio.Task[None], str] = {}
        self.failures = 0
        self._runtime = runtime
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._failing: dict[str, _Failure] = {}
        self._tried = asyncio.Event()
        self._broken = asyncio.Event()
        self._bug: Exception | None = None

    def start(self, name: str, load: Load) -> None:
        """Read the log of the replica `name` in a background task, which continues if the caller is cancelled."""
        task = asyncio.create_task(self._run(name, load), name=f"load of {name}")
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

    async def _run(self, name: str, load: Load) -> None:
        ends_ns = None
        try:
            while load.is_due():
                try:
                    async with self._slots:
                        ends_ns = ends_ns or self._runtime.clock() + self._limit_ns
                        if load.is_due():
                            await load.read(ends_ns)
                    break
                except (*STORE_ERRORS, Busy) as error:
                    self._failed(name, error)
                if ends_ns is not None and self._runtime.clock() >= ends_ns:
                    load.give_up()
                    break
                await self._runtime.sleep(_PAUSE_S)
        except Exception as error:  # a bug: the replica must not wait for a read that has ended
            self._failed(name, error)
            load.fail(f"{type(error).__name__}: {error}")
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


async def read_record(store: IndexStore, name: str) -> ReplicaRecord | None:
    """Return the record of a replica; None if there is none or it cannot be used."""
    try:
        raw = await store.get_record(name)
        return _unpacked(name, raw) if raw is not None else None
    except (RecordRefused, StoreDamaged) as error:
        _log.warning("the store's record of %s cannot be used: %s", name, error)
        return None


async def read_records(store: IndexStore, now_ms: int) -> list[ReplicaRecord]:
    """Return the usable records of all replicas; `now_ms` is the time in milliseconds since 1970."""
    records = []
    try:
        for name, raw in await store.records():
            try:
                records.append(_unpacked(name, raw, now_ms))
            except RecordRefused as error:
                _log.warning("the store's record of %s cannot be used: %s", name, error)
    except StoreDamaged as error:
        _log.warning("the store's records are lost: %s", error)
    return records


def _unpacked(name: str, raw: bytes, now_ms: int | None = None) -> ReplicaRecord:
    record = unpack_record(raw)
    if record.name != name:
        raise RecordRefused(Refusal.MISPLACED, f"the record of {record.name[:140]!r} is stored as that of {name!r}")
    ahead_ms = 0 if now_ms is None else record.written_ms - now_ms
    if ahead_ms > _CLOCK_TOLERANCE_MS:
        what = f"it was written {ahead_ms // 1000} s after this machine's time: check the clock of this machine"
        raise RecordRefused(Refusal.FROM_THE_FUTURE, what)
    return record
