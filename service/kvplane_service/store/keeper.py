"""Writes the replicas of a registry to a store, and recovers them after a restart.

    open      connect to the store and check its format
    restore   register replicas again, each waiting for its engine (ReplicaState.RECOVERING)
    load      read their entries in the background, while calls are answered
    write     write published changes from then on

Between start and stop, replicas of other services are adopted and local ones released: see `ownership`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvplane.base.errors import KvplaneError, Moved, Unavailable
from kvplane_service.config import Config
from kvplane_service.decisions import log as decisions
from kvplane_service.registry import Entry, Registry
from kvplane_service.replicas.host import ReplicaState, new_replica
from kvplane_service.replicas.recovery import Recovering
from kvplane_service.runtime.reports import StoreReport, StoreState
from kvplane_service.store.errors import (
    STORE_ERRORS,
    ClockBehindStore,
    RecordRefused,
    Refusal,
    StoreDamaged,
    StoreUnavailable,
)
from kvplane_service.store.interface import IndexStore, LogName, SharedStore
from kvplane_service.store.journal import Past, ReplicaJournal
from kvplane_service.store.loading import LoadedLog
from kvplane_service.store.registration import ReplicaRecord, namespace_of, pack_record, unpack_record
from kvplane_service.store.writer import Limits, Runtime, StoreWriter, Watch

_CLOCK_TOLERANCE_MS = 5 * 60 * 1000
_LAST_WRITE_S = 5.0
_LOAD_PAUSE_S = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entropy:
    """Inputs that a simulation replaces: wall clock in milliseconds since 1970, and random u64 numbers."""

    wall_clock_ms: Callable[[], int]
    draw: Callable[[], int]


class Keeper:
    """The durable side of one service process. Without a store only `report` may be called."""

    def __init__(self, registry: Registry, config: Config, runtime: Runtime, entropy: Entropy) -> None:
        self._registry = registry
        self._config = config
        self._runtime = runtime
        self._entropy = entropy
        self.owner = config.advertise or config.listen
        self.process = entropy.draw()  # distinguishes this process from an earlier one at the same address
        self.is_read = False  # the replicas of this service in the store are registered
        self._restored: dict[str, ReplicaRecord] = {}
        self._released: set[str] = set()
        self._loads: dict[asyncio.Task[None], None] = {}
        self._journals: dict[str, ReplicaJournal] = {}
        self._writer: StoreWriter | None = None

    # -- lifecycle ---------------------------------------------------------------------------------------------------

    async def start(self, store: IndexStore) -> None:
        """Follow the registry from now on, and register the replicas in the store.

        A store that does not answer is not an error: `load` retries it, and until then its replicas are not known.

        Raises:
            ClockBehindStore: a record is from the future; nothing was registered.
            KvplaneError: the store cannot be used; it was not changed.
        """
        config = self._config
        limits = Limits(config.store_flush_ms, config.store_lag_entries, config.store_lag_ms, config.store_ttl_ms)
        self._writer = StoreWriter(store, limits, self._runtime)
        self._registry.watch(self._entered)
        self._registry.watch_removals(self._removed)
        try:
            await self._read_in()
        except StoreUnavailable as error:
            self._writer.note_failure(error)

    async def load(self) -> None:
        """Read the entries of the restored replicas. Retries a store that fails meanwhile."""
        while not self.is_read:
            await self._runtime.sleep(_LOAD_PAUSE_S)
            try:
                await self._read_in()
            except KvplaneError as error:
                assert self._writer is not None, "there is no store"
                self._writer.note_failure(error)
        for name, record in list(self._restored.items()):
            await self._load_with_retries(name, record)

    async def write(self) -> None:
        """Write published changes until cancelled."""
        assert self._writer is not None, "there is no store"
        await self._writer.run()

    async def stop(self, patience_s: float = _LAST_WRITE_S) -> None:
        """Write pending changes within `patience_s` seconds, then close the store. Cancel `write` before."""
        if self._writer is None:
            return
        for load in self._loads:
            load.cancel()
        try:
            async with asyncio.timeout(patience_s):
                if self.is_read:
                    await self._writer.write_all()
                await self._writer.store.close()
        except TimeoutError:
            _log.warning("the store does not answer: pending changes are not written")

    async def flush(self, name: str) -> None:
        """Wait until the record is stored, or the store fails: a restart must not forget an acknowledged call."""
        if self._writer is None or not self.is_read:
            return
        try:
            async with asyncio.timeout(self._config.store_timeout_ms / 1000):
                await self._writer.write_record(name)
        except TimeoutError:
            self._writer.note_failure(StoreUnavailable("writing a record took too long", field="store"))

    # -- state ------------------------------------------------------------------------------------------------------

    def report(self, entry: Entry) -> StoreReport:
        """State of the durable side of a replica."""
        if self._writer is None or not entry.registration.spec.events:
            return StoreReport(StoreState.OFF)
        return self._writer.report(entry.host.name)

    @property
    def is_on(self) -> bool:
        """True if a store is configured."""
        return self._writer is not None

    @property
    def is_there(self) -> bool:
        """True if the store answers and was read."""
        return self.is_read and self._writer is not None and not self._writer.report().problem

    def check_answers(self) -> None:
        """Raise StoreUnavailable at once if the store is unavailable or was not read yet."""
        assert self._writer is not None, "there is no store"
        self._writer.check_answers()
        if not self.is_read:
            raise StoreUnavailable("it has not been read yet", field="store", remedy="retry")

    def note_failure(self, error: KvplaneError) -> None:
        """Record a failed call of the store."""
        assert self._writer is not None, "there is no store"
        self._writer.note_failure(error)

    # -- transfer between services ----------------------------------------------------------------------------------

    @property
    def shared_store(self) -> SharedStore | None:
        """The store, if several services can use it."""
        store = self._writer.store if self._writer is not None else None
        return store if isinstance(store, SharedStore) else None

    async def adopt(self, record: ReplicaRecord) -> None:
        """Adopt a replica of another service: register it, and read its entries while calls are answered.

        Raises:
            KvplaneError: it cannot be registered here.
        """
        assert self._writer is not None, "there is no store"
        await self._restore(record)
        load = asyncio.create_task(self._load_with_retries(record.name, record))  # continues if the caller is cancelled
        self._loads[load] = None
        load.add_done_callback(lambda task: self._loads.pop(task, None))
        await self._writer.write_record(record.name)

    async def release(self, names: Sequence[str], reason: KvplaneError) -> None:
        """Release replicas: write all published changes, then mark their records as released."""
        assert self._writer is not None, "there is no store"
        for name in names:
            self._registry.let_go(name, reason)
            self._restored.pop(name, None)  # stops a load of its entries
        try:
            is_written = await self._write_released(names)
        except StoreUnavailable:
            is_written = False
        finally:
            self._released.difference_update(names)
            for name in names:
                self._leave(name)
        if names and not is_written:
            _log.warning("could not record the release of %s: the store is unavailable", ", ".join(names))

    def give_up(self, name: str, reason: KvplaneError) -> None:
        """Drop a replica that another service owns; nothing more of it is written."""
        self._leave(name)
        self._registry.let_go(name, reason)

    def confirm(self, name: str) -> None:
        """Write the replica's record again."""
        assert self._writer is not None, "there is no store"
        self._writer.record_changed(name)

    # -- internals ---------------------------------------------------------------------------------------------------

    async def _write_released(self, names: Sequence[str]) -> bool:
        """Write all changes, then the records: the reader of a released record finds all entries."""
        assert self._writer is not None, "there is no store"
        self.check_answers()
        if not await self._writer.write_all():
            return False
        for name in names:
            self._released.add(name)
            self._writer.record_changed(name)
        return await self._writer.write_all()

    def _is_owned_here(self, record: ReplicaRecord) -> bool:
        """A file belongs to one service. A server may be shared: each service recovers its own replicas."""
        return record.owner == self.owner or not self._config.store.startswith("redis")

    def _leave(self, name: str) -> None:
        assert self._writer is not None, "there is no store"
        self._journals.pop(name, None)
        self._restored.pop(name, None)
        self._writer.leave(name)

    async def _load_with_retries(self, name: str, record: ReplicaRecord) -> None:
        while name in self._restored and not await self._load(name, record):
            await self._runtime.sleep(_LOAD_PAUSE_S)
        self._restored.pop(name, None)

    def _check_clock(self, records: list[ReplicaRecord]) -> None:
        now_ms = self._entropy.wall_clock_ms()
        for record in records:
            ahead_ms = record.written_ms - now_ms
            if ahead_ms > _CLOCK_TOLERANCE_MS:
                raise ClockBehindStore(
                    f"the store's record of {record.name} was written {ahead_ms // 1000} s in the future",
                    field="store",
                    remedy="set this machine's clock, or name another store; nothing was changed",
                )

    async def _read_in(self) -> None:
        """Register the replicas in the store. Raises the store's errors."""
        assert self._writer is not None, "there is no store"
        store = self._writer.store
        await store.open()
        records = await _read_records(store)
        self._check_clock(records)
        self._writer.note_success()
        self.is_read = True
        for record in records:
            if not self._is_owned_here(record):
                continue
            try:
                if not await self._restore(record):
                    self._writer.drop(record.log)  # stale: its pages have been used since its last entry
            except KvplaneError as error:
                _log.warning("%s is in the store but cannot be registered: %s", record.name, error)

    async def _restore(self, record: ReplicaRecord) -> bool:
        """Register a replica from its record. False if it was registered here meanwhile and used."""
        name = record.name
        replica = await self._runtime.offload(partial(new_replica, record.registration.spec))
        if name in self._registry:
            if self._registry.get(name).host.decisions.num_entries:
                return False
            self._registry.let_go(name, Unavailable(f"{name} is read from the store", remedy="try again"))
            self._leave(name)
        self._restored[name] = record
        try:
            entry = self._registry.add(name, record.registration, replica)
        except KvplaneError:
            del self._restored[name]
            raise
        entry.host.recover(Recovering(record.epoch, record.incarnation))
        return True

    async def _load(self, name: str, record: ReplicaRecord) -> bool:
        assert self._writer is not None, "there is no store"
        host = self._registry.get(name).host
        recovering, log = host.recovering, LoadedLog()
        assert recovering is not None, "no session opens a replica that is loading"
        try:
            async for page in self._writer.store.load(record.log):
                await self._runtime.offload(partial(log.add_all, record.log, page))
                recovering.rows = log.rows
        except StoreDamaged as error:
            log.refused[Refusal.DAMAGED] += 1
            _log.warning("the remaining entries of %s are lost: %s", name, error)
        except STORE_ERRORS as error:
            self._writer.note_failure(error)
            return False
        past = await self._runtime.offload(partial(Past.of, log.chunks))
        if name not in self._restored:
            return True  # deregistered meanwhile
        recovering.entries = log.entries()
        recovering.refused.update({why.value: count for why, count in log.refused.items()})
        self._journals[name].resume(past)
        recovering.loading = False
        self._writer.note_success()
        _log.info("%s: %d entries read, %d chunks refused", name, log.rows, log.refused.total())
        return True

    def _entered(self, entry: Entry) -> None:
        """Start writing a replica that was registered or restored."""
        assert self._writer is not None, "there is no store"
        host, name, record = entry.host, entry.host.name, self._restored.get(entry.host.name)
        incarnation = record.incarnation if record else self._entropy.draw()
        log = LogName(name, namespace_of(entry.registration), incarnation)
        journal = ReplicaJournal(log, host.replica, self._config.store_lag_entries, self._runtime.clock)
        self._journals[name] = journal
        host.decisions.follow(partial(self._follow, name, journal))
        pack = partial(self._pack_record, entry, journal)
        self._writer.watch(name, Watch(journal, pack, host.idle, partial(self._superseded, name, journal)))

    def _removed(self, name: str) -> None:
        assert self._writer is not None, "there is no store"
        del self._journals[name]
        self._restored.pop(name, None)
        self._writer.forget(name)

    def _follow(self, name: str, journal: ReplicaJournal, entry: decisions.Entry) -> None:
        if isinstance(entry, decisions.Life):
            self._begin_life(name, journal, entry)
        journal.follow(entry)

    def _begin_life(self, name: str, journal: ReplicaJournal, life: decisions.Life) -> None:
        """The record changes with the epoch; other page memory has another log."""
        assert self._writer is not None, "there is no store"
        if life.incarnation not in (0, journal.log.incarnation):
            log, now_ms = LogName(name, journal.log.namespace, life.incarnation), self._entropy.wall_clock_ms()
            # The time is above all numbers of that log: no log has a chunk per millisecond.
            self._writer.drop(journal.switch(log, after=now_ms))
        self._writer.record_changed(name)

    def _pack_record(self, entry: Entry, journal: ReplicaJournal) -> bytes:
        now_ms = self._entropy.wall_clock_ms()
        host = entry.host
        released = host.name in self._released
        by = (self.owner, now_ms, released, self.process)
        return pack_record(ReplicaRecord(host.name, entry.registration, host.epoch, journal.log.incarnation, *by))

    async def _superseded(self, name: str, journal: ReplicaJournal, number: int) -> bool:
        """Handle a log that another process writes: it adopted the replica, or owned it before and wrote late.

        Its chunks are replaced only if the record is of this process. Otherwise, while an engine has its session here,
        nothing is written: `Ownership.beat` rewrites the record or gives the replica up.
        """
        assert self._writer is not None, "there is no store"
        record = await read_record(self._writer.store, name)
        if self._journals.get(name) is not journal:
            return False  # given up meanwhile
        if record is None or self.wrote(record) or self.shared_store is None:
            journal.restart_above(number)
            self.confirm(name)
            return True
        if not self.has_engine(name):
            self.give_up(name, moved(record))
        return False

    def has_engine(self, name: str) -> bool:
        """True if an engine has, or is opening, a session with the replica here."""
        return self._registry.get(name).host.state in (ReplicaState.LIVE, ReplicaState.OPENING)

    def wrote(self, record: ReplicaRecord) -> bool:
        """True if this process wrote the record."""
        return (record.owner, record.process) == (self.owner, self.process)

    def is_recorded(self, name: str) -> bool:
        """True if the record was stored since it last changed. Another process may have replaced it."""
        return self._writer is not None and self._writer.is_recorded(name)


async def read_record(store: IndexStore, name: str) -> ReplicaRecord | None:
    """The record of a replica; None if there is no usable one."""
    raw = await store.get_record(name)
    try:
        return unpack_record(raw) if raw is not None else None
    except RecordRefused as error:
        _log.warning("the store's record of %s cannot be used: %s", name, error)
        return None


def moved(record: ReplicaRecord) -> Moved:
    """The error for clients of a replica that another service owns."""
    return Moved(
        f"{record.name} is owned by the service at {record.owner}",
        field="replica",
        remedy="call that service",
        metadata={"address": record.owner},
    )


async def _read_records(store: IndexStore) -> list[ReplicaRecord]:
    records = []
    try:
        for name, raw in await store.records():
            try:
                records.append(unpack_record(raw))
            except RecordRefused as error:
                _log.warning("the store's record of %s cannot be used: %s", name, error)
    except StoreDamaged as error:
        _log.warning("the store's records are lost: %s", error)
    return records
