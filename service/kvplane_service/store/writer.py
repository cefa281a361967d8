"""Write chunks of the journals to the store, in the background.

No step waits for the writer. While the store is unavailable, the writer retries with increasing pauses, and changes
stay in the journals, which drop them at their limit. So the writer has no queue, and needs no special code to catch up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvplane.base.errors import KvplaneError
from kvplane_service.config import Config
from kvplane_service.runtime.executors import Offload
from kvplane_service.runtime.reports import StoreReport, StoreState
from kvplane_service.store.errors import STORE_ERRORS, LogSuperseded, StoreUnavailable
from kvplane_service.store.interface import IndexStore, LogName
from kvplane_service.store.journal import ReplicaJournal

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 5.0
_NS_PER_MS = 1_000_000
_RENEWALS_PER_TTL = 4
_MAX_DROPS = 4096

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Runtime:
    """Clock, sleep, threads and random numbers for the code of the store, so that a simulation can replace these.

    Attributes:
        clock: returns monotonic nanoseconds.
        sleep: asyncio.sleep, in seconds.
        offload: runs a blocking call on a thread.
        jitter: returns a random number in [0, 1).
    """

    clock: Callable[[], int]
    sleep: Callable[[float], Awaitable[None]]
    offload: Offload
    jitter: Callable[[], float]


@dataclass(slots=True)
class Watch:
    """A replica whose changes the writer stores.

    Attributes:
        journal: changes of the replica that are not stored yet.
        record: returns the serialized current record.
        idle: waits until no step is being applied on a thread, so that the core may be read.
        superseded: called with the number of a chunk that another process wrote to the log; returns True if all entries
            will be written again.
        record_due: True if the record has changed since it was stored.
        renewed_ns: monotonic time, in nanoseconds, at which the record was last stored.
        may_record: called before the record is stored; returns False if it is another process's; None = always.
    """

    journal: ReplicaJournal
    record: Callable[[], bytes]
    idle: Callable[[], Awaitable[None]]
    superseded: Callable[[int], Awaitable[bool]]
    record_due: bool = True
    renewed_ns: int = 0
    may_record: Callable[[], Awaitable[bool]] | None = None


class StoreWriter:
    """Writes the changes of all watched replicas to a store."""

    def __init__(self, store: IndexStore, config: Config, runtime: Runtime) -> None:
        self.store = store
        self._config = config
        self._runtime = runtime
        self._watched: dict[str, Watch] = {}
        self._drops: dict[str, LogName] = {}  # logs to delete, by the log's text
        self._gone: dict[str, None] = {}  # replicas whose records are to be deleted
        self._failures = 0
        self._problem = ""
        self._away_since_ns: int | None = None
        self._pause_s = 0.0
        self._one_at_a_time = asyncio.Lock()  # a release writes all pending changes, concurrently with the loop

    # -- watched replicas --------------------------------------------------------------------------------------------

    def watch(self, name: str, watch: Watch) -> None:
        """Start writing the changes of a replica to the store."""
        self._gone.pop(name, None)
        self._watched[name] = watch

    def leave(self, name: str) -> Watch | None:
        """Stop writing a replica, and return what was watched, None if it was not watched. The replica's data stay in
        the store.
        """
        return self._watched.pop(name, None)

    def forget(self, name: str) -> None:
        """Stop writing a replica that was deregistered, and delete its data from the store."""
        watch = self.leave(name)
        if watch is not None:
            self.drop(watch.journal.log)
            self._gone[name] = None

    def drop(self, log: LogName) -> None:
        """Delete a log from the store in the next round of the writer's loop. If too many deletions wait, the oldest
        log is left to expire.
        """
        self._drops[str(log)] = log
        if len(self._drops) > _MAX_DROPS:
            del self._drops[next(iter(self._drops))]

    def is_recorded(self, name: str) -> bool:
        """Return True if the store has the current record of the replica."""
        return name in self._watched and not self._watched[name].record_due

    def record_changed(self, name: str) -> None:
        """Store the record of the replica again in the next round of the writer's loop."""
        if name in self._watched:
            self._watched[name].record_due = True

    # -- state -------------------------------------------------------------------------------------------------------

    def report(self, name: str | None = None) -> StoreReport:
        """Return the state of the store for one replica, or for all replicas if `name` is None."""
        watched = [self._watched[name]] if name in self._watched else [] if name else list(self._watched.values())
        lags = [watch.journal.lag for watch in watched]
        lag_ms = max((lag.waiting_ns for lag in lags), default=0) // _NS_PER_MS
        left = sum(lag.resync_left for lag in lags)
        if any(lag.shed for lag in lags) or lag_ms > self._config.store_lag_ms or self._problem:
            state = StoreState.DEGRADED
        else:
            state = StoreState.CATCHING_UP if left else StoreState.OK
        entries = sum(lag.entries for lag in lags) + sum(watch.record_due for watch in watched)
        return StoreReport(state, entries, lag_ms, left, self._failures, self._problem)

    def check_answers(self) -> None:
        """Raise StoreUnavailable if the store did not answer its last call. Does not call the store: only the writer's
        loop retries.
        """
        if self._away_since_ns is not None:
            away_s = (self._runtime.clock() - self._away_since_ns) // 10**9
            raise StoreUnavailable(
                f"the store has not answered for {away_s} s",
                field="store",
                remedy="check the server; allocation continues meanwhile",
            )

    # -- the loop ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Write the changes of all replicas periodically, until cancelled."""
        while True:
            pause_s = self._pause_s or self._config.store_flush_ms / 1000
            await self._runtime.sleep(pause_s)
            await self.write_all()

    async def write_all(self) -> bool:
        """Store all pending changes. Returns False if the store failed; the rest stays pending."""
        try:
            async with self._one_at_a_time:
                if self._away_since_ns is not None:
                    await self.store.open()  # checks the store even if nothing is pending
                await self._delete_dropped()
                while await self._write_round():
                    pass
        except STORE_ERRORS as error:
            self.note_failure(error)
            longer_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s) or _FIRST_PAUSE_S
            self._pause_s = longer_s * (1.0 - self._runtime.jitter() / 2)
            return False
        self.note_success()
        return True

    async def write_record(self, name: str) -> None:
        """Store the record of a replica now, unless the store is known to be unavailable; then the loop will
        store it.
        """
        watch = self._watched.get(name)
        if watch is not None and self._away_since_ns is None:
            try:
                await self._write_record(name, watch)
            except STORE_ERRORS as error:
                self.note_failure(error)

    async def _write_round(self) -> bool:
        """Write one chunk of each replica, so that no replica waits until all chunks of another one are written.
        Returns True if changes are left.
        """
        any_left = False
        for name, watch in list(self._watched.items()):
            if self._watched.get(name) is watch:
                await self._write_record(name, watch)
                await watch.idle()
            if self._watched.get(name) is not watch:
                continue  # this service gave the replica up to another one, before or while the record was written
            journal = watch.journal
            batch = journal.take()
            if batch is None:
                any_left = any_left or journal.has_work
                await asyncio.sleep(0)
                continue
            try:
                count = await self.store.append(batch.log, batch.chunk, batch.trim_below)
            except LogSuperseded as error:
                any_left |= await watch.superseded(error.number)
                continue
            if not journal.wrote(batch, count):
                watch.record_due = True  # a store that lost chunks may have lost the record too
            any_left = any_left or journal.has_work
        return any_left

    async def _write_record(self, name: str, watch: Watch) -> None:
        """Store the record if it has changed, before the first chunk of a new epoch, and also periodically before it
        expires.
        """
        now = self._runtime.clock()
        renew = now - watch.renewed_ns > self._config.store_ttl_ms * _NS_PER_MS // _RENEWALS_PER_TTL
        if not (watch.record_due or renew) or (watch.may_record is not None and not await watch.may_record()):
            return
        watch.record_due, is_stored = False, False
        record = watch.record()
        try:
            await self.store.put_record(name, record)
            await self.store.keep_alive(watch.journal.log)
            is_stored = True
        finally:  # it failed, or the caller was cancelled
            watch.record_due |= not is_stored
        watch.renewed_ns = now

    async def _delete_dropped(self) -> None:
        for text, log in list(self._drops.items()):
            await self.store.drop(log)
            self._drops.pop(text, None)
        for name in list(self._gone):
            if name not in self._watched:
                await self.store.drop_record(name)
            self._gone.pop(name, None)

    def note_failure(self, error: KvplaneError) -> None:
        """Record that a call of the store failed, whichever part of the service made it."""
        if not self._problem:
            _log.warning("the store cannot be used; allocation continues without it: %s", error)
        self._failures += 1
        self._problem = str(error)
        if not isinstance(error, StoreUnavailable):
            self._away_since_ns = None
        elif self._away_since_ns is None:
            self._away_since_ns = self._runtime.clock()

    def note_success(self) -> None:
        """Record that the store answers."""
        if self._problem:
            _log.info("the store is available again")
        self._problem, self._pause_s, self._away_since_ns = "", 0.0, None
