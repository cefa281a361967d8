"""Create what the configuration key `ownership` names:

store | grants | lease:[NAMESPACE/]NAME | etcd:http[s]://HOST:PORT,...
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping

from kvplane.base.errors import InvalidArgument
from kvplane_service.config import Config
from kvplane_service.runtime.executors import InOrder
from kvplane_service.store import etcd, lease
from kvplane_service.store.errors import StoreUnavailable
from kvplane_service.store.grants import Grants, Identity
from kvplane_service.store.interface import OwnerStore, OwnerTable, Stored
from kvplane_service.store.json_api import Endpoint, JsonApi
from kvplane_service.store.keeper import Keeper
from kvplane_service.store.owners import GrantedOwners, Owners, StoreOwners
from kvplane_service.store.ownership import is_gone
from kvplane_service.store.writer import Runtime

_MEMBER = re.compile(r"https?://(\[[0-9a-fA-F:.]+\]|[a-zA-Z0-9.-]+):[0-9]{1,5}")
_MAX_MEMBERS = 16


def make_owners(
    config: Config, keeper: Keeper, runtime: Runtime, draw: Callable[[], int], environment: Mapping[str, str]
) -> Owners:
    """Return what the configuration names; nothing is called yet. `draw` returns a random u64.

    Raises InvalidArgument: the value of `ownership` is invalid, or this process is not in a cluster.
    """
    if config.ownership == "store":
        return StoreOwners(keeper, config.owner_lease_ms, is_gone)
    index = hashlib.blake2b(f"{config.store}|{config.store_prefix}".encode(), digest_size=8).hexdigest()
    me = Identity(keeper.owner, keeper.process, index)
    table = InStore(keeper) if config.ownership == "grants" else _make_table(config, environment)
    grants = Grants(table, me, config.owner_lease_ms, runtime, draw)
    return GrantedOwners(grants, keeper)


def _make_table(config: Config, environment: Mapping[str, str]) -> OwnerTable:
    value = config.ownership
    # Within a third of a lease, so that a call without an answer does not cost the next renewal.
    timeout_s = min(config.store_timeout_ms, config.owner_lease_ms // 3) / 1000
    if value.startswith(lease.SCHEME):
        namespace, name = lease.path_of(value)
        api = JsonApi(
            lease.endpoint(environment, config.ownership_ca, config.ownership_token), InOrder("the Lease"), timeout_s
        )
        return lease.LeaseTable(api, namespace, name, config.owner_lease_ms)
    members = value.removeprefix(etcd.SCHEME).split(",")
    is_valid = value.startswith(etcd.SCHEME) and len(members) <= _MAX_MEMBERS and all(map(_MEMBER.fullmatch, members))
    if not is_valid:
        remedy = "use store, grants, lease:[NAMESPACE/]NAME or etcd:https://HOST:PORT,..."
        raise InvalidArgument(f"{value[:200]!r} is not a place of ownership", field="ownership", remedy=remedy)
    files = config.ownership_ca, config.ownership_cert, config.ownership_key
    apis = [JsonApi(Endpoint(url, *files), InOrder(f"etcd at {url}"), timeout_s) for url in members]
    return etcd.EtcdTable(apis, f"{config.store_prefix}/owners")


class InStore:
    """Implements OwnerTable in the store of the index, which is Redis: a failover may lose what was written last."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    async def read(self) -> Stored:
        """Return the table (see OwnerTable.read)."""
        return await self._store().read_owners()

    async def replace(self, version: str | None, raw: bytes) -> bool:
        """Replace the table (see OwnerTable.replace)."""
        return await self._store().replace_owners(version, raw)

    def _store(self) -> OwnerStore:
        if not isinstance(self._keeper.store, OwnerStore):
            raise StoreUnavailable("the store is not open", field="store", remedy="check the server")
        return self._keeper.store
