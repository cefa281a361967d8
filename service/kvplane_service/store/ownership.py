"""Which of the services that share a store decides for a replica.

    asked for a replica that is not here:   its owner lives        -> MOVED, with the address
                                            it is gone, or let go  -> adopt: register, read entries, take the session
    going away:                             let go of each replica, once its engine has left
    now and then:                           say that this service lives, and look who else says that a replica is his

The store's word is a hint where to look, and may be wrong: it never decides who owns the pages. An engine has one
session, and its pages obey the owner epoch in their stamp table alone. So of two services that hold a replica only one
is ever obeyed; the other one, which has no session, gives up.
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
from kvplane_service.store.writer import Surroundings

_BEATS_PER_LEASE = 3
_PROBE_S = 1.0

Probe = Callable[[str], Awaitable[bool]]

_log = logging.getLogger(__name__)


class OwnerUnknown(Unavailable):
    """The store does not answer, so that nobody knows who has the replica."""

    def __init__(self, replica: str, why: KvplaneError) -> None:
        super().__init__(
            f"who owns {replica} is not known: {why.message}",
            field="replica",
            remedy="try again when the store is back",
        )


class Ownership:
    """Adopts and releases the replicas of one service process. Without a shared store it knows of no others."""

    def __init__(self, registry: Registry, config: Config, keeper: Keeper, around: Surroundings, probe: Probe) -> None:
        """`probe` tells whether nobody listens at an address any more, which is proof that its service is gone."""
        self._registry = registry
        self._lease_ms = config.owner_lease_ms
        self._keeper = keeper
        self._around = around
        self._probe = probe
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._leaving = False

    async def bring(self, name: str) -> None:
        """Make a replica that is not here ours, unless another service has it.

        Raises:
            Moved: another service has it.
            UnknownReplica: nobody has.
            Unavailable: this service goes, or the store does not answer.
            LimitExceeded: there is no room for it here.
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
                raise _going()
            why = "let it go" if record.released else "is gone"
            _log.info("%s is adopted from %s, which %s", name, record.owner, why)
            await self._keeper.adopt(record)

    async def release(self, name: str) -> None:
        """Let go of a replica, which another service may take at once; nothing when it is not here."""
        if self._keeper.shared_store is not None:
            async with self._lock(name):
                if name in self._registry:
                    await self._keeper.release([name], _going())

    async def leave(self, busy: Iterable[str]) -> None:
        """This service goes: adopt nothing more, and let go of what nobody is busy with, all together."""
        self._leaving = True
        if self._keeper.shared_store is None:
            return
        kept = set(busy)
        names = [entry.host.name for entry in self._registry if entry.host.name not in kept]
        await self._keeper.release([name for name in names if not self._is_moving(name)], _going())
        for name in names:
            await self.release(name)  # once it has moved

    async def keep(self) -> None:
        """Say again and again that this service lives, and compare what it has with what others say."""
        while self._keeper.shared_store is not None:
            await self.beat()
            await self._around.sleep(self._lease_ms / 1000 / _BEATS_PER_LEASE)

    async def beat(self) -> None:
        """Once. A store that is away is the writer's to tell."""
        store = self._keeper.shared_store
        if store is None or not self._keeper.is_read:
            return
        held = [entry.host.name for entry in self._registry if not self._is_moving(entry.host.name)]
        names = [name for name in held if self._keeper.is_recorded(name)]  # what is not written cannot be compared
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
        """Two services that say the same of themselves: who has the engine's session is right."""
        if record is not None and self._keeper.wrote(record):
            return
        if record is None or record.released or self._keeper.has_engine(name):
            self._keeper.confirm(name)
        else:
            _log.info("%s is given up: the service at %s has it", name, record.owner)
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
        """Whether another service decides for the replica, as far as can be seen from here."""
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
    """The durable side of a service: what it stores, and which replicas are its own."""

    keeper: Keeper
    ownership: Ownership


async def is_gone(address: str) -> bool:
    """Whether nobody listens at an address. A silence proves nothing: the process may be stopped, the network slow."""
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


def _going() -> KvplaneError:
    return Unavailable("the service is going away", remedy="connect elsewhere")
