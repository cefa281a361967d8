"""Write the replicas of a registry to a store, and recover them after a restart.

    open      connect to the store and check its format
    restore   register replicas again; each waits for its engine (ReplicaState.RECOVERING)
    load      read the entries of these replicas in the background, while calls are answered
    write     from then on, write the changes of published keys

A key is published once all ranks have computed its block. Meanwhile this service adopts replicas of other services, and
releases replicas to them: see `ownership`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kvplane.base.errors import KvplaneError, Unavailable
from kvplane_service.config import Config
from kvplane_service.decisions import log as decisions
from kvplane_service.registry import Entry, Registry
from kvplane_service.replicas.host import ReplicaState, new_replica
from kvplane_service.replicas.recovery import Recovering
from kvplane_service.runtime.reports import StoreReport, StoreState
from kvplane_service.store.errors import (
    Refusal,
    StoreDamaged,
    StoreUnavailable,
)
from kvplane_service.store.interface import MAX_SEQ, IndexStore, LogName, SharedStore
from kvplane_service.store.journal import Past, ReplicaJournal
from kvplane_service.store.loading import Load, LoadedLog, Loads, read_record, read_records
from kvplane_service.store.registration import ReplicaRecord, elsewhere, namespace_of, pack_record
from kvplane_service.store.writer import Runtime, StoreWriter, Watch

_LAST_WRITE_S = 5.0
_LOAD_PAUSE_S = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entropy:
    """Inputs that a simulation replaces.

    Attributes:
        wall_clock_ms: returns milliseconds since 1970.
        draw: returns a random u64.
    """

    wall_clock_ms: Callable[[], int]
    draw: Callable[[], int]


class Keeper:
    """Stores and recovers the replicas of one service process. Without a store only `report` may be called.

    Attributes:
        owner: address of this service, by which records name the service.
        process: random number that distinguishes this process from an earlier one at the same address.
        is_read: True once the replicas of this service in the store are registered.
    """

    def __init__(self, registry: Registry, config: Config, runtime: Runtime, entropy: Entropy) -> None:
        self._registry = registry
        self._config = config
        self._runtime = runtime
        self._entropy = entropy
        self.owner = config.advertise or config.listen
        self.process = entropy.draw()  # distinguishes this process from an earlier one at the same address
        self.is_read = False  # the replicas of this service in the store are registered
        self._restored: dict[str, ReplicaRecord] = {}
        self._released: dict[str, bool] = {}  # by replica that is being released: whether it has expired
        self._known: dict[str, int] = {}  # by replica: the process from whose record it was restored
        self._loads = Loads(runtime, config.store_load_ms)
        self._journals: dict[str, ReplicaJournal] = {}
        self._made: StoreWriter | None = None  # once there is a store

    # -- lifecycle ---------------------------------------------------------------------------------------------------

    async def start(self, store: IndexStore) -> None:
        """Record every change of the registry from now on, and register the replicas that the store has.

        A store that does not answer is not an error: `load` tries again, and until then the store's replicas are
        unknown.

        Raises:
            KvplaneError: the store cannot be used; it was not changed.
        """
        self._made = StoreWriter(store, self._config, self._runtime)
        self._registry.watch(self._entered)
        self._registry.watch_removals(self._removed)
        try:
            await self._read_in()
        except StoreUnavailable as error:
            self._writer.note_failure(error)

    async def load(self) -> None:
        """Read the entries of the replicas that were registered from the store. Retries while the store fails.

        Returns once the entries of all replicas are read, or those of one cannot be read. The latter are retried in the
        background; their replica stays in the state RECOVERING.
        """
        while not self.is_read:
            await self._runtime.sleep(_LOAD_PAUSE_S)
            try:
                await self._read_in()
            except KvplaneError as error:
                self._writer.note_failure(error)
        for name, record in list(self._restored.items()):
            self._start_load(name, record)
        await self._loads.wait()

    async def supervise_loads(self) -> None:
        """Wait until a read of entries ends with an error other than one of the store, and raise that error."""
        await self._loads.supervise()

    async def write(self) -> None:
        """Write the changes of published keys to the store until cancelled."""
        await self._writer.run()

    async def stop(self, patience_s: float = _LAST_WRITE_S) -> None:
        """Write pending changes within `patience_s` seconds, then close the store. Cancel `write` before."""
        if not self.is_on:
            return
        self._loads.cancel()
        try:
            async with asyncio.timeout(patience_s):
                if self.is_read:
                    await self._writer.write_all()
                await self._writer.store.close()
        except TimeoutError:
            _log.warning("the store does not answer: pending changes are not written")

    async def flush(self, name: str) -> None:
        """Wait until the record of the replica `name` is stored or the store fails, so that a restart does not lose a
        registration that was acknowledged.
        """
        if not (self.is_on and self.is_read):
            return
        try:
            async with asyncio.timeout(self._config.store_timeout_ms / 1000):
                await self._writer.write_record(name)
        except TimeoutError:
            what = f"writing a record did not end within {self._config.store_timeout_ms} ms"
            self._writer.note_failure(StoreUnavailable(what, field="store", remedy="check the store"))

    # -- state ------------------------------------------------------------------------------------------------------

    def report(self, entry: Entry) -> StoreReport:
        """Return the state of the store for a replica."""
        if not self.is_on or not entry.registration.spec.events:
            return StoreReport(StoreState.OFF)
        report, problem = self._writer.report(entry.host.name), self._loads.problem(entry.host.name)
        report = replace(report, failures=report.failures + self._loads.failures)
        return replace(report, state=StoreState.DEGRADED, problem=report.problem or problem) if problem else report

    @property
    def is_on(self) -> bool:
        """True if a store is configured."""
        return self._made is not None

    @property
    def is_there(self) -> bool:
        """True if the store answers, the records of its replicas were read, and no read of their entries fails at
        present.
        """
        is_well = self.is_on and not self._writer.report().problem and not self._loads.problem()
        return self.is_read and is_well

    def check_answers(self) -> None:
        """Raise StoreUnavailable if the store did not answer its last call, or if its records were not read yet. Does
        not call the store.
        """
        self._writer.check_answers()
        if not self.is_read:
            raise StoreUnavailable("the service has not read the store yet", field="store", remedy="retry later")

    def note_failure(self, error: KvplaneError) -> None:
        """Record that a call of the store failed."""
        self._writer.note_failure(error)

    @property
    def store(self) -> IndexStore | None:
        """The store, None if none is configured."""
        return self._made.store if self._made is not None else None

    # -- transfer between services ----------------------------------------------------------------------------------

    @property
    def shared_store(self) -> SharedStore | None:
        """The store if several services can use it, otherwise None."""
        return self.store if isinstance(self.store, SharedStore) else None

    async def adopt(self, record: ReplicaRecord) -> None:
        """Take over a replica of another service: register the replica, and read its entries while calls are answered.

        Raises:
            KvplaneError: the replica cannot be registered here.
        """
        await self._restore(record)
        self._start_load(record.name, record)
        await self._writer.write_record(record.name)

    async def release(self, names: Sequence[str], reason: KvplaneError, *, expired: bool = False) -> None:
        """Release replicas to other services: write all changes of published keys to the store, then mark the records
        as released, and as `expired` if only a registration may recover them. `reason` is raised to calls that still
        use the replicas.
        """
        for name in names:
            self._registry.let_go(name, reason)
            self._restored.pop(name, None)  # stops a load of its entries
        try:
            is_written = await self._write_released(names, expired)
        except StoreUnavailable:
            is_written = False
        finally:
            for name in names:
                self._released.pop(name, None)
            for name in self._let_go_of(names):
                self._leave(name)
        if names and not is_written:
            _log.warning("the release of %s is not in the store, which is unavailable", ", ".join(names))

    def give_up(self, name: str, reason: KvplaneError) -> None:
        """Drop a replica that another service owns, also while the replica is being released, and write no more data of
        the replica.

        `reason` is raised to calls that still use the replica.
        """
        self._leave(name)
        if name in self._registry:
            self._registry.let_go(name, reason)

    async def expired_records(self) -> list[ReplicaRecord]:
        """Return the records of replicas that expired over `store_ttl_ms` ago. Redis deletes its data itself."""
        if self.store is None or self.shared_store is not None or not self.is_read:
            return []
        now_ms = self._entropy.wall_clock_ms()
        records = await read_records(self.store, now_ms)
        return [one for one in records if one.expired and now_ms - one.written_ms > self._config.store_ttl_ms]

    def confirm(self, name: str) -> None:
        """Write the record of the replica again, which names this service as the owner."""
        self._writer.record_changed(name)

    # -- internals ---------------------------------------------------------------------------------------------------

    @property
    def _writer(self) -> StoreWriter:
        assert self._made is not None, "there is no store"
        return self._made

    async def _write_released(self, names: Sequence[str], expired: bool) -> bool:
        """Write all changes of the replicas, then their records, marked as released to other services. So a service
        that reads a released record finds all entries. Returns False if the store failed.
        """
        self.check_answers()
        if not await self._writer.write_all():
            return False
        for name in self._let_go_of(names):
            self._released[name] = expired
            self._writer.record_changed(name)
        return await self._writer.write_all()

    def _let_go_of(self, names: Sequence[str]) -> list[str]:
        """Return those of the names that no replica here has. A replica that was registered again under one of the
        names is a new replica, and was not released.
        """
        return [name for name in names if name not in self._registry]

    def _is_owned_here(self, record: ReplicaRecord) -> bool:
        """Return True if this service recovers the replica: from a file every replica, from a shared server those that
        this service owned.
        """
        return record.owner == self.owner or not self._config.store.startswith("redis")

    def _leave(self, name: str) -> None:
        self._journals.pop(name, None)
        self._restored.pop(name, None)
        self._writer.leave(name)

    def _start_load(self, name: str, record: ReplicaRecord) -> None:
        """Read the entries of the replica with this record in the background, until all are read or the replica is
        given up.
        """
        recovering = self._registry.get(name).host.recovering
        assert recovering is not None, "it was registered from its record"
        is_due, read = partial(self._is_loading, name, record), partial(self._load, name, record)
        self._loads.start(name, Load(is_due, read, partial(self._begin_empty, name, record), recovering.fail))

    def _is_loading(self, name: str, record: ReplicaRecord) -> bool:
        """Return True while the entries of the replica with this record have to be loaded: until the replica is given
        up. If the replica is adopted (taken over) again later, it has another record and another load.
        """
        return self._restored.get(name) is record

    async def _read_in(self) -> None:
        """Open the store, and register the replicas of this service that the store has. Raises the errors of the
        store.
        """
        store = self._writer.store
        await store.open()
        records = await read_records(store, self._entropy.wall_clock_ms())
        self._writer.note_success()
        self.is_read = True
        for record in records:
            if record.expired or not self._is_owned_here(record):
                continue
            try:
                if not await self._restore(record):
                    self._writer.drop(record.log)  # stale: the pages were used after the last entry of the log
            except KvplaneError as error:
                _log.warning("%s is in the store but cannot be registered: %s", record.name, error)

    async def _restore(self, record: ReplicaRecord) -> bool:
        """Register a replica from its record. Returns False if it was registered here meanwhile and has been used."""
        name = record.name
        self._known[name] = record.process
        if name not in self._registry:
            self._registry.find_equal(name, record.registration)  # checks limits before anything is built
        replica = await self._runtime.offload(partial(new_replica, record.registration.spec))
        if name in self._registry:
            if self._registry.get(name).host.decisions.num_entries:
                return False
            what = f"{name} is being replaced by its record in the store"
            self._registry.let_go(name, Unavailable(what, field="replica", remedy="try again"))
            self._leave(name)
        self._restored[name] = record
        try:
            entry = self._registry.add(name, record.registration, replica)
        except KvplaneError:
            del self._restored[name]
            raise
        entry.host.recover(Recovering(record.epoch, record.contents))
        return True

    async def _load(self, name: str, record: ReplicaRecord, ends_ns: int) -> None:
        """Read the entries of the replica with this record once, without retries. Raises the errors of the store, and
        Busy; StoreUnavailable after the time `ends_ns`.
        """
        host = self._registry.get(name).host
        recovering, log = host.recovering, LoadedLog()
        assert recovering is not None, "no session opens a replica that is loading"
        try:
            async for page in self._writer.store.load(record.log):
                await self._runtime.offload(partial(log.add_all, record.log, page))
                recovering.rows = log.rows
                if self._runtime.clock() >= ends_ns:
                    what = f"{log.rows} entries were read within {self._config.store_load_ms} ms, and not all"
                    raise StoreUnavailable(what, field="store", remedy="raise store_load_ms")
        except StoreDamaged as error:
            log.refused[Refusal.DAMAGED] += 1
            _log.warning("the entries of %s that were not read yet are lost: %s", name, error)
        past = await self._runtime.offload(partial(Past.of, log.chunks))
        if not self._is_loading(name, record):
            return  # deregistered or given up meanwhile
        recovering.entries = log.entries()
        recovering.refused.update({why.value: count for why, count in log.refused.items()})
        self._journals[name].resume(past)
        recovering.loading = False
        del self._restored[name]
        _log.info("%s: %d entries read, %d chunks refused", name, log.rows, log.refused.total())

    def _begin_empty(self, name: str, record: ReplicaRecord) -> None:
        """Let the replica with this record begin without stored entries, and delete the log that cannot be read."""
        recovering = self._registry.get(name).host.recovering
        if recovering is None or not self._is_loading(name, record):
            return  # deregistered or given up meanwhile
        del self._restored[name]
        self._writer.drop(self._journals[name].drop_all())
        recovering.entries, recovering.loading, recovering.rows = [], False, 0
        recovering.refused["not read in time"] += 1
        _log.warning("%s begins without stored entries: %s", name, self._loads.problem(name))

    def _entered(self, entry: Entry) -> None:
        """Start writing a replica that was registered or restored."""
        host, name, record = entry.host, entry.host.name, self._restored.get(entry.host.name)
        incarnation = record.incarnation if record else self._entropy.draw()
        log = LogName(name, namespace_of(entry.registration), incarnation)
        journal = ReplicaJournal(log, host.replica, self._config.store_lag_entries, self._runtime.clock)
        journal.disk_incarnation = record.disk_incarnation if record else 0
        self._journals[name] = journal
        host.decisions.follow(partial(self._follow, name, journal))
        host.mirror.on_lost.append(partial(self._lost, name, journal))
        pack = partial(self._pack_record, entry, journal)
        may_record, superseded = partial(self._may_record, name, journal), partial(self._superseded, name, journal)
        self._writer.watch(name, Watch(journal, pack, host.idle, superseded, may_record=may_record))

    def _removed(self, name: str) -> None:
        del self._journals[name]
        self._restored.pop(name, None)
        self._writer.forget(name)

    def _lost(self, name: str, journal: ReplicaJournal) -> None:
        """Delete the entries of a replica that is not as its engine has it; an image writes them again."""
        if self._journals.get(name) is journal:
            self._writer.drop(journal.drop_all())

    def _follow(self, name: str, journal: ReplicaJournal, entry: decisions.Entry) -> None:
        if isinstance(entry, decisions.Life):
            self._begin_life(name, journal, entry)
        journal.follow(entry)

    def _begin_life(self, name: str, journal: ReplicaJournal, life: decisions.Life) -> None:
        """Handle a new engine life (a new epoch): write the record again, because it has the epoch; if the page memory
        is another one, start another log.
        """
        if life.incarnation not in (0, journal.log.incarnation):
            log, now_ms = LogName(name, journal.log.namespace, life.incarnation), self._entropy.wall_clock_ms()
            # The time in ms is above all chunk numbers of that log, because no log gets a chunk per millisecond.
            self._writer.drop(journal.switch(log, after=now_ms))
        journal.disk_incarnation = life.disk_incarnation
        self._writer.record_changed(name)

    def _pack_record(self, entry: Entry, journal: ReplicaJournal) -> bytes:
        now_ms = self._entropy.wall_clock_ms()
        host = entry.host
        released, expired = host.name in self._released, self._released.get(host.name, False)
        by = (self.owner, now_ms, released, self.process, journal.disk_incarnation, expired)
        return pack_record(ReplicaRecord(host.name, entry.registration, host.epoch, journal.log.incarnation, *by))

    async def _superseded(self, name: str, journal: ReplicaJournal, number: int) -> bool:
        """Handle a log to which another process has written: that process adopted the replica, or owned it before and
        wrote late.

        The other process's chunks are replaced only if this process wrote the current record. Otherwise, while an
        engine has its session here, nothing is written: `Ownership.beat` rewrites the record or gives the replica up.
        Returns True if all entries will be written again.
        """
        record = await read_record(self._writer.store, name)
        if self._journals.get(name) is not journal:
            return False  # given up meanwhile
        if record is None or self.wrote(record) or self.shared_store is None:
            if number >= MAX_SEQ:  # no number is left above it
                await self._writer.store.drop(journal.log)
                number = 0
            journal.restart_above(number)
            self.confirm(name)
            return True
        if not self.has_engine(name):
            self.give_up(name, elsewhere(record))
        return False

    async def _may_record(self, name: str, journal: ReplicaJournal) -> bool:
        """Return True if this process may write the record of the replica. A replica that another process has adopted
        since, while the store did not answer, is given up here unless its engine has a session here.
        """
        if self.shared_store is None:
            return True
        record = await read_record(self._writer.store, name)
        if self._journals.get(name) is not journal:
            return False  # given up meanwhile
        if record is None or self.wrote(record) or self.came_from(record) or self.has_engine(name):
            return True
        _log.info("this service gives up %s: the service at %s has adopted it", name, record.owner)
        self.give_up(name, elsewhere(record))
        return False

    def has_engine(self, name: str) -> bool:
        """Return True if an engine has, or is opening, a session with the replica here; False while the replica is
        being released to other services.
        """
        has_session = (ReplicaState.LIVE, ReplicaState.OPENING, ReplicaState.DIVERGED)
        return name in self._registry and self._registry.get(name).host.state in has_session

    def wrote(self, record: ReplicaRecord) -> bool:
        """Return True if this process, and not an earlier one at the same address, wrote this record."""
        return (record.owner, record.process) == (self.owner, self.process)

    def came_from(self, record: ReplicaRecord) -> bool:
        """Return True if the process that wrote this record had the replica before this one."""
        return self._known.get(record.name) == record.process

    def is_recorded(self, name: str) -> bool:
        """Return True if the record was stored since its content last changed. Another process may have replaced the
        stored record.
        """
        return self.is_on and self._writer.is_recorded(name)
