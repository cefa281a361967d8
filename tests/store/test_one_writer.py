"""An SQLite file is for one service: a second one is refused by name, and changes nothing."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from contextlib import closing

import pytest

from kvplane_service.store.errors import StoreInUse
from kvplane_service.store.sqlite import SqliteStore

HOLDER = """
import sys
from pathlib import Path
from kvplane_service.store.sqlite import SqliteStore
store = SqliteStore(Path(sys.argv[1]))
print("open", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_by_name_until_the_first_one_ends(tmp_path):
    path = tmp_path / "entries.db"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "open\n"
        before = path.read_bytes()
        with pytest.raises(StoreInUse, match=f"process {first.pid} writes .*Redis"):
            SqliteStore(path)
        assert path.read_bytes() == before
        SqliteStore(path, read_only=True).close()  # as `kvplane store show`
        first.kill()
    SqliteStore(path).close()


def test_a_store_that_was_closed_or_refused_has_no_lock(tmp_path):
    path = tmp_path / "entries.db"
    with closing(SqliteStore(path)) as store, pytest.raises(StoreInUse, match=f"process {os.getpid()} "):
        SqliteStore(path)
    with closing(SqliteStore(path)) as store:
        store.put_record("r", b"raw")


def test_a_damaged_file_that_is_replaced_stays_the_writer_s(tmp_path):
    path = tmp_path / "entries.db"
    with closing(SqliteStore(path)) as store:
        store.put_record("r", b"raw")
    path.write_bytes(path.read_bytes()[:5000])
    with closing(SqliteStore(path)), pytest.raises(StoreInUse):
        SqliteStore(path)


def test_the_files_of_a_store_are_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        with closing(SqliteStore(tmp_path / "entries.db")) as store:
            store.put_record("r", b"raw")
            modes = {one.name: stat.S_IMODE(one.stat().st_mode) for one in tmp_path.iterdir()}
    finally:
        os.umask(before)
    assert set(modes.values()) == {0o600}, modes
