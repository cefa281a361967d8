"""Keeps the replicas of a registry in a store, and brings them back after a restart.

    open      the store is there and ours
    restore   replicas are registered again, each waiting for its engine (ReplicaState.RECOVERING)
    load      their entries are read beside the event loop, while calls are answered
    write     from then on the store follows what is published

Between start and stop replicas of other services are adopted, and own ones released: see `ownership`.
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
from kvplane_service.store.writer import Limits, StoreWriter, Surroundings, Watch

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
        self.process = chance.draw()  # tells this process from an earlier one at the same address
        self.is_read = False  # what the store has of this service is registered
        self._restored: dict[str, ReplicaRecord] = {}
        self._released: set[str] = set()
        self._loads: set[asyncio.Task[None]] = set()
        self._journals: dict[str, ReplicaJournal] = {}
        self._writer: StoreWriter | None = None

    # -- from start to end -------------------------------------------------------------------------------------------

    async def start(self, store: IndexStore) -> None:
        """Follow the registry from now on, and register again what the store knows.

        A store that does not answer is no error: `load` asks it again, and until then nothing of it is known here.

        Raises:
            ClockBehindStore: a record is from the future; nothing was registered.
            KvplaneError: the store cannot be used; it was not touched.
        """
        config = self._config
        limits = Limits(config.store_flush_ms, config.store_lag_entries, config.store_lag_ms, config.store_ttl_ms)
        self._writer = StoreWriter(store, limits, self._around)
        self._registry.watch(self._entered)
        self._registry.watch_removals(self._removed)
        try:
            await self._read_in()
        except StoreUnavailable as error:
            self._writer.note_failure(error)

    async def load(self) -> None:
        """Read the entries of what was restored. A store that fails meanwhile is asked again."""
        while not self.is_read:
            await self._around.sleep(_LOAD_PAUSE_S)
            try:
                await self._read_in()
            except KvplaneError as error:
                assert self._writer is not None, "there is no store"
                self._writer.note_failure(error)
        for name, record in list(self._restored.items()):
            await self._load_patiently(name, record)

    async def write(self) -> None:
        """Follow what is published, until cancelled."""
        assert self._writer is not None, "there is no store"
        await self._writer.run()

    async def stop(self, patience_s: float = _LAST_WRITE_S) -> None:
        """Write what waits, for so long at most, and let go of the store. `write` was cancelled before."""
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
            _log.warning("the store does not answer: what waits for it is not written")

    async def settle(self, name: str) -> None:
        """Wait until the store knows the replica, or fails: a restart shall not forget what was answered."""
        if self._writer is None or not self.is_read:
            return
        try:
            async with asyncio.timeout(self._config.store_timeout_ms / 1000):
                await self._writer.write_record(name)
        except TimeoutError:
            self._writer.note_failure(StoreUnavailable("it takes too long to write a record", field="store"))

    # -- what others ask ---------------------------------------------------------------------------------------------

    def report(self, entry: Entry) -> StoreReport:
        """How the durable side of a replica is."""
        if self._writer is None or not entry.registration.spec.events:
            return StoreReport(StoreState.OFF)
        return self._writer.report(entry.host.name)

    @property
    def is_on(self) -> bool:
        """Whether there is a store at all."""
        return self._writer is not None

    @property
    def is_there(self) -> bool:
        """Whether the store answers, and was read."""
        return self.is_read and self._writer is not None and not self._writer.report().problem

    def check_answers(self) -> None:
        """Raise StoreUnavailable, at once, when the store cannot be asked now."""
        assert self._writer is not None, "there is no store"
        self._writer.check_answers()
        if not self.is_read:
            raise StoreUnavailable("it has not been read yet", field="store", remedy="try again in a moment")

    def note_failure(self, error: KvplaneError) -> None:
        """The store was asked something, and failed."""
        assert self._writer is not None, "there is no store"
        self._writer.note_failure(error)

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
        load = asyncio.create_task(self._load_patiently(record.name, record))  # goes on when the caller is cancelled
        self._loads.add(load)
        load.add_done_callback(self._loads.discard)
        await self._writer.write_record(record.name)

    async def release(self, names: Sequence[str], reason: KvplaneError) -> None:
        """Let go of replicas: write out what was published, and say in their records that they have no owner."""
        assert self._writer is not None, "there is no store"
        for name in names:
            self._registry.let_go(name, reason)
            self._restored.pop(name, None)  # what still reads it in looks here, and stops
        try:
            is_written = await self._write_released(names)
        except StoreUnavailable:
            is_written = False
        finally:
            self._released.difference_update(names)
            for name in names:
                self._leave(name)
        if names and not is_written:
            _log.warning("nobody was told that %s was let go: the store is away", ", ".join(names))

    def give_up(self, name: str, reason: KvplaneError) -> None:
        """Another service owns the replica; nothing of it is written here any more."""
        self._leave(name)
        self._registry.let_go(name, reason)

    def confirm(self, name: str) -> None:
        """Write the replica's record again."""
        assert self._writer is not None, "there is no store"
        self._writer.record_changed(name)

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _write_released(self, names: Sequence[str]) -> bool:
        """Everything, then the records: who reads there that nobody owns a replica finds all of it."""
        assert self._writer is not None, "there is no store"
        self.check_answers()
        if not await self._writer.write_all():
            return False
        for name in names:
            self._released.add(name)
            self._writer.record_changed(name)
        return await self._writer.write_all()

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

    async def _read_in(self) -> None:
        """Register again what the store knows; raises what the store refuses."""
        assert self._writer is not None, "there is no store"
        store = self._writer.store
        await store.open()
        records = await _read_records(store)
        self._check_clock(records)
        self._writer.note_success()
        self.is_read = True
        for record in records:
            if not self._is_ours(record):
                continue
            try:
                if not await self._restore(record):
                    self._writer.drop(record.log)  # nothing was written to it since, and its pages have been used
            except KvplaneError as error:
                _log.warning("%s is in the store and cannot be registered again: %s", record.name, error)

    async def _restore(self, record: ReplicaRecord) -> bool:
        """Register what the store knows; False when somebody registered and used it here since."""
        name = record.name
        replica = await self._around.offload(partial(new_replica, record.registration.spec))
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
        assert recovering is not None, "nobody opens a replica that is loading"
        try:
            async for page in self._writer.store.load(record.log):
                await self._around.offload(partial(log.add_all, record.log, page))
                recovering.rows = log.rows
        except StoreDamaged as error:
            log.refused[Refusal.DAMAGED] += 1
            _log.warning("the rest of the entries of %s is lost: %s", name, error)
        except STORE_ERRORS as error:
            self._writer.note_failure(error)
            return False
        past = await self._around.offload(partial(Past.of, log.chunks))
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
        """A replica was registered, or restored."""
        assert self._writer is not None, "there is no store"
        host, name, record = entry.host, entry.host.name, self._restored.get(entry.host.name)
        incarnation = record.incarnation if record else self._chance.draw()
        log = LogName(name, namespace_of(entry.registration), incarnation)
        journal = ReplicaJournal(log, host.replica, self._config.store_lag_entries, self._around.clock)
        self._journals[name] = journal
        host.decisions.follow(partial(self._follow, name, journal))
        pack = partial(self._pack_record, entry, journal)
        self._writer.watch(name, Watch(journal, pack, host.settled, partial(self._superseded, name, journal)))

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
            log, now_ms = LogName(name, journal.log.namespace, life.incarnation), self._chance.wall_clock_ms()
            self._writer.drop(journal.switch(log, after=now_ms))  # no log has had a chunk in each millisecond
        self._writer.record_changed(name)

    def _pack_record(self, entry: Entry, journal: ReplicaJournal) -> bytes:
        now_ms = self._chance.wall_clock_ms()
        host = entry.host
        released = host.name in self._released
        by = (self.owner, now_ms, released, self.process)
        return pack_record(ReplicaRecord(host.name, entry.registration, host.epoch, journal.log.incarnation, *by))

    async def _superseded(self, name: str, journal: ReplicaJournal, number: int) -> bool:
        """Another process wrote the replica's log: it took the replica over, or had it before and was late.

        What that process wrote is replaced only when the record is this process's. While it is not, and an engine has
        its session here, nothing is written: `Ownership.beat` confirms the record, or gives the replica up.
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
        """Whether an engine has its session with the replica here, or opens it."""
        return self._registry.get(name).host.state in (ReplicaState.LIVE, ReplicaState.OPENING)

    def wrote(self, record: ReplicaRecord) -> bool:
        """Whether this process wrote the record."""
        return (record.owner, record.process) == (self.owner, self.process)

    def is_recorded(self, name: str) -> bool:
        """Whether the store has the replica's record as this process wrote it last, unless another wrote one since."""
        return self._writer is not None and self._writer.is_recorded(name)


async def read_record(store: IndexStore, name: str) -> ReplicaRecord | None:
    """The record of a replica, None when there is none that can be used."""
    raw = await store.get_record(name)
    try:
        return unpack_record(raw) if raw is not None else None
    except RecordRefused as error:
        _log.warning("the store's record of %s is not used: %s", name, error)
        return None


def moved(record: ReplicaRecord) -> Moved:
    """The error for clients of a replica that another service has."""
    return Moved(
        f"{record.name} is owned by the service at {record.owner}",
        field="replica",
        remedy="call there",
        metadata={"address": record.owner},
    )


async def _read_records(store: IndexStore) -> list[ReplicaRecord]:
    records = []
    try:
        for name, raw in await store.records():
            try:
                records.append(unpack_record(raw))
            except RecordRefused as error:
                _log.warning("the store's record of %s is not used: %s", name, error)
    except StoreDamaged as error:
        _log.warning("the store's records are lost: %s", error)
    return records
