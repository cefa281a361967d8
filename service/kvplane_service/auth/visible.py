"""The registry as the caller may see it: replicas of other owners do not exist.

Every access to a replica by name passes here. A name that the caller may not use is answered like an unknown name, with
the same message whether it is taken or not, and is not looked up at other services.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace

from kvplane.base.errors import AlreadyExists, NotFound, PermissionDenied
from kvplane_service.auth.gate import CALL
from kvplane_service.auth.owners import Owner
from kvplane_service.auth.quotas import quota_exceeded
from kvplane_service.core.replica import Replica
from kvplane_service.registry import Entry, Registration, Registry, UnknownReplica


class VisibleReplicas:
    """The registry as visible to the caller of the current call."""

    def __init__(self, registry: Registry, ensure_local: Callable[[str], Awaitable[None]]) -> None:
        """`ensure_local`: makes a replica of another service known to this one; see `Ownership`."""
        self._registry = registry
        self._ensure_local = ensure_local

    def __iter__(self) -> Iterator[Entry]:
        owner = CALL.get().owner
        return (entry for entry in self._registry if _may_use(owner, entry))

    def __contains__(self, name: str) -> bool:
        return name in self._registry and _may_use(CALL.get().owner, self._registry.get(name))

    async def ensure_local(self, name: str) -> None:
        """Make an unknown replica known to this process, if the caller may use it. Raises as Ownership, and
        NotFound.
        """
        self._check_reach(name)
        await self._ensure_local(name)

    def get(self, name: str) -> Entry:
        """The replica of that name. Raises NotFound."""
        self._check_reach(name)
        entry, call = self._registry.get(name), CALL.get()
        if not _may_use(call.owner, entry):
            call.is_hidden = True
            raise UnknownReplica(name)
        return entry

    @staticmethod
    def is_name(name: str) -> bool:
        """Whether this is a valid replica name."""
        return Registry.is_name(name)

    def check_name(self, name: str) -> None:
        """Raise PermissionDenied when the caller may not register this name, whether it is taken or not."""
        call = CALL.get()
        call.name(name)
        if Registry.is_name(name) and not call.owner.may_name(name):
            raise PermissionDenied(
                f"owner {call.owner.name} may not register {name!r}",
                field="replica",
                remedy=f"use {', '.join(call.owner.replicas) or f'{call.owner.name}/*'}",
            )

    def find_equal(self, name: str, registration: Registration) -> Entry | None:
        """As Registry.find_equal; raises also PermissionDenied and QuotaExceeded."""
        owner = CALL.get().owner
        self.check_name(name)
        if name in self._registry and name not in self:
            raise AlreadyExists(f"{name} is taken", field="replica", remedy="choose another name")
        entry = self._registry.find_equal(name, registration)
        if entry is None:
            self._check_limits(owner, registration)
        return entry

    def add(self, name: str, registration: Registration, replica: Replica) -> Entry:
        """As Registry.add; the caller becomes the owner."""
        self.find_equal(name, registration)
        return self._registry.add(name, replace(registration, registered_by=CALL.get().owner.name), replica)

    def remove(self, name: str, epoch: int | None = None) -> None:
        """As Registry.remove."""
        self.get(name)
        self._registry.remove(name, epoch)

    def page(self, after: str, size: int) -> list[Entry]:
        """At most `size` replicas whose names come after `after`, by name."""
        entries = sorted((entry for entry in self if entry.host.name > after), key=lambda entry: entry.host.name)
        return entries[:size]

    @staticmethod
    def _check_reach(name: str) -> None:
        """Raise NotFound for a name that the caller may not use, with the message of an unknown name."""
        call = CALL.get()
        call.name(name)
        if not (call.owner.every_replica or call.owner.may_name(name)):
            call.is_hidden = True
            unknown = UnknownReplica(name)
            raise NotFound(unknown.message, field=unknown.field, remedy=unknown.remedy)

    def _check_limits(self, owner: Owner, registration: Registration) -> None:
        limits, mine = owner.limits, [
            entry.registration.spec.num_blocks
            for entry in self._registry
            if entry.registration.registered_by == owner.name
        ]
        if limits.replicas is not None and len(mine) >= limits.replicas:
            raise quota_exceeded(owner, "replicas", limits.replicas)
        if limits.blocks is not None and sum(mine) + registration.spec.num_blocks > limits.blocks:
            raise quota_exceeded(owner, "blocks", limits.blocks)


def _may_use(owner: Owner, entry: Entry) -> bool:
    return owner.may_use(entry.host.name, entry.registration.registered_by)
