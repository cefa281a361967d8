"""Keeps the replicas of a registry in a store, and brings them back after a restart.

    open      the store is there and ours
    restore   replicas are registered again, each waiting for its engine (ReplicaState.RECOVERING)
    load      their entries are read beside the event loop, while calls are answered
    write     from then on the store follows what is published

Between start and stop replicas of other services are adopted, and own ones released: see `ownership`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvplane.base.errors import KvplaneError
from kvplane_service import decisions
from kvplane_service.config import Config
from kvplane_service.host import new_replica
from kvplane_service.recovering import Recovering
from kvplane_service.registry import Entry, Registry
from kvplane_service.store.errors import STORE_ERRORS, ClockBehindStore, RecordRefused, Refusal, StoreDamaged
from kvplane_service.store.interface import IndexStore, LogName, SharedStore
from kvplane_service.store.journal import Past, ReplicaJournal
from kvplane_service.store.loading import LoadedLog
from kvplane_service.store.registration import ReplicaRecord, namespace_of, pack_record, unpack_record
from kvplane_service.store.writer import Limits, StoreReport, StoreState, StoreWriter, Surroundings, Watch

_CLOCK_TOLERANCE_MS = 5 * 60 * 1000
_LAST_WRITE_S = 5.0
_LOAD_PAUSE_S = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Chance:
    """What the keeper knows of the world besides: wall clock in milliseconds since 1970, and u64 drawn at random."""

    wall_clock_ms: Callable[[], int]
    draw: Callable[[], int]


class Keeper:
    """The durable side of one service process. Without a store, call nothing but `report`."""

    def __init__(self, registry: Registry, config: Config, around: Surroundings, chance: Chance) -> None:
        self._registry = registry
        self._config = config
        self._around = around
        self._chance = chance
        self.owner = config.advertise or config.listen
        self._restored: dict[str, ReplicaRecord] = {}
        self._released: set[str] = set()
        self._loads: set[asyncio.Task[None]] = set()
        self._journals: dict[str, ReplicaJournal] = {}
        self._writer: StoreWriter | None = None

    # -- from start to end -------------------------------------------------------------------------------------------

    async def start(self, store: IndexStore) -> None:
        """Register again what the store knows, and follow the registry from now on.

        Raises:
            ClockBehindStore: a record is from the future; nothing was registered.
            KvplaneError: the store failed.
        """
        config = self._config
        limits = Limits(config.store_flush_ms, config.store_lag_entries, config.store_lag_ms, config.store_ttl_ms)
        self._writer = StoreWriter(store, limits, self._around)
        records = await self._around.offload(partial(_read_records, store))
        self._check_clock(records)
        self._registry.watch(self._entered)
        self._registry.watch_removals(self._removed)
        for record in records:
            if not self._is_ours(record):
                continue
            try:
                await self._restore(record)
            except KvplaneError as error:
                _log.warning("%s is in the store and cannot be registered again: %s", record.name, error)

    async def load(self) -> None:
        """Read the entries of what was restored. A store that fails meanwhile is asked again."""
        for name, record in list(self._restored.items()):
            await self._load_patiently(name, record)

    async def write(self) -> None:
        """Follow what is published, until cancelled."""
        assert self._writer is not None, "there is no store"
        await self._writer.run()

    async def stop(self) -> None:
        """Write what waits, for a moment at most, and let go of the store. `write` was cancelled before."""
        if self._writer is None:
            return
        for load in self._loads:
            load.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._writer.write_all(), _LAST_WRITE_S)
        await self._around.offload(self._writer.store.close)

    async def settle(self, name: str) -> None:
        """Wait until the store knows the replica, or fails: a restart shall not forget what was answered."""
        if self._writer is not None:
            await self._writer.write_record(name)

    # -- what others ask ---------------------------------------------------------------------------------------------

    def report(self, entry: Entry) -> StoreReport:
        """How the durable side of a replica is."""
        if self._writer is None or not entry.registration.spec.events:
            return StoreReport(StoreState.OFF)
        return self._writer.report(entry.host.name)

    # -- what moves between services ---------------------------------------------------------------------------------

    @property
    def shared_store(self) -> SharedStore | None:
        """The store, if other services can have it too."""
        store = self._writer.store if self._writer is not None else None
        return store if isinstance(store, SharedStore) else None

    async def adopt(self, record: ReplicaRecord) -> None:
        """Take over a replica that another service had: register it, and read its entries while calls are answered.

        Raises:
            KvplaneError: it cannot be registered here.
        """
        assert self._writer is not None, "there is no store"
        await self._restore(record)
        await self._writer.write_record(record.name)
        load = asyncio.create_task(self._load_patiently(record.name, record))
        self._loads.add(load)
        load.add_done_callback(self._loads.discard)

    async def release(self, name: str, reason: KvplaneError) -> None:
        """Let go of a replica: write out what was published, and say in its record that it has no owner."""
        assert self._writer is not None, "there is no store"
        self._registry.let_go(name, reason)
        self._released.add(name)
        self._writer.record_changed(name)
        written = await self._writer.write_all()
        self._released.discard(name)
        self._leave(name)
        if not written:
            _log.warning("nobody was told that %s was let go: the store is away", name)

    def give_up(self, name: str, reason: KvplaneError) -> None:
        """Another service owns the replica; nothing of it is written here any more."""
        self._leave(name)
        self._registry.let_go(name, reason)

    def confirm(self, name: str) -> None:
        """Write the replica's record again."""
        assert self._writer is not None, "there is no store"
        self._writer.record_changed(name)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _is_ours(self, record: ReplicaRecord) -> bool:
        """A file is one service's; a server may be many services', each of which goes on with its own."""
        return record.owner == self.owner or not self._config.store.startswith("redis")

    def _leave(self, name: str) -> None:
        assert self._writer is not None, "there is no store"
        self._journals.pop(name, None)
        self._restored.pop(name, None)
        self._writer.leave(name)

    async def _load_patiently(self, name: str, record: ReplicaRecord) -> None:
        while name in self._restored and not await self._load(name, record):
            await self._around.sleep(_LOAD_PAUSE_S)
        self._restored.pop(name, None)

    def _check_clock(self, records: list[ReplicaRecord]) -> None:
        now_ms = self._chance.wall_clock_ms()
        for record in records:
            ahead_ms = record.written_ms - now_ms
            if ahead_ms > _CLOCK_TOLERANCE_MS:
                raise ClockBehindStore(
                    f"the store's record of {record.name} was written {ahead_ms // 1000} s from now",
                    field="store",
                    remedy="set this machine's clock, or name another store; nothing was touched",
                )

    async def _restore(self, record: ReplicaRecord) -> None:
        replica = await self._around.offload(partial(new_replica, record.registration.spec))
        self._restored[record.name] = record
        try:
            entry = self._registry.add(record.name, record.registration, replica)
        except KvplaneError:
            del self._restored[record.name]
            raise
        entry.host.recover(Recovering(record.epoch, record.incarnation))

    async def _load(self, name: str, record: ReplicaRecord) -> bool:
        assert self._writer is not None, "there is no store"
        host = self._registry.get(name).host
        recovering, log = host.recovering, LoadedLog()
        assert recovering is not None, "nobody opens a replica that is loading"
        try:
            await self._around.offload(partial(_read_log, self._writer.store, record.log, log, recovering))
        except StoreDamaged as error:
            log.refused[Refusal.DAMAGED] += 1
            _log.warning("the rest of the entries of %s is lost: %s", name, error)
        except STORE_ERRORS as error:
            _log.warning("the entries of %s cannot be read: %s", name, error)
            return False
        past = await self._around.offload(partial(Past.of, log.chunks))
        if name not in self._restored:
            return True  # deregistered meanwhile
        recovering.entries = log.entries()
        recovering.refused.update({why.value: count for why, count in log.refused.items()})
        self._journals[name].resume(past)
        recovering.loading = False
        _log.info("%s: %d entries read, %d chunks refused", name, log.rows, log.refused.total())
        return True

    def _entered(self, entry: Entry) -> None:
        """A replica was registered, or restored."""
        assert self._writer is not None, "there is no store"
        host, name, record = entry.host, entry.host.name, self._restored.get(entry.host.name)
        incarnation = record.incarnation if record else self._chance.draw()
        log = LogName(name, namespace_of(entry.registration), incarnation)
        journal = ReplicaJournal(log, host.replica, self._config.store_lag_entries, self._around.clock)
        self._journals[name] = journal
        host.decisions.follow(partial(self._follow, name, journal))
        self._writer.watch(name, Watch(journal, partial(self._pack_record, entry, journal)))

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
        """The record has another epoch; on other page memory the log is another one too."""
        assert self._writer is not None, "there is no store"
        if life.incarnation not in (0, journal.log.incarnation):
            log = journal.log
            self._writer.drop(journal.switch(LogName(name, log.namespace, life.incarnation)))
        self._writer.record_changed(name)

    def _pack_record(self, entry: Entry, journal: ReplicaJournal) -> bytes:
        now_ms = self._chance.wall_clock_ms()
        host = entry.host
        incarnation = journal.log.incarnation
        released = host.name in self._released
        return pack_record(
            ReplicaRecord(host.name, entry.registration, host.epoch, incarnation, self.owner, now_ms, released)
        )


def _read_records(store: IndexStore) -> list[ReplicaRecord]:
    records = []
    try:
        for name, raw in store.records():
            try:
                records.append(unpack_record(raw))
            except RecordRefused as error:
                _log.warning("the store's record of %s is not used: %s", name, error)
    except StoreDamaged as error:
        _log.warning("the store's records are lost: %s", error)
    return records


def _read_log(store: IndexStore, name: LogName, log: LoadedLog, progress: Recovering) -> None:
    """Read beside the event loop; `progress` is looked at meanwhile."""
    for chunk in store.load(name):
        log.add(name, chunk)
        progress.rows = log.rows
