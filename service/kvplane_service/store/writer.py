"""Writes behind: takes chunks from the journals and gives them to the store, beside the event loop.

The hot path never waits for it. While the store is away the writer tries again with growing pauses; what changes
meanwhile waits in the journals, which shed it at their bound. So nothing here is queued, and catching up needs no care.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvplane.base.errors import KvplaneError
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
class Limits:
    """Pauses and bounds of the writer."""

    flush_ms: int
    lag_entries: int
    lag_ms: int
    ttl_ms: int


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the writer does not make itself, so that a simulation can.

    Attributes:
        clock: monotonic nanoseconds.
        sleep: of the event loop.
        offload: runs what would hold the event loop.
        jitter: draws from [0, 1).
    """

    clock: Callable[[], int]
    sleep: Callable[[float], Awaitable[None]]
    offload: Offload
    jitter: Callable[[], float]


@dataclass(slots=True)
class Watch:
    """One replica: its journal, and the record that the store keeps of it.

    Attributes:
        record: packs the record as it is now.
        settled: waits until the core may be read.
        superseded: called when another process wrote the log, with the number of such a chunk; whether all is written
            again now.
        record_due: it has changed since it was stored.
    """

    journal: ReplicaJournal
    record: Callable[[], bytes]
    settled: Callable[[], Awaitable[None]]
    superseded: Callable[[int], Awaitable[bool]]
    record_due: bool = True
    renewed_ns: int = 0


class StoreWriter:
    """Keeps the store up to date with every replica that it watches."""

    def __init__(self, store: IndexStore, limits: Limits, around: Surroundings) -> None:
        self.store = store
        self._limits = limits
        self._around = around
        self._watched: dict[str, Watch] = {}
        self._drops: dict[str, LogName] = {}  # records and logs to forget, by the log's text
        self._gone: dict[str, None] = {}  # replicas whose records are to be forgotten
        self._failures = 0
        self._problem = ""
        self._away_since_ns: int | None = None
        self._pause_s = 0.0
        self._one_at_a_time = asyncio.Lock()  # who lets go of a replica writes all out, beside the loop

    # -- what is watched ---------------------------------------------------------------------------------------------

    def watch(self, name: str, watch: Watch) -> None:
        """Keep a replica in the store from now on."""
        self._gone.pop(name, None)
        self._watched[name] = watch

    def leave(self, name: str) -> Watch | None:
        """Follow a replica no longer; the store keeps what it has."""
        return self._watched.pop(name, None)

    def forget(self, name: str) -> None:
        """The replica was deregistered: the store shall forget it."""
        watch = self.leave(name)
        if watch is not None:
            self.drop(watch.journal.log)
            self._gone[name] = None

    def drop(self, log: LogName) -> None:
        """The store shall forget a log. When too many wait the oldest is left to its time to live."""
        self._drops[str(log)] = log
        if len(self._drops) > _MAX_DROPS:
            del self._drops[next(iter(self._drops))]

    def is_recorded(self, name: str) -> bool:
        """Whether the store has the replica's record as it is now."""
        return name in self._watched and not self._watched[name].record_due

    def record_changed(self, name: str) -> None:
        """Store the replica's record anew."""
        if name in self._watched:
            self._watched[name].record_due = True

    # -- what is shown -----------------------------------------------------------------------------------------------

    def report(self, name: str | None = None) -> StoreReport:
        """How the store is, for one replica or for all together."""
        watched = [self._watched[name]] if name in self._watched else [] if name else list(self._watched.values())
        lags = [watch.journal.lag for watch in watched]
        lag_ms = max((lag.waiting_ns for lag in lags), default=0) // _NS_PER_MS
        left = sum(lag.resync_left for lag in lags)
        if any(lag.shed for lag in lags) or lag_ms > self._limits.lag_ms or self._problem:
            state = StoreState.DEGRADED
        else:
            state = StoreState.CATCHING_UP if left else StoreState.OK
        entries = sum(lag.entries for lag in lags) + sum(watch.record_due for watch in watched)
        return StoreReport(state, entries, lag_ms, left, self._failures, self._problem)

    def check_answers(self) -> None:
        """Raise StoreUnavailable at once while the store does not answer: the loop alone asks it again."""
        if self._away_since_ns is not None:
            away_s = (self._around.clock() - self._away_since_ns) // 10**9
            raise StoreUnavailable(
                f"the store has not answered for {away_s} s",
                field="store",
                remedy="look at the server; allocation goes on meanwhile",
            )

    # -- the loop ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            pause_s = self._pause_s or self._limits.flush_ms / 1000
            await self._around.sleep(pause_s)
            await self.write_all()

    async def write_all(self) -> bool:
        """Store everything that waits; False when the store failed meanwhile, and the rest waits for the next time."""
        try:
            async with self._one_at_a_time:
                if self._away_since_ns is not None:
                    await self.store.open()  # there may be nothing to write
                await self._forget_dropped()
                while await self._write_round():
                    pass
        except STORE_ERRORS as error:
            self.note_failure(error)
            longer_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s) or _FIRST_PAUSE_S
            self._pause_s = longer_s * (1.0 - self._around.jitter() / 2)
            return False
        self.note_success()
        return True

    async def write_record(self, name: str) -> None:
        """Store a replica's record now, if the store answers; if not, the loop goes on trying."""
        watch = self._watched.get(name)
        if watch is not None and self._away_since_ns is None:
            try:
                await self._write_record(name, watch)
            except STORE_ERRORS as error:
                self.note_failure(error)

    async def _write_round(self) -> bool:
        """One chunk of each replica, in turn, so that none waits for another's backlog; False when there was none."""
        any_left = False
        for name, watch in list(self._watched.items()):
            if self._watched.get(name) is watch:
                await self._write_record(name, watch)
                await watch.settled()
            if self._watched.get(name) is not watch:
                continue  # another service has it: it was given up before, or while its record was written
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
        """The record before chunks of its epoch, and now and then so that the store does not forget in time."""
        now = self._around.clock()
        renew = now - watch.renewed_ns > self._limits.ttl_ms * _NS_PER_MS // _RENEWALS_PER_TTL
        if not (watch.record_due or renew):
            return
        watch.record_due, is_stored = False, False
        record = watch.record()
        try:
            await self.store.put_record(name, record)
            await self.store.keep_alive(watch.journal.log)
            is_stored = True
        finally:  # it failed, or who waits for it was cancelled
            watch.record_due |= not is_stored
        watch.renewed_ns = now

    async def _forget_dropped(self) -> None:
        for text, log in list(self._drops.items()):
            await self.store.drop(log)
            self._drops.pop(text, None)
        for name in list(self._gone):
            if name not in self._watched:
                await self.store.drop_record(name)
            self._gone.pop(name, None)

    def note_failure(self, error: KvplaneError) -> None:
        """A call of the store failed, whoever made it."""
        if not self._problem:
            _log.warning("the store cannot be used, allocation goes on: %s", error)
        self._failures += 1
        self._problem = str(error)
        if not isinstance(error, StoreUnavailable):
            self._away_since_ns = None
        elif self._away_since_ns is None:
            self._away_since_ns = self._around.clock()

    def note_success(self) -> None:
        """The store answers, and has all that it was given."""
        if self._problem:
            _log.info("the store is back")
        self._problem, self._pause_s, self._away_since_ns = "", 0.0, None
