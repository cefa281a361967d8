"""Restrict the registry to the replicas that the caller may see; other replicas do not exist for the caller.

Every access to a replica by name goes through this module. A name that the caller may not use is answered like an
unknown name, with the same message whether a replica has it or not, and no other service is asked for that name.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

from kvplane.base.errors import AlreadyExists, NotFound, PermissionDenied
from kvplane.base.groups import EvictionPolicy
from kvplane_core.face.interface import ReplicaCore
from kvplane_service.auth.gate import CALL
from kvplane_service.auth.owners import Owner
from kvplane_service.auth.quotas import quota_exceeded
from kvplane_service.registry import Entry, Registration, Registry, UnknownReplica
from kvplane_service.replicas.peers import Namespace


class VisibleReplicas:
    """The registry restricted to the replicas that the owner of the current call may see."""

    def __init__(self, registry: Registry, ensure_local: Callable[[str], Awaitable[None]]) -> None:
        """`ensure_local` lets this process adopt a replica that is not registered here; see Ownership.ensure_local."""
        self._registry = registry
        self._ensure_local = ensure_local

    def __iter__(self) -> Iterator[Entry]:
        owner = CALL.get().owner
        return (entry for entry in self._registry if _may_use(owner, entry))

    def __contains__(self, name: str) -> bool:
        return name in self._registry and _may_use(CALL.get().owner, self._registry.get(name))

    async def ensure_local(self, name: str) -> None:
        """Let this process adopt a replica that is not registered here, if the caller may use the replica's name.

        Raises:
            NotFound: the caller may not use the name, or the store has no record of the replica.
            Moved, Unavailable, LimitExceeded: as `Ownership.ensure_local` raises.
        """
        self._check_reach(name)
        await self._ensure_local(name)

    def get(self, name: str) -> Entry:
        """Return the replica with this name. Raises NotFound if there is none, or if the caller may not see it."""
        self._check_reach(name)
        entry, call = self._registry.get(name), CALL.get()
        if not _may_use(call.owner, entry):
            call.is_hidden = True
            raise UnknownReplica(name)
        return entry

    def namespace(self, digest: bytes) -> Namespace | None:
        """Return the namespace of that digest, of any owner; None if it has no replica here."""
        return self._registry.namespaces.get(digest)

    def check_name(self, name: str) -> None:
        """Raise PermissionDenied if the caller may not register this name, whether or not a replica has it."""
        call = CALL.get()
        call.name(name)
        if Registry.is_name(name) and not call.owner.may_name(name):
            raise PermissionDenied(
                f"owner {call.owner.name} may not register a replica with the name {name!r}",
                field="replica",
                remedy=f"use a name that matches {', '.join(call.owner.replicas) or f'{call.owner.name}/*'}",
            )

    def default_policy(self, name: str) -> EvictionPolicy:
        """Return the eviction policy of a registration that names none, as `Registry.default_policy`."""
        return self._registry.default_policy(name)

    def find_equal(self, name: str, registration: Registration) -> Entry | None:
        """Return the replica with this name and an equal registration, None if the name is free. Calls
        `Registry.find_equal`, and checks the caller's permissions and limits.

        Raises:
            PermissionDenied: the caller may not register this name.
            AlreadyExists: a replica of another owner has the name.
            QuotaExceeded: the new replica would exceed a limit of the caller.
        """
        owner = CALL.get().owner
        self.check_name(name)
        if name in self._registry and name not in self:
            raise AlreadyExists(f"a replica {name} already exists", field="replica", remedy="choose another name")
        entry = self._registry.find_equal(name, registration)
        if entry is None:
            self._check_limits(owner, registration)
        return entry

    def add(self, name: str, registration: Registration, replica: ReplicaCore) -> Entry:
        """Register a replica by `Registry.add`."""
        self.find_equal(name, registration)
        return self._registry.add(name, registration, replica)

    def remove(self, name: str, epoch: int | None = None) -> None:
        """Remove a replica by `Registry.remove`, if the caller may see the replica."""
        self.get(name)
        self._registry.remove(name, epoch)

    def page(self, after: str, size: int) -> list[Entry]:
        """Return at most `size` replicas whose names sort after `after`, sorted by name."""
        entries = sorted((entry for entry in self if entry.host.name > after), key=lambda entry: entry.host.name)
        return entries[:size]

    @staticmethod
    def _check_reach(name: str) -> None:
        """Raise NotFound, with the message for an unknown replica, if the caller may not use the name."""
        call = CALL.get()
        call.name(name)
        if not (call.owner.every_replica or call.owner.may_name(name)):
            call.is_hidden = True
            unknown = UnknownReplica(name)
            raise NotFound(unknown.message, field=unknown.field, remedy=unknown.remedy)

    def _check_limits(self, owner: Owner, registration: Registration) -> None:
        limits, mine = (
            owner.limits,
            [
                entry.registration.spec.num_blocks
                for entry in self._registry
                if entry.registration.registered_by == owner.name
            ],
        )
        if limits.replicas is not None and len(mine) >= limits.replicas:
            raise quota_exceeded(owner, "replicas", limits.replicas)
        if limits.blocks is not None and sum(mine) + registration.spec.num_blocks > limits.blocks:
            raise quota_exceeded(owner, "blocks", limits.blocks)


def _may_use(owner: Owner, entry: Entry) -> bool:
    return owner.may_use(entry.host.name, entry.registration.registered_by)
