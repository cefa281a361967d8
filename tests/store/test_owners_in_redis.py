"""The table of owners in Redis: a server with exactly the permissions that it needs, a cluster, and a primary that is
killed before it replicates.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import SecretStr

from kvplane.base.errors import InvalidArgument
from kvplane_service.config import Config, check_together
from kvplane_service.store.errors import STORE_ERRORS, StoreUnavailable
from kvplane_service.store.grants import Grants, NotGranted
from kvplane_service.store.memory import MemoryStore
from kvplane_service.store.opening import make_store
from kvplane_service.store.owning import InStore
from kvplane_service.store.record import NOT_PROVEN
from tests.store import servers
from tests.store.test_contract import prefix_of
from tests.store.test_owner_tables import LEASE_MS, TableContract, grants_of, has

if sys.platform != "linux":
    pytest.skip("servers are started on Linux", allow_module_level=True)


def table(config: Config) -> InStore:
    keeper: Any = SimpleNamespace(store=make_store(config))
    return InStore(keeper)


class TestRedis(TableContract):
    @pytest.fixture
    def tables(self, tmp_path, request):
        with servers.guarded(tmp_path) as (one, authority):
            config = Config(
                store=f"rediss://{one.address}",
                store_prefix=prefix_of(request),
                store_username=servers.USER,
                store_password=SecretStr(servers.PASSWORD),
                store_tls_ca=str(authority),
            )
            yield table(config), table(config)


class TestCluster(TableContract):
    @pytest.fixture
    def tables(self, tmp_path, request):
        with servers.cluster(tmp_path) as nodes:
            config = Config(store=f"redis+cluster://{nodes[0].address}", store_prefix=prefix_of(request))
            yield table(config), table(config)


class TestSealed(TableContract):
    @pytest.fixture
    def tables(self, tmp_path, request):
        (tmp_path / "keys").write_bytes(b"0" * 32)
        (tmp_path / "keys").chmod(0o600)
        with servers.serving(tmp_path) as server:
            config = Config(store=f"redis://{server.address}", store_key_file=str(tmp_path / "keys"))
            yield table(config), table(config)

    async def test_a_table_without_a_seal_is_none(self, tables, tmp_path):
        sealed, _ = tables
        await sealed.replace(None, b"first")
        inner: Any = sealed._keeper.store
        version = (await sealed.read()).version
        assert await inner._owners.replace_owners(version, b"forged")
        assert (await sealed.read()).raw == NOT_PROVEN


async def test_a_call_that_is_repeated_changes_nothing_and_has_taken_effect(tmp_path, monkeypatch):
    monkeypatch.setattr("secrets.token_bytes", lambda count: b"\1" * count)
    with servers.serving(tmp_path) as server:
        one = table(Config(store=f"redis://{server.address}"))
        assert await one.replace(None, b"first")
        assert await one.replace(None, b"first")
        assert (await one.read()).raw == b"first"


@pytest.mark.parametrize("store", [None, MemoryStore()])
async def test_without_redis_there_is_no_table(store):
    keeper: Any = SimpleNamespace(store=store)
    with pytest.raises(StoreUnavailable):
        await InStore(keeper).read()


def test_grants_need_a_store_that_services_share():
    for store in ("memory", "sqlite:entries.db"):
        with pytest.raises(InvalidArgument, match="ownership"):
            check_together(Config(ownership="grants", store=store))


async def until(happened, *renewing: Grants) -> None:
    """Renew until it has happened; never do two services have the replica."""
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        for grants in renewing:
            with contextlib.suppress(*STORE_ERRORS):  # while the next primary is chosen
                await grants.renew({"r": 0})
            assert sum(has(one, "r") for one in renewing) < 2
        await asyncio.sleep(LEASE_MS / 10_000)


async def test_a_primary_that_is_killed_before_it_replicates_costs_no_service_that_renews_its_replica(tmp_path):
    with servers.watched(tmp_path) as watched:
        config = Config(store=f"redis+sentinel://{watched.sentinel.address}/main")
        one, other = grants_of(table(config), "a:1", 1), grants_of(table(config), "b:1", 2)
        await other.renew({})
        await other.prepare()
        replica = watched.replica.process
        assert replica is not None
        replica.send_signal(signal.SIGSTOP)
        assert await one.take("r") == ""  # the replica of the server does not know it
        watched.primary.kill()
        replica.send_signal(signal.SIGCONT)
        servers.wait_until(lambda: watched.replica.client().role()[0] == b"master", "the replica is the primary")
        assert b'"r"' not in (watched.replica.client().get("kvplane:owners") or b"")
        await until(lambda: has(one, "r"), one, other)
        with pytest.raises(NotGranted):
            other.check("r")
        await until(lambda: has(other, "r"), other)  # the first has stopped
