"""Stores on a real disk that is full, read-only or hung."""

from __future__ import annotations

import itertools
import threading

import pytest

from kvplane_service.store import errors
from kvplane_service.store.sqlite import SqliteStore
from tests.faults.disks import small_disk
from tests.store.contract import LOG, chunk
from tests.store.test_named_errors import refused

WAIT_S = 30


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        if not disk.is_own:
            pytest.skip("needs the right to mount file systems: run as root")
        yield disk


@pytest.fixture
def filled(disk):
    """A store with a chunk, as a killed service leaves it."""
    store = SqliteStore(disk.folder / "entries.db")
    store.append(LOG, chunk(1), 0)
    yield store
    store.close()


def append_until_refused(store):
    for seq in itertools.count(2):
        store.append(LOG, chunk(seq, 10_000), 0)


def test_store_on_a_read_only_disk_is_refused_and_unchanged(disk, filled):
    filled.close()
    disk.allow_writes(False)
    refused(errors.StoreReadOnly, disk.folder)
    disk.allow_writes(True)
    store = SqliteStore(disk.folder / "entries.db")
    assert list(store.load(LOG)) == [chunk(1)]
    store.close()


def test_new_store_on_a_read_only_disk_is_refused(disk):
    disk.allow_writes(False)
    refused(errors.StoreReadOnly, disk.folder)


def test_hung_disk_delays_writes_until_it_recovers(disk, filled):
    if not disk.can_hang:
        pytest.skip("needs the right to freeze file systems: run as root")
    written = threading.Event()

    def write():
        filled.append(LOG, chunk(2), 0)
        written.set()

    for seconds in (1000.0, 0.3):  # blocked until `go_on`, then for a short time
        disk.hang(seconds)
        try:
            thread = threading.Thread(target=write)
            thread.start()
            assert seconds < 1.0 or not written.wait(0.2)
            if seconds > 1.0:
                disk.go_on()
            assert written.wait(WAIT_S)
        finally:
            disk.go_on()
        thread.join()
        written.clear()
    assert list(filled.load(LOG)) == [chunk(1), chunk(2)]


def test_full_disk_loses_nothing_and_accepts_writes_once_space_is_free(disk, filled):
    disk.fill()
    with pytest.raises(errors.StoreFull, match="full") as caught:
        append_until_refused(filled)  # the file has some free pages
    assert "free space" in caught.value.remedy
    held = list(filled.load(LOG))
    assert held[0] == chunk(1)
    disk.make_room()
    assert filled.append(LOG, chunk(5000), 0) == len(held) + 1
