"""Every error of a store has a name and a remedy, and changes nothing in the store."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import sqlite3
from contextlib import closing

import pytest
from pydantic import SecretStr

from kvplane.base.errors import InvalidArgument, NotFound
from kvplane_service.config import Config
from kvplane_service.store import errors
from kvplane_service.store.opening import make_store
from kvplane_service.store.redis_store import RedisStore
from kvplane_service.store.sqlite import SqliteStore
from tests.store import servers
from tests.store.contract import LOG, chunk, opened, run


def fingerprint(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def refused(kind, folder, store=None):
    before = fingerprint(folder)
    with pytest.raises(kind) as caught:
        opened(Config(store=store or f"sqlite:{folder / 'entries.db'}"))
    assert caught.value.remedy
    assert caught.value.field == "store"
    assert fingerprint(folder) == before


# -- SQLite


def test_a_database_of_another_program_is_refused(tmp_path):
    with closing(sqlite3.connect(tmp_path / "entries.db")) as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
    refused(errors.StoreForeign, tmp_path)


def test_a_file_that_is_not_a_database_is_refused(tmp_path):
    (tmp_path / "entries.db").write_bytes(b"The quick brown fox jumps over the lazy dog. " * 100)
    refused(errors.StoreForeign, tmp_path)


def test_tables_of_a_newer_version_are_refused(tmp_path):
    SqliteStore(tmp_path / "entries.db").close()
    with closing(sqlite3.connect(tmp_path / "entries.db")) as connection:
        connection.execute("PRAGMA user_version = 99")
    refused(errors.StoreNewer, tmp_path)


def test_a_missing_directory_is_refused(tmp_path):
    refused(errors.StoreReadOnly, tmp_path, f"sqlite:{tmp_path / 'nowhere' / 'entries.db'}")


def test_a_read_only_database_is_refused(tmp_path):
    """Opened as read-only: root may write regardless of the file's mode."""
    store = SqliteStore(tmp_path / "entries.db")
    store.append(LOG, chunk(1), 0)
    store._connection.execute("PRAGMA query_only = ON")
    with pytest.raises(errors.StoreReadOnly, match="readonly"):
        store.append(LOG, chunk(2), 0)
    assert list(store.load(LOG)) == [chunk(1)]


def test_a_full_disk_is_reported(tmp_path):
    """A limit of pages raises the same SQLite error as a full disk."""
    store = SqliteStore(tmp_path / "entries.db")
    store.append(LOG, chunk(1), 0)
    pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(errors.StoreFull) as caught:
        store.append(LOG, chunk(2, 1 << 20), 2)
    assert "free space" in caught.value.remedy
    assert list(store.load(LOG)) == [chunk(1)], "the transaction was undone, the trim with it"
    store._connection.execute(f"PRAGMA max_page_count = {pages + 1000}")
    assert store.append(LOG, chunk(2, 1 << 20), 2) == 1


# -- Redis


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with servers.serving(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    with servers.guarded(tmp_path_factory.mktemp("guarded")) as running:
        yield running


def config_of(server, prefix="kvplane", **fields) -> Config:
    return Config(store=f"redis://{server.address}", store_prefix=prefix, **fields)


def test_a_newer_format_and_a_foreign_key_are_refused(server):
    server.client().set("newer:format", 99)
    with pytest.raises(errors.StoreNewer, match="version 99"):
        opened(config_of(server, "newer"))
    server.client().set("foreign:format", "session data")
    with pytest.raises(errors.StoreForeign, match="session data"):
        opened(config_of(server, "foreign"))
    server.client().lpush("list:format", "x")
    with pytest.raises(errors.StoreForeign, match="WRONGTYPE"):
        opened(config_of(server, "list"))
    assert [server.client().dbsize(), server.client().get("newer:format")] == [3, b"99"]


def test_a_wrong_and_a_missing_password_are_refused(guarded):
    one, authority = guarded
    address = f"rediss://{one.address}"
    wrong = Config(
        store=address, store_username=servers.USER, store_password=SecretStr("no"), store_tls_ca=str(authority)
    )
    for config in (wrong, Config(store=address, store_tls_ca=str(authority))):
        with pytest.raises(errors.StoreDenied, match=r"WRONGPASS|invalid|uthentication") as caught:
            opened(config)
        assert "ACL" in caught.value.remedy


def test_keys_outside_the_acl_are_refused(guarded):
    one, authority = guarded
    config = Config(
        store=f"rediss://{one.address}",
        store_prefix="other",
        store_username=servers.USER,
        store_password=SecretStr(servers.PASSWORD),
        store_tls_ca=str(authority),
    )
    with pytest.raises(errors.StoreDenied, match="permissions"):
        opened(config)


def test_a_certificate_of_an_unknown_ca_is_refused(guarded, tmp_path):
    one, _ = guarded
    other_ca = servers.make_certificates(tmp_path)
    with pytest.raises(errors.StoreUnavailable, match="certificate"):
        opened(Config(store=f"rediss://{one.address}", store_tls_ca=str(other_ca)))


def test_a_server_at_its_memory_limit_is_full_and_keeps_its_data(tmp_path):
    with servers.serving(tmp_path, "--maxmemory", "4mb") as server:
        store = opened(config_of(server))
        store.append(LOG, chunk(1), 0)
        server.client().config_set("maxmemory", 1)
        with pytest.raises(errors.StoreFull, match="maxmemory") as caught:
            store.append(LOG, chunk(2), 0)
        assert "memory" in caught.value.remedy
        assert list(store.load(LOG)) == [chunk(1)]
        server.client().config_set("maxmemory", 0)
        assert store.append(LOG, chunk(2), 0) == 2


def test_a_redis_replica_is_read_only(tmp_path):
    with servers.watched(tmp_path) as one, pytest.raises(errors.StoreReadOnly) as caught:
        opened(config_of(one.replica))
    assert "Sentinel" in caught.value.remedy


def test_an_unreachable_server_is_unavailable():
    with pytest.raises(errors.StoreUnavailable, match="Connect call failed"):
        opened(Config(store=f"redis://127.0.0.1:{servers.free_port()}"))


def test_every_key_expires_and_has_the_prefix(server):
    store = opened(config_of(server, "ttl", store_ttl_ms=3_600_000))
    assert isinstance(store.store, RedisStore)
    store.append(LOG, chunk(1), 0)
    store.put_record(LOG.replica, b"record")
    client = server.client()
    log = f"ttl:{{replica/0}}:{LOG.namespace.hex()}:{LOG.incarnation:016x}:log"
    for key in (log, "ttl:{replica/0}:record", "ttl:replicas"):
        assert 3_500_000 < client.pttl(key) <= 3_600_000, key


def test_names_of_expired_records_are_not_listed(server):
    store = opened(config_of(server, "ended"))
    store.put_record("gone", b"1")
    client = server.client()
    client.delete("ended:{gone}:record")
    client.zadd("ended:replicas", {"gone": 5})
    store.put_record("here", b"2")
    assert list(store.records()) == [("here", b"2")]
    assert client.zrange("ended:replicas", 0, -1) == [b"here"]


# -- the address


@pytest.mark.parametrize(
    ("store", "word"),
    [
        ("mysql://host", "is not an address of a store"),
        ("redis://", "is not an address of a store"),
        ("redis://host:port", "is not an address"),
        ("redis://host:99999", "is not an address"),
        ("redis://user:secret@host", "store_password"),
        ("redis://host/name", "is not a database number"),
        ("redis+sentinel://host", "lacks the name of the primary"),
    ],
)
def test_an_invalid_address_is_refused(store, word):
    with pytest.raises(InvalidArgument, match=word) as caught:
        opened(Config(store=store))
    assert "secret" not in str(caught.value)


def test_a_missing_certificate_file_is_refused(tmp_path):
    with pytest.raises(NotFound) as caught:
        opened(Config(store="rediss://127.0.0.1:1", store_tls_ca=str(tmp_path / "ca.pem")))
    assert caught.value.field == "store_tls_ca"


def test_no_store_and_the_memory_store():
    assert make_store(Config()) is None
    assert make_store(Config(store="memory")) is not None


def test_calls_to_a_stalled_server_time_out(tmp_path):
    """Reading owners and writing run concurrently; one closes the client that the other one waits for."""
    with servers.serving(tmp_path) as server:
        store = opened(config_of(server, store_timeout_ms=2000))
        assert server.process is not None
        server.process.send_signal(signal.SIGSTOP)

        async def ask() -> list[BaseException | bytes | None]:
            calls = [store.store.get_record("r") for _ in range(32)]
            return await asyncio.gather(*calls, return_exceptions=True)

        assert {type(answer) for answer in run(ask())} == {errors.StoreUnavailable}
        server.process.send_signal(signal.SIGCONT)
        assert store.get_record("r") is None
        store.close()


async def test_a_closed_store_is_unavailable(tmp_path):
    """A service closes its store at its end, while calls may still arrive."""
    store = make_store(Config(store=f"sqlite:{tmp_path / 'kv.db'}"))
    assert store is not None
    await store.open()
    await store.close()
    with pytest.raises(errors.StoreUnavailable, match="the service has closed its store"):
        await store.size_bytes(LOG)
