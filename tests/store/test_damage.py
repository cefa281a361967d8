"""A file that is damaged beyond single records costs hits: it is kept beside, and a new one is begun and filled."""

from __future__ import annotations

import sqlite3

import pytest

from kvplane_service.store.errors import StoreDamaged
from kvplane_service.store.memory import MemoryStore
from kvplane_service.store.sqlite import SqliteStore
from tests.store.contract import LOG, chunk
from tests.store.test_restart import NAME, Life, reopen, serve, used_world
from tests.store.test_writer import Bench

PAGE = 4096


def scramble(path, first_page):
    """Every page from this one on, as a disk leaves them that has gone."""
    raw = path.read_bytes()
    assert len(raw) > first_page * PAGE
    path.write_bytes(raw[: first_page * PAGE] + b"\xa5" * (len(raw) - first_page * PAGE))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "entries.db"


@pytest.fixture
def filled(path):
    """A file of many pages that nobody has open."""
    store = SqliteStore(path)
    for seq in range(1, 30):
        store.append(LOG, chunk(seq, 2000), 0)
    store.close()
    return path


def test_what_is_read_from_a_damaged_file_is_refused_once_and_the_store_goes_on(filled):
    scramble(filled, 4)
    store = SqliteStore(filled)
    with pytest.raises(StoreDamaged, match=r"malformed|not a database") as caught:
        list(store.load(LOG))
    assert "beside" in caught.value.remedy
    assert list(store.load(LOG)) == []
    assert store.append(LOG, chunk(30), 0) == 1
    beside = filled.with_name("entries.db.damaged")
    assert b"\xa5" * PAGE in beside.read_bytes()
    store.close()


def test_a_file_whose_tables_cannot_be_found_is_begun_anew_when_it_is_opened(filled):
    scramble(filled, 1)
    with filled.open("r+b") as file:
        file.seek(100)
        file.write(b"\xa5" * 3000)
    store = SqliteStore(filled)
    assert store.append(LOG, chunk(1), 0) == 1
    store.close()
    with sqlite3.connect(filled) as again:
        assert again.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_file_that_was_cut_short(filled):
    with filled.open("r+b") as file:
        file.truncate(3 * PAGE)
    store = SqliteStore(filled)
    assert list(store.load(LOG)) == []
    assert store.append(LOG, chunk(1), 0) == 1
    assert filled.with_name("entries.db.damaged").stat().st_size == 3 * PAGE
    store.close()


class Breaking(MemoryStore):
    """As a file that turns out to be damaged behind its first chunk, and is begun anew."""

    def load(self, log):
        yield next(iter(super().load(log)))
        self.logs.clear()
        self.records_by_name.clear()
        raise StoreDamaged("malformed")


def test_a_restart_uses_what_was_read_before_the_damage_and_tells_the_rest_again():
    world, memory, session = used_world()
    serve(session, memory, 1, list(range(500, 600)))
    world.life.flush()
    broken = Breaking()
    broken.logs, broken.records_by_name = world.store.logs, world.store.records_by_name
    assert len(next(iter(broken.logs.values()))) == 2
    world.store = broken
    world.restart()
    opened = reopen(world, memory)
    assert opened.kept_keys > 0
    assert world.life.host.recovered.refused == {"damaged": 1}
    world.life.flush()
    assert NAME in broken.records_by_name
    assert reopen(world, memory).kept_keys == opened.kept_keys, "nothing is lost to who lives"


class Unreadable(MemoryStore):
    def records(self):
        raise StoreDamaged("malformed")


def test_a_service_starts_without_records_that_cannot_be_read():
    assert len(Life(Unreadable()).registry) == 0


def test_a_store_that_lost_its_chunks_is_told_the_record_again_too():
    store = MemoryStore()
    bench = Bench(store)
    bench.serve("aaaab")
    assert bench.write()
    store.logs.clear()
    store.records_by_name.clear()
    bench.serve("ccccd")
    assert bench.write()
    assert store.records_by_name == {"r": b"record"}
