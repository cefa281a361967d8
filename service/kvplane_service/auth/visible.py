"""The registry as a caller may see it: what is another owner's is not there.

Whatever is asked of a replica by name passes here. A name that the caller may not use is answered as one that nobody
has, in the same words, whether somebody has it or not, and no other service is asked for it.
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
    """A registry for the caller of the running call."""

    def __init__(self, registry: Registry, ensure_local: Callable[[str], Awaitable[None]]) -> None:
        """`ensure_local` makes a replica of another service known here; see `Ownership`."""
        self._registry = registry
        self._ensure_local = ensure_local

    def __iter__(self) -> Iterator[Entry]:
        owner = CALL.get().owner
        return (entry for entry in self._registry if _may_use(owner, entry))

    def __contains__(self, name: str) -> bool:
        return name in self._registry and _may_use(CALL.get().owner, self._registry.get(name))

    async def ensure_local(self, name: str) -> None:
        """Make a replica known that is not, if it can be the caller's. Raises as Ownership, and NotFound."""
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
        """Whether a replica can be called so."""
        return Registry.is_name(name)

    def check_name(self, name: str) -> None:
        """Raise PermissionDenied when no replica of the caller can be called so, whoever has one."""
        call = CALL.get()
        call.name(name)
        if Registry.is_name(name) and not call.owner.may_name(name):
            raise PermissionDenied(
                f"{name!r} is no name for a replica of owner {call.owner.name}",
                field="replica",
                remedy=f"use {', '.join(call.owner.replicas) or f'{call.owner.name}/*'}",
            )

    def find_equal(self, name: str, registration: Registration) -> Entry | None:
        """As Registry's; raises PermissionDenied and QuotaExceeded too."""
        owner = CALL.get().owner
        self.check_name(name)
        if name in self._registry and name not in self:
            raise AlreadyExists(f"{name} is taken", field="replica", remedy="choose another name")
        entry = self._registry.find_equal(name, registration)
        if entry is None:
            self._check_limits(owner, registration)
        return entry

    def add(self, name: str, registration: Registration, replica: Replica) -> Entry:
        """As Registry's; the caller becomes its owner."""
        self.find_equal(name, registration)
        return self._registry.add(name, replace(registration, registered_by=CALL.get().owner.name), replica)

    def remove(self, name: str, epoch: int | None = None) -> None:
        """As Registry's."""
        self.get(name)
        self._registry.remove(name, epoch)

    def page(self, after: str, size: int) -> list[Entry]:
        """At most `size` replicas whose names come after `after`, by name."""
        entries = sorted((entry for entry in self if entry.host.name > after), key=lambda entry: entry.host.name)
        return entries[:size]

    @staticmethod
    def _check_reach(name: str) -> None:
        """Raise NotFound for a name that cannot be the caller's, in the words of one that nobody has."""
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
