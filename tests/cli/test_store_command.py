"""`kvplane store`: inspects, verifies and compacts the store of a service."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from kvplane_service.registry import Registration
from kvplane_service.store.interface import LogName
from kvplane_service.store.registration import ReplicaRecord, namespace_of, pack_record
from kvplane_service.store.sqlite import SqliteStore
from tests.client.lasting import ONE_GROUP
from tests.core.builders import full
from tests.store import servers
from tests.store.contract import load_log
from tests.store.test_journal import Journaled


@pytest.fixture
def stored(tmp_path):
    """A store with one replica whose cache changed often; path of the store, name of the log, the engine."""
    path = tmp_path / "entries.db"
    engine = Journaled(full(), num_blocks=30)
    registration = Registration(ONE_GROUP)
    log = LogName("engine-0", namespace_of(registration), 77)
    engine.journal.switch(log)
    engine.store = SqliteStore(path)
    for number in range(120):
        engine.serve(0, f"{number:04d}" * 3 + "x")
        engine.idle()
        engine.flush()
    record = ReplicaRecord("engine-0", registration, 3, 77, "host:7070", 10**12)
    engine.store.put_record("engine-0", pack_record(record))
    engine.store.close()
    return path, log, engine


def test_store_inspect_lists_replicas(kvplane, stored):
    path, _, _ = stored
    status, text, _ = kvplane("store", "inspect", "--store", f"sqlite:{path}")
    assert status == 0
    assert all(word in text for word in ("engine-0", "host:7070", "000000000000004d"))


def test_store_verify_counts_usable_and_damaged_records(kvplane, stored):
    path, _, _ = stored
    status, text, _ = kvplane("store", "verify", "--store", f"sqlite:{path}")
    assert status == 0
    assert "engine-0: " in text
    assert "unusable" not in text
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE chunk SET raw = substr(raw, 1, 60) WHERE seq = (SELECT max(seq) FROM chunk)")
        connection.execute("INSERT INTO record VALUES ('other', x'00')")
        connection.commit()
    status, text, _ = kvplane("store", "verify", "--store", f"sqlite:{path}")
    assert status == 1
    assert "unusable: 2 truncated" in text


def test_store_compact_keeps_the_latest_entry_of_each_block(kvplane, stored):
    path, log, engine = stored
    with closing(SqliteStore(path)) as store:
        before = load_log(store, log)
    status, text, _ = kvplane("store", "compact", "--store", f"sqlite:{path}")
    assert status == 0
    assert f"entries to {len(engine.keyed())}," in text
    with closing(SqliteStore(path)) as store:
        after = load_log(store, log)
    assert before.rows > after.rows == len(engine.keyed())
    assert not after.refused
    stamps = dict(zip(range(30), engine.pool.stamp, strict=True))
    assert all(stamps[b] == s for e in after.entries() for b, s in zip(e.block, e.stamp, strict=True))
    assert kvplane("store", "compact", "--store", f"sqlite:{path}")[0] == 0


def test_store_command_without_a_store_names_the_option(kvplane):
    status, _, errors = kvplane("store", "inspect")
    assert status == 2
    assert "give --store, such as --store sqlite:PATH" in errors


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_reading_commands_write_nothing(kvplane, stored, verb):
    path, _, _ = stored
    before = content(path.parent)
    assert kvplane("store", verb, "--store", f"sqlite:{path}")[0] == 0
    assert content(path.parent) == before
    path.chmod(0o400)
    path.parent.chmod(0o500)
    try:
        assert kvplane("store", verb, "--store", f"sqlite:{path}")[0] == 0
    finally:
        path.parent.chmod(0o700)


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_reading_commands_see_an_uncommitted_checkpoint(kvplane, stored, verb):
    """The write-ahead log of a running service is read too."""
    path, _, _ = stored
    with closing(SqliteStore(path)) as store:
        store.put_record("torn", b"no record")
        status, text, _ = kvplane("store", verb, "--store", f"sqlite:{path}")
        assert status == (verb == "verify")
        assert "engine-0" in text
        assert "unusable: 1 truncated" in text


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_reading_a_missing_file_does_not_create_it(kvplane, tmp_path, verb):
    status, text, errors = kvplane("store", verb, "--store", f"sqlite:{tmp_path / 'typo.db'}")
    assert status != 0
    assert text == ""
    assert "does not exist" in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_an_empty_store_is_reported(kvplane, tmp_path, verb):
    SqliteStore(tmp_path / "entries.db").close()
    status, text, _ = kvplane("store", verb, "--store", f"sqlite:{tmp_path / 'entries.db'}")
    assert (status, text) == (0, "the store is empty: it has no record of a replica\n")
    with servers.serving(tmp_path / "redis") as server:
        status, text, _ = kvplane("store", verb, "--store", f"redis://{server.address}")
        assert (status, text) == (0, "the store is empty: it has no record of a replica\n")
        assert server.client().dbsize() == 0, "reading must not claim the server"
