"""A file damaged beyond single records costs hits: it is renamed, and replaced by a new one."""

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
    """Overwrite every page from this one on, as a failed disk does."""
    raw = path.read_bytes()
    assert len(raw) > first_page * PAGE
    path.write_bytes(raw[: first_page * PAGE] + b"\xa5" * (len(raw) - first_page * PAGE))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "entries.db"


@pytest.fixture
def filled(path):
    """A file of many pages that no process has open."""
    store = SqliteStore(path)
    for seq in range(1, 30):
        store.append(LOG, chunk(seq, 2000), 0)
    store.close()
    return path


def test_a_damaged_file_is_replaced_by_one_with_what_can_be_read(filled, caplog):
    scramble(filled, 8)
    store = SqliteStore(filled)
    kept = list(store.load(LOG))
    assert kept == [chunk(one.seq, 2000) for one in kept]
    assert 0 < len(kept) < 29
    assert f"0 records and {len(kept)} chunks of it can be read and are kept" in caplog.text
    assert store.append(LOG, chunk(30), 0) == len(kept) + 1
    renamed = filled.with_name("entries.db.damaged")
    assert b"\xa5" * PAGE in renamed.read_bytes()
    store.close()


def test_a_file_without_tables_is_replaced_when_opened(filled):
    scramble(filled, 1)
    with filled.open("r+b") as file:
        file.seek(100)
        file.write(b"\xa5" * 3000)
    store = SqliteStore(filled)
    assert store.append(LOG, chunk(1), 0) == 1
    store.close()
    with sqlite3.connect(filled) as again:
        assert again.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_truncated_file_is_replaced(filled):
    with filled.open("r+b") as file:
        file.truncate(3 * PAGE)
    store = SqliteStore(filled)
    assert list(store.load(LOG)) == []
    assert store._connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert store.append(LOG, chunk(1), 0) == 1
    assert filled.with_name("entries.db.damaged").stat().st_size == 3 * PAGE
    store.close()


class Breaking(MemoryStore):
    """A store that fails as a file that is damaged after its first chunk and is replaced."""

    def load(self, log):
        yield next(iter(super().load(log)))
        self.logs.clear()
        self.records_by_name.clear()
        raise StoreDamaged("malformed")


def test_a_restart_uses_entries_before_the_damage_and_rewrites_the_others():
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
    assert reopen(world, memory).kept_keys == opened.kept_keys, "a running service loses nothing"


class Unreadable(MemoryStore):
    def records(self):
        raise StoreDamaged("malformed")


def test_a_service_starts_without_unreadable_records():
    assert len(Life(Unreadable()).registry) == 0


def test_the_record_is_rewritten_after_lost_chunks():
    store = MemoryStore()
    bench = Bench(store)
    bench.serve("aaaab")
    assert bench.write()
    store.logs.clear()
    store.records_by_name.clear()
    bench.serve("ccccd")
    assert bench.write()
    assert store.records_by_name == {"r": b"record"}
