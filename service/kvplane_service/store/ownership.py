"""Which of the services that share a store owns a replica.

    request for an unknown replica:   its owner lives             -> MOVED, with the address
                                      it is dead, or released it  -> adopt: register, read entries, take the session
    shutting down:                    release each replica, once its engine has disconnected
    periodically:                     renew this service's lease, and compare owners in the records

The owner in the store is a hint and may be wrong: it never decides who owns the pages. An engine has one session, and
its pages obey only the owner epoch in their stamp table. So of two services that hold a replica only one has effect;
the other one, which has no session, gives up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from weakref import WeakValueDictionary

from kvplane.base.errors import KvplaneError, Unavailable
from kvplane_service.config import Config
from kvplane_service.registry import Registry, UnknownReplica
from kvplane_service.store.errors import STORE_ERRORS, StoreUnavailable
from kvplane_service.store.interface import IndexStore, SharedStore
from kvplane_service.store.keeper import Keeper, moved, read_record
from kvplane_service.store.registration import ReplicaRecord
from kvplane_service.store.writer import Runtime

_BEATS_PER_LEASE = 3
_PROBE_S = 1.0

Probe = Callable[[str], Awaitable[bool]]

_log = logging.getLogger(__name__)


class OwnerUnknown(Unavailable):
    """The store does not answer, so the owner of the replica is not known."""

    def __init__(self, replica: str, why: KvplaneError) -> None:
        super().__init__(
            f"who owns {replica} is not known: {why.message}",
            field="replica",
            remedy="retry when the store is available",
        )


class Ownership:
    """Adopts and releases the replicas of one service process. Without a shared store it does neither."""

    def __init__(self, registry: Registry, config: Config, keeper: Keeper, runtime: Runtime, probe: Probe) -> None:
        """`probe` returns True if no process listens at an address, which proves that its service has ended."""
        self._registry = registry
        self._lease_ms = config.owner_lease_ms
        self._keeper = keeper
        self._runtime = runtime
        self._probe = probe
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._leaving = False

    async def ensure_local(self, name: str) -> None:
        """Adopt a replica that is not registered here, unless another service owns it.

        Raises:
            Moved: another service owns it.
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
            if record is None:
                raise UnknownReplica(name)
            if await self._is_owned(store, record):
                raise moved(record)
            if self._leaving:
                raise _shutting_down()
            why = "released it" if record.released else "has ended"
            _log.info("%s is adopted from %s, which %s", name, record.owner, why)
            await self._keeper.adopt(record)

    async def release(self, name: str) -> None:
        """Release a replica, which another service may then adopt; does nothing if it is not registered here."""
        if self._keeper.shared_store is not None:
            async with self._lock(name):
                if name in self._registry:
                    await self._keeper.release([name], _shutting_down())

    async def leave(self, busy: Iterable[str]) -> None:
        """Shut down: adopt no further replica, and release all replicas except the `busy` ones."""
        self._leaving = True
        if self._keeper.shared_store is None:
            return
        kept = set(busy)
        names = [entry.host.name for entry in self._registry if entry.host.name not in kept]
        await self._keeper.release([name for name in names if not self._is_moving(name)], _shutting_down())
        for name in names:
            await self.release(name)  # once its adoption has ended

    async def keep(self) -> None:
        """Renew this service's lease periodically, and compare its replicas with the owners in the records."""
        while self._keeper.shared_store is not None:
            await self.beat()
            await self._runtime.sleep(self._lease_ms / 1000 / _BEATS_PER_LEASE)

    async def beat(self) -> None:
        """Run one heartbeat. The writer reports an unavailable store."""
        store = self._keeper.shared_store
        if store is None or not self._keeper.is_read:
            return
        held = [entry.host.name for entry in self._registry if not self._is_moving(entry.host.name)]
        names = [name for name in held if self._keeper.is_recorded(name)]  # an unwritten record cannot be compared
        try:
            await store.announce(self._keeper.owner, self._lease_ms)
            records = [await read_record(store, name) for name in names]
        except STORE_ERRORS as error:
            self._keeper.note_failure(error)
            return
        for name, record in zip(names, records, strict=True):
            if name in self._registry:
                self._compare(name, record)

    def _compare(self, name: str, record: ReplicaRecord | None) -> None:
        """If two services claim a replica, the one with the engine's session keeps it."""
        if record is not None and self._keeper.wrote(record):
            return
        if record is None or record.released or self._keeper.has_engine(name):
            self._keeper.confirm(name)
        else:
            _log.info("%s is given up: the service at %s owns it", name, record.owner)
            self._keeper.give_up(name, moved(record))

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

    async def _is_owned(self, store: SharedStore, record: ReplicaRecord) -> bool:
        """True if another service seems to own the replica."""
        if record.released or record.owner == self._keeper.owner:
            return False
        try:
            lives = await store.is_announced(record.owner)
        except STORE_ERRORS as error:
            self._keeper.note_failure(error)
            return True
        return lives and not await self._probe(record.owner)

    def _is_moving(self, name: str) -> bool:
        lock = self._locks.get(name)
        return lock is not None and lock.locked()

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())


@dataclass(frozen=True, slots=True)
class Durable:
    """The durable side of a service: its stored data, and the replicas that it owns."""

    keeper: Keeper
    ownership: Ownership


async def is_gone(address: str) -> bool:
    """True if no process listens at the address. A timeout proves nothing: the process may only be slow."""
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
    return Unavailable("the service is shutting down", remedy="connect elsewhere")
