"""How services that share an index agree on owners: by leases in the index store, which are hints, or by grants.

With hints two services may own a replica at a time, and the engine's session decides. With grants one at most may begin
epochs. Either way the pages obey the owner epoch in their stamp tables.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from typing import TypeAlias

from kvplane.base.errors import KvplaneError, Unavailable
from kvplane_service.store.errors import STORE_ERRORS
from kvplane_service.store.grants import Grants, NotGranted
from kvplane_service.store.keeper import Keeper
from kvplane_service.store.registration import ReplicaRecord, moved

Probe = Callable[[str], Awaitable[bool]]


class OwnerUnknown(Unavailable):
    """The store does not answer, so this service cannot find out which service owns the replica."""

    def __init__(self, replica: str, why: KvplaneError) -> None:
        super().__init__(
            f"the owner of {replica} cannot be read from the store: {why.message}",
            field="replica",
            remedy="retry when the store is available",
        )


class StoreOwners:
    """What this process may own, by the leases of services in the index store.

    Attributes:
        are_granted: one process at a time may own a replica, and has to renew to let others have it.
    """

    are_granted = False

    def __init__(self, keeper: Keeper, lease_ms: int, probe: Probe) -> None:
        """`probe` returns True if no process listens at an address: then the service there has ended."""
        self._keeper, self._lease_ms, self._probe = keeper, lease_ms, probe

    async def prepare(self) -> None:
        """Wait until replicas can be taken, at most a lease; returns at once if the store fails. Here nothing is
        waited for: a lease that was lost is that of a service which renews it.
        """

    async def renew(self, epochs: Mapping[str, int], moving: Collection[str]) -> Mapping[str, str] | None:
        """Extend this process's lease. `epochs` has the replicas that it has and their latest epochs, `moving` those
        that are adopted or released now; all others are free for other services. Returns the replicas that other
        services have, with their addresses; None if the store failed.
        """
        store = self._keeper.shared_store
        if store is None or not self._keeper.is_read:
            return None
        try:
            await store.announce(self._keeper.owner, self._lease_ms)
        except STORE_ERRORS as error:
            self._keeper.note_failure(error)
            return None
        return {}

    async def owner_of(self, record: ReplicaRecord) -> str:
        """Return the address of another live service that seems to own the replica, "" if there is none: here the owner
        in the record, if its lease has not ended.
        """
        is_owned = not record.released and record.owner != self._keeper.owner and await self._lives(record.owner)
        return record.owner if is_owned else ""

    async def take(self, record: ReplicaRecord) -> ReplicaRecord:
        """Take over a replica, and return its record, with an epoch above those of earlier owners as far as they are
        known.

        Raises:
            Moved: another live service has it.
            Unavailable: that cannot be found out, or is not certain yet.
        """
        if owner := await self.owner_of(record):
            raise moved(record.name, owner)
        return record

    async def ensure(self, name: str) -> int:
        """Raise Moved or Unavailable unless this process may begin an epoch of a replica that is registered here. It
        may: the page memory decides. Returns an epoch that other services may have begun, 0 if none is known.
        """
        return 0

    def check(self, name: str) -> None:
        """The same, as far as it is known without a call."""

    async def _lives(self, owner: str) -> bool:
        store = self._keeper.shared_store
        assert store is not None, "the record was read from it"
        try:
            lives = await store.lease(owner) is not None
        except STORE_ERRORS as error:
            self._keeper.note_failure(error)
            return True
        return lives and not await self._probe(owner)


class GrantedOwners:
    """What this process may own, by grants. The methods are those of `StoreOwners`."""

    are_granted = True

    def __init__(self, grants: Grants, keeper: Keeper) -> None:
        self._grants, self._keeper = grants, keeper

    async def prepare(self) -> None:
        """Wait while a table is new (see StoreOwners.prepare)."""
        with contextlib.suppress(*STORE_ERRORS):
            await self._grants.prepare()

    async def renew(self, epochs: Mapping[str, int], moving: Collection[str]) -> Mapping[str, str] | None:
        """Renew the grants (see StoreOwners.renew)."""
        try:
            return await self._grants.renew(epochs, moving)
        except STORE_ERRORS:
            return None

    async def owner_of(self, record: ReplicaRecord) -> str:
        """Return the owner in the table (see StoreOwners.owner_of)."""
        return self._grants.owner_of(record.name)

    async def take(self, record: ReplicaRecord) -> ReplicaRecord:
        """Take the grant (see StoreOwners.take)."""
        await self._take(record.name)
        return replace(record, epoch=max(record.epoch, self._grants.epoch_of(record.name)))

    async def ensure(self, name: str) -> int:
        """Take the grant, unless this process has it, and return its epoch (see StoreOwners.ensure)."""
        await self._take(name)
        self.check(name)
        return self._grants.epoch_of(name)

    def check(self, name: str) -> None:
        """Raise NotGranted unless this process has the grant by its own clock."""
        self._grants.check(name)

    async def _take(self, name: str) -> None:
        try:
            address = await self._grants.take(name)
        except STORE_ERRORS as error:
            what = f"the table of owners does not grant {name}: {error.message}"
            raise NotGranted(what, field="replica", remedy=error.remedy or "try again") from error
        if address == self._keeper.owner:
            what = f"an earlier process at this address has {name} until its lease ends"
            raise Unavailable(what, field="replica", remedy="try again")
        if address:
            raise moved(name, address)


Owners: TypeAlias = StoreOwners | GrantedOwners
