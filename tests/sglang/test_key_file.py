"""The keys that a linker keeps next to a file of slots."""

from __future__ import annotations

import os

import pytest

from kvplane_sglang.slots import KEY_BYTES, KeyFile

KEY, OTHER = b"k" * KEY_BYTES, b"o" * KEY_BYTES


def test_keys_are_there_for_the_next_start_of_an_equal_engine_alone(tmp_path):
    first = KeyFile(tmp_path / "a.keys", 8, is_new=True)
    first[3] = KEY
    first.close()
    assert KeyFile(first.path, 8, is_new=False)[3] == KEY
    assert KeyFile(first.path, 9, is_new=False)[3] == bytes(KEY_BYTES)
    assert KeyFile(first.path, 9, is_new=True)[3] == bytes(KEY_BYTES)


def test_a_file_that_is_cut_short_ends_no_engine(tmp_path):
    file = KeyFile(tmp_path / "a.keys", 1 << 12, is_new=True)
    file[4000] = KEY
    os.truncate(file.path, 0)
    assert file[4000] == KEY
    file[4001] = OTHER
    assert file[4001] == OTHER


def test_a_disk_that_cannot_be_written_keeps_no_more_keys_and_raises_nothing(tmp_path, monkeypatch, caplog):
    file = KeyFile(tmp_path / "a.keys", 8, is_new=True)
    file[1] = KEY

    def failing(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pwrite", failing)
    file[2] = OTHER
    monkeypatch.undo()
    file[3] = OTHER
    assert [one.getMessage().count("cannot be written") for one in caplog.records] == [1]
    kept = KeyFile(file.path, 8, is_new=False)
    assert [kept[slot] for slot in (1, 2, 3)] == [KEY, bytes(KEY_BYTES), bytes(KEY_BYTES)]


def test_a_path_that_is_no_file_of_this_user_is_refused(tmp_path):
    os.mkfifo(tmp_path / "a.keys")
    with pytest.raises(Exception, match="it is no file of this user"):
        KeyFile(tmp_path / "a.keys", 8, is_new=True)
