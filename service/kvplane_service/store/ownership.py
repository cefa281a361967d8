"""Decide which of the services that share a store owns a replica.

    call about an unknown replica:   owner lives                   -> MOVED, with the address of the owner
                                     owner is dead, or released it -> adopt: register, read entries, accept the session
    shutdown:                        release each replica (others may adopt it) once its engine has left
    periodically:                    renew this service's lease; separately, compare the owners in the records, and
                                     remove the replicas that nothing has used for `replica_ttl_ms`

To adopt a replica is to take it over. The owner in the store is a hint and may be wrong: it never decides who may write
the pages. An engine has one session, and its pages obey only the owner epoch in their stamp table. So if two services
hold a replica, only the one with the engine's session can change pages; the other one gives the replica up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from functools import partial
from weakref import WeakValueDictionary

from kvplane.base.errors import KvplaneError, NotFound, Unavailable
from kvplane_service.config import Config
from kvplane_service.registry import Entry, Registration, Registry, UnknownReplica
from kvplane_service.replicas.recovery import UNCLAIMED_EPOCHS, UNSTORED_EPOCHS
from kvplane_service.store.errors import STORE_ERRORS, StoreUnavailable
from kvplane_service.store.interface import IndexStore
from kvplane_service.store.keeper import Keeper
from kvplane_service.store.loading import read_record
from kvplane_service.store.owners import Owners, OwnerUnknown
from kvplane_service.store.registration import ReplicaRecord, elsewhere, moved
from kvplane_service.store.writer import Runtime

_BEATS_PER_LEASE = 3
_PROBE_S = 1.0

_log = logging.getLogger(__name__)


class Ownership:
    """Adopts replicas (takes them over from other services) and releases them to other services. Does neither without a
    shared store.
    """

    def __init__(self, registry: Registry, config: Config, keeper: Keeper, runtime: Runtime, owners: Owners) -> None:
        self._registry = registry
        self._lease_ms = config.owner_lease_ms
        self._keeper = keeper
        self._runtime = runtime
        self._owners = owners
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._leaving = False
        self._released: Collection[str] = ()  # while this process shuts down: what it releases
        registry.watch(self._entered)

    def _entered(self, entry: Entry) -> None:
        """Let no epoch of the replica begin that this process may not begin."""
        entry.host.may_begin = partial(self._owners.check, entry.host.name)

    async def ensure_granted(self, name: str) -> None:
        """Let this process begin epochs of a replica that is registered here, above those of a service that had it
        meanwhile.

        Raises:
            Moved: another live service owns it.
            Unavailable: that cannot be found out, or is not certain yet.
        """
        if self._keeper.shared_store is None:
            return
        granted = await self._owners.ensure(name)
        if name not in self._registry:
            return  # given up meanwhile, which its caller finds out
        host = self._registry.get(name).host
        if granted > host.epoch:  # else it was granted before the latest epoch, which began here
            # As for an adopted replica: with room for epochs that the table does not have, and no further than that.
            host.observe_owner_epoch(min(granted, host.epoch + UNCLAIMED_EPOCHS) + UNSTORED_EPOCHS)

    async def ensure_local(self, name: str) -> None:
        """Adopt a replica that is not registered here, unless another live service owns it.

        Raises:
            Moved: another live service owns it.
            UnknownReplica: the store has no record of it.
            Unavailable: this service shuts down, or the store does not answer.
            LimitExceeded: this service has no capacity for it.
        """
        store = self._keeper.shared_store
        if store is None or not self._registry.is_name(name):
            raise UnknownReplica(name)
        async with self._lock(name):
            if name in self._registry:
                return
            record = await self._read(store, name)
            if record is None or record.expired:
                raise UnknownReplica(name)
            if self._leaving:
                owner = await self._owners.owner_of(record)
                raise moved(name, owner) if owner else _shutting_down()
            record = await self._owners.take(record)
            why = "released it" if record.released else "has ended"
            _log.info("this service adopts %s from the service at %s, which %s", name, record.owner, why)
            await self._keeper.adopt(record)

    async def resume(self, name: str, registration: Registration) -> None:
        """Let a replica come back that has expired, since it is registered again. If the registration is another one,
        delete what the store has of the old one.

        Raises Unavailable (this service shuts down, or the store does not answer), LimitExceeded.
        """
        store = self._keeper.store
        if store is None:
            return
        async with self._lock(name):
            record = None if name in self._registry else await self._read(store, name)
            if record is None or not record.expired:
                return
            if self._leaving:
                raise _shutting_down()
            old = record.registration
            if registration.registered_by == old.registered_by and registration.agrees_with(old):
                _log.info("%s is registered again: its keys come back from the store", name)
                await self._keeper.adopt(record)
            else:
                await self._delete(record)

    async def expire(self, name: str, ttl_ns: int) -> None:
        """Remove a replica that has not been used for `ttl_ns` nanoseconds; a store keeps its keys. Does nothing while
        the store does not answer, so that no key is lost.
        """
        async with self._lock(name):
            if name not in self._registry or self._registry.get(name).host.unused_ns < ttl_ns:
                return
            what = f"{name} has expired: nothing has used it for {ttl_ns // 10**9} s"
            reason = NotFound(what, field="replica", remedy="register it again, or raise replica_ttl_ms")
            if not self._keeper.is_on:
                self._registry.let_go(name, reason)
            else:
                try:
                    self._keeper.check_answers()
                except StoreUnavailable:
                    return
                await self._keeper.release([name], reason, expired=True)
            self._registry.num_expired += 1
            _log.info("%s", reason.message)

    async def drop_expired(self) -> None:
        """Delete the replicas from the store that expired long ago, if the store does not do so itself."""
        try:
            records = await self._keeper.expired_records()
        except STORE_ERRORS as error:
            self._keeper.note_failure(error)
            return
        for record in records:
            async with self._lock(record.name):
                if record.name not in self._registry:
                    await self._delete(record)

    async def _delete(self, record: ReplicaRecord) -> None:
        try:
            store = self._keeper.store
            assert store is not None, "the record was read from it"
            await store.drop(record.log)
            await store.drop_record(record.name)
        except STORE_ERRORS as error:
            self._keeper.note_failure(error)

    async def release(self, name: str) -> None:
        """Release a replica, so that another service may adopt the replica; do nothing if it is not registered here."""
        if self._keeper.shared_store is not None:
            async with self._lock(name):
                if name in self._registry:
                    await self._keeper.release([name], _shutting_down())
            await self._hand_over()

    async def leave(self, busy: Iterable[str]) -> None:
        """Shut down: adopt no further replica, and release all replicas to other services except `busy`, whose engines
        still have a session.
        """
        self._leaving = True
        if self._keeper.shared_store is None:
            return
        kept = set(busy)
        names = [entry.host.name for entry in self._registry if entry.host.name not in kept]
        self._released = [name for name in names if not self._is_moving(name)]
        try:
            await self._keeper.release(self._released, _shutting_down())
        finally:
            self._released = ()
        await self._hand_over()
        for name in names:
            await self.release(name)  # once its adoption has ended

    async def keep(self) -> None:
        """Until cancelled, renew this service's lease, and compare its replicas with the owners in the records, each
        several times per lease period. No comparison delays a renewal, even if many records are read from a slow store.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._repeat(self._renew))
            group.create_task(self._repeat(self._compare_all))

    async def begin(self) -> None:
        """Wait until replicas can be taken over, and renew the lease. Called before calls are served."""
        await self._owners.prepare()
        await self.beat()

    async def beat(self) -> None:
        """Renew the lease once, and compare the owners in the records with this service once. If the store fails, the
        failure is recorded for the reports and not raised.
        """
        if await self._renew():
            await self._compare_all()

    async def _hand_over(self) -> None:
        """Let others have what this service has released. A released record does that where owners are hints."""
        if self._owners.are_granted:
            await self._renew()

    async def _repeat(self, work: Callable[[], Awaitable[bool]]) -> None:
        while self._keeper.shared_store is not None:
            await work()
            await self._runtime.sleep(self._lease_ms / 1000 / _BEATS_PER_LEASE)

    async def _renew(self) -> bool:
        """Renew the lease of this service, and give up what other services own. Returns False if the store failed, or
        if its records were not read yet.
        """
        names = [entry.host.name for entry in self._registry]
        moving = {*(name for name, lock in self._locks.items() if lock.locked()), *self._released}
        epochs = {name: self._registry.get(name).host.epoch for name in names if name not in moving}
        lost = await self._owners.renew(epochs, moving)
        for name, address in (lost or {}).items():
            # Also with an engine here: it would stay, and the other service would answer that no engine is connected.
            is_here = name in self._registry and not self._is_moving(name)
            if is_here and address != self._keeper.owner:  # else an earlier process, whose lease ends
                _log.info("this service gives up %s: the service at %s has it", name, address)
                self._keeper.give_up(name, moved(name, address))
        return lost is not None

    async def _compare_all(self) -> bool:
        """Compare each replica with the owner in its record, one call of the store at a time. Returns False if the
        store failed, or if its records were not read yet.
        """
        store = self._keeper.shared_store
        if store is None or not self._keeper.is_read:
            return False
        for name in [entry.host.name for entry in self._registry]:
            if not self._is_comparable(name):
                continue
            try:
                record = await read_record(store, name)
            except STORE_ERRORS as error:
                self._keeper.note_failure(error)
                return False
            if self._is_comparable(name):
                self._compare(name, record)
        return True

    def _is_comparable(self, name: str) -> bool:
        """Return True if the replica is registered here, is not being taken over or released, and has its current
        record in the store.
        """
        return name in self._registry and not self._is_moving(name) and self._keeper.is_recorded(name)

    def _compare(self, name: str, record: ReplicaRecord | None) -> None:
        """Keep or give up a replica whose record another process wrote: the service with the engine's session keeps the
        replica.
        """
        if record is not None and self._keeper.wrote(record):
            return
        is_late = record is not None and record.released and self._keeper.came_from(record)  # written before ours
        if record is None or is_late or self._keeper.has_engine(name):
            self._keeper.confirm(name)
        else:
            _log.info("this service gives up %s: the service at %s has adopted it", name, record.owner)
            self._keeper.give_up(name, elsewhere(record))

    async def _read(self, store: IndexStore, name: str) -> ReplicaRecord | None:
        try:
            self._keeper.check_answers()
        except StoreUnavailable as error:
            raise OwnerUnknown(name, error) from error
        try:
            return await read_record(store, name)
        except STORE_ERRORS as error:
            self._keeper.note_failure(error)
            raise OwnerUnknown(name, error) from error

    def _is_moving(self, name: str) -> bool:
        lock = self._locks.get(name)
        return lock is not None and lock.locked()

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())


async def is_gone(address: str) -> bool:
    """Return True if no process listens at the address. A timeout proves nothing: the process may only be slow."""
    try:
        async with asyncio.timeout(_PROBE_S):
            if address.startswith("unix:"):
                _, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
            else:
                host, _, port = address.rpartition(":")
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except (OSError, ValueError, TimeoutError):
        return False
    writer.close()
    return False


def _shutting_down() -> KvplaneError:
    return Unavailable("the service is shutting down", remedy="connect to another service")


_CHECKS_PER_TTL = 8
_LONGEST_PAUSE_S = 600.0


async def expire_in_background(
    registry: Registry, ownership: Ownership, ttl_ms: int, sleep: Callable[[float], Awaitable[None]]
) -> None:
    """Until cancelled, remove replicas that have expired, several times per `ttl_ms`."""
    while True:
        await sleep(min(_LONGEST_PAUSE_S, ttl_ms / 1000 / _CHECKS_PER_TTL))
        await expire_all(registry, ownership, ttl_ms)


async def expire_all(registry: Registry, ownership: Ownership, ttl_ms: int) -> None:
    """Remove the replicas that have expired, and what a store has kept long enough of earlier ones."""
    for name in _unused(registry, ttl_ms * 1_000_000):
        await ownership.expire(name, ttl_ms * 1_000_000)
    await ownership.drop_expired()


def _unused(registry: Registry, ttl_ns: int) -> list[str]:
    """Return the names of the replicas that have expired. A worker that holds the pages of a replica uses it."""
    for entry in registry:
        if entry.workers.alive():
            entry.host.touch()
    return [entry.host.name for entry in registry if entry.host.unused_ns >= ttl_ns]
