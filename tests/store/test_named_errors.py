"""What is wrong with a store has a name and a remedy, and nothing in it was touched."""

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


def test_a_database_of_another_program(tmp_path):
    with closing(sqlite3.connect(tmp_path / "entries.db")) as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
    refused(errors.StoreForeign, tmp_path)


def test_a_file_that_is_no_database(tmp_path):
    (tmp_path / "entries.db").write_bytes(b"The quick brown fox jumps over the lazy dog. " * 100)
    refused(errors.StoreForeign, tmp_path)


def test_tables_of_a_newer_version(tmp_path):
    SqliteStore(tmp_path / "entries.db").close()
    with closing(sqlite3.connect(tmp_path / "entries.db")) as connection:
        connection.execute("PRAGMA user_version = 99")
    refused(errors.StoreNewer, tmp_path)


def test_a_folder_that_is_not_there(tmp_path):
    refused(errors.StoreReadOnly, tmp_path, f"sqlite:{tmp_path / 'nowhere' / 'entries.db'}")


def test_a_database_that_cannot_be_written(tmp_path):
    """Opened as a reader would: root may write wherever the mode says that nobody may."""
    store = SqliteStore(tmp_path / "entries.db")
    store.append(LOG, chunk(1), 0)
    store._connection.execute("PRAGMA query_only = ON")
    with pytest.raises(errors.StoreReadOnly, match="readonly"):
        store.append(LOG, chunk(2), 0)
    assert list(store.load(LOG)) == [chunk(1)]


def test_no_room_on_the_disk(tmp_path):
    """The file may have no more pages: SQLite's own error, as a full disk gives it."""
    store = SqliteStore(tmp_path / "entries.db")
    store.append(LOG, chunk(1), 0)
    pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(errors.StoreFull) as caught:
        store.append(LOG, chunk(2, 1 << 20), 2)
    assert "make room" in caught.value.remedy
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


def test_a_newer_format_and_a_foreign_key(server):
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


def test_a_wrong_password_and_no_password(guarded):
    one, authority = guarded
    address = f"rediss://{one.address}"
    wrong = Config(
        store=address, store_username=servers.USER, store_password=SecretStr("no"), store_tls_ca=str(authority)
    )
    for config in (wrong, Config(store=address, store_tls_ca=str(authority))):
        with pytest.raises(errors.StoreDenied, match=r"WRONGPASS|invalid|uthentication") as caught:
            opened(config)
        assert "ACL" in caught.value.remedy


def test_what_the_user_may_not_touch(guarded):
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


def test_a_certificate_of_an_unknown_authority(guarded, tmp_path):
    one, _ = guarded
    stranger = servers.make_certificates(tmp_path)
    with pytest.raises(errors.StoreUnavailable, match="certificate"):
        opened(Config(store=f"rediss://{one.address}", store_tls_ca=str(stranger)))


def test_a_server_at_its_memory_limit_and_what_it_holds_meanwhile(tmp_path):
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


def test_a_replica_that_takes_no_writes(tmp_path):
    with servers.watched(tmp_path) as one, pytest.raises(errors.StoreReadOnly) as caught:
        opened(config_of(one.replica))
    assert "Sentinel" in caught.value.remedy


def test_a_server_that_is_not_there():
    with pytest.raises(errors.StoreUnavailable, match="Connect call failed"):
        opened(Config(store=f"redis://127.0.0.1:{servers.free_port()}"))


def test_everything_ends_by_itself_and_every_key_says_whose_it_is(server):
    store = opened(config_of(server, "ttl", store_ttl_ms=3_600_000))
    assert isinstance(store.store, RedisStore)
    store.append(LOG, chunk(1), 0)
    store.put_record(LOG.replica, b"record")
    client = server.client()
    log = f"ttl:{{replica/0}}:{LOG.namespace.hex()}:{LOG.incarnation:016x}:log"
    for key in (log, "ttl:{replica/0}:record", "ttl:replicas"):
        assert 3_500_000 < client.pttl(key) <= 3_600_000, key


def test_names_whose_records_have_ended_are_not_listed(server):
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
        ("mysql://host", "names no store"),
        ("redis://", "names no store"),
        ("redis://host:port", "is no address"),
        ("redis://host:99999", "is no address"),
        ("redis://user:secret@host", "store_password"),
        ("redis://host/name", "is no database"),
        ("redis+sentinel://host", "no NAME"),
    ],
)
def test_an_address_that_cannot_be(store, word):
    with pytest.raises(InvalidArgument, match=word) as caught:
        opened(Config(store=store))
    assert "secret" not in str(caught.value)


def test_a_certificate_file_that_is_not_there(tmp_path):
    with pytest.raises(NotFound) as caught:
        opened(Config(store="rediss://127.0.0.1:1", store_tls_ca=str(tmp_path / "ca.pem")))
    assert caught.value.field == "store_tls_ca"


def test_no_store_and_the_twin():
    assert make_store(Config()) is None
    assert make_store(Config(store="memory")) is not None


def test_who_calls_a_server_that_stalls_is_refused_in_time(tmp_path):
    """Who asks for owners and who writes do so at a time; one gives up what the other one waits on."""
    with servers.serving(tmp_path) as server:
        store = opened(config_of(server, store_timeout_ms=50))
        assert server.process is not None
        server.process.send_signal(signal.SIGSTOP)

        async def ask() -> list[BaseException | bytes | None]:
            calls = [store.store.get_record("r") for _ in range(32)]
            return await asyncio.gather(*calls, return_exceptions=True)

        assert {type(answer) for answer in run(ask())} == {errors.StoreUnavailable}
        server.process.send_signal(signal.SIGCONT)
        assert store.get_record("r") is None
        store.close()


async def test_a_closed_store_answers_by_name(tmp_path):
    """A service that ends closes its store while callers may still ask."""
    store = make_store(Config(store=f"sqlite:{tmp_path / 'kv.db'}"))
    assert store is not None
    await store.open()
    await store.close()
    with pytest.raises(errors.StoreUnavailable, match="the store is closed"):
        await store.size_bytes(LOG)
