"""All stores against one contract: in memory, SQLite, Redis with TLS and ACL, and a Redis cluster."""

from __future__ import annotations

import sys

import pytest
from pydantic import SecretStr

from kvplane_service.config import Config
from kvplane_service.store.memory import MemoryStore
from kvplane_service.store.sqlite import SqliteStore
from tests.store import servers
from tests.store.contract import SharedContract, StoreContract, opened

if sys.platform != "linux":
    pytest.skip("servers are started on Linux", allow_module_level=True)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    with servers.guarded(tmp_path_factory.mktemp("guarded")) as running:
        yield running


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with servers.cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    with servers.watched(tmp_path_factory.mktemp("sentinel")) as running:
        yield running


class TestMemory(SharedContract, StoreContract):
    @pytest.fixture
    def store(self):
        return MemoryStore()


class TestSqlite(StoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        store = SqliteStore(tmp_path / "entries.db")
        yield store
        store.close()


class TestRedisWithTlsAndUser(SharedContract, StoreContract):
    @pytest.fixture
    def store(self, guarded, request):
        one, authority = guarded
        config = Config(
            store=f"rediss://{one.address}",
            store_prefix=prefix_of(request),
            store_username=servers.USER,
            store_password=SecretStr(servers.PASSWORD),
            store_tls_ca=str(authority),
        )
        store = opened(config)
        yield store
        store.close()


class TestRedisCluster(SharedContract, StoreContract):
    @pytest.fixture
    def store(self, nodes, request):
        hosts = ",".join(node.address for node in nodes[:2])
        store = opened(Config(store=f"redis+cluster://{hosts}", store_prefix=prefix_of(request)))
        yield store
        store.close()


class TestRedisBehindSentinel(SharedContract, StoreContract):
    @pytest.fixture
    def store(self, watched, request):
        config = Config(store=f"redis+sentinel://{watched.sentinel.address}/main", store_prefix=prefix_of(request))
        store = opened(config)
        yield store
        store.close()


def prefix_of(request) -> str:
    """Tests of a class share a server, with separate keys."""
    return f"kvplane-{request.node.name}"[:64]
