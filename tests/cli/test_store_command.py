"""`kvplane store`: it shows, checks and compacts what a service left behind."""

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
def left(tmp_path):
    """A store with one replica whose content changed often; its path and the log's name."""
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


def test_inspect_lists_replicas(kvplane, left):
    path, _, _ = left
    status, told, _ = kvplane("store", "inspect", "--store", f"sqlite:{path}")
    assert status == 0
    assert all(word in told for word in ("engine-0", "host:7070", "000000000000004d"))


def test_verify_counts_what_is_there_and_what_is_damaged(kvplane, left):
    path, _, _ = left
    status, told, _ = kvplane("store", "verify", "--store", f"sqlite:{path}")
    assert status == 0
    assert "engine-0: " in told
    assert "not used" not in told
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE chunk SET raw = substr(raw, 1, 60) WHERE seq = (SELECT max(seq) FROM chunk)")
        connection.execute("INSERT INTO record VALUES ('other', x'00')")
        connection.commit()
    status, told, _ = kvplane("store", "verify", "--store", f"sqlite:{path}")
    assert status == 1
    assert "not used: 2 truncated" in told


def test_compact_keeps_the_last_words(kvplane, left):
    path, log, engine = left
    with closing(SqliteStore(path)) as store:
        before = load_log(store, log)
    status, told, _ = kvplane("store", "compact", "--store", f"sqlite:{path}")
    assert status == 0
    assert f"entries to {len(engine.keyed())}," in told
    with closing(SqliteStore(path)) as store:
        after = load_log(store, log)
    assert before.rows > after.rows == len(engine.keyed())
    assert not after.refused
    stamps = dict(zip(range(30), engine.pool.stamp, strict=True))
    assert all(stamps[b] == s for e in after.entries() for b, s in zip(e.block, e.stamp, strict=True))
    assert kvplane("store", "compact", "--store", f"sqlite:{path}")[0] == 0


def test_without_a_store_it_says_what_to_name(kvplane):
    status, _, told = kvplane("store", "inspect")
    assert status == 2
    assert "--store sqlite:PATH" in told


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_to_look_writes_nothing(kvplane, left, verb):
    path, _, _ = left
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
def test_to_look_while_a_service_writes(kvplane, left, verb):
    """What is in its write-ahead log is seen too."""
    path, _, _ = left
    with closing(SqliteStore(path)) as store:
        store.put_record("torn", b"no record")
        status, told, _ = kvplane("store", verb, "--store", f"sqlite:{path}")
        assert status == (verb == "verify")
        assert "engine-0" in told
        assert "not used: 1 truncated" in told


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_a_slip_of_the_pen_makes_no_file(kvplane, tmp_path, verb):
    status, told, why = kvplane("store", verb, "--store", f"sqlite:{tmp_path / 'typo.db'}")
    assert status != 0
    assert told == ""
    assert "there is no file" in why
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_an_empty_store_says_so(kvplane, tmp_path, verb):
    SqliteStore(tmp_path / "entries.db").close()
    status, told, _ = kvplane("store", verb, "--store", f"sqlite:{tmp_path / 'entries.db'}")
    assert (status, told) == (0, "the store is empty: it has the record of no replica\n")
    with servers.serving(tmp_path / "redis") as server:
        status, told, _ = kvplane("store", verb, "--store", f"redis://{server.address}")
        assert (status, told) == (0, "the store is empty: it has the record of no replica\n")
        assert server.client().dbsize() == 0, "nor does it say that the server is ours"
