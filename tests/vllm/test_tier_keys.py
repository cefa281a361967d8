"""The keys that a disk keeps for the next start: of what its file holds now, and of nothing else."""

from __future__ import annotations

import os
from array import array
from tempfile import TemporaryDirectory

import pytest

from kvplane_core.face.entries import Entries, KeyRun
from kvplane_vllm.tiers import rank
from kvplane_vllm.tiers.kept import KeyFile
from tests.vllm.tier_world import World, options

NUM_IDS, DIGEST_BYTES = 40, 32


def opened(folder, disks=(7,)):
    return KeyFile(folder, "vllm-0-aa", NUM_IDS, DIGEST_BYTES, disks)


def keys(*slots, version=5):
    digests = b"".join(bytes([slot]) * DIGEST_BYTES for slot in slots)
    columns = array("I", slots), array("Q", [version] * len(slots)), array("I", [0] * len(slots))
    return Entries(DIGEST_BYTES, [KeyRun("", 1, len(slots))], *columns, array("I", [0] * len(slots)), digests)


def slots_of(file):
    return sorted(file.entries().block)


def test_keys_are_there_for_the_next_start(tmp_path):
    first = opened(tmp_path)
    assert slots_of(first) == []
    first.record(keys(3, 9))
    first.record(keys(9, version=6))
    first.close(10)
    found = opened(tmp_path).entries()
    assert dict(zip(found.block, found.stamp, strict=True)) == {3: 5, 9: 6}
    assert found.digests[DIGEST_BYTES:] == bytes([9]) * DIGEST_BYTES


@pytest.mark.parametrize("disks", [(8,), (7, 8), ()])
def test_a_disk_that_began_empty_has_none_of_the_keys_before(disks, tmp_path):
    """Its versions count from the start again, so an old key would name another content with an equal version."""
    first = opened(tmp_path)
    first.record(keys(3))
    first.close(10)
    assert slots_of(opened(tmp_path, disks)) == []
    assert not first.path.exists()


def test_an_empty_disk_has_another_number(tmp_path, monkeypatch):
    monkeypatch.setattr(rank, "content_of", lambda *_: bytes(range(16)))
    numbers = []
    for life in range(3):
        if life == 2:
            next((tmp_path / "disk").glob("*.slots")).unlink()
        with TemporaryDirectory(prefix="kvplane-") as run:  # of each life its own, as in a new container
            monkeypatch.setenv("XDG_RUNTIME_DIR", run)
            world = World(1, options(20, tmp_path / "disk", 20), 0)
            numbers.append(world.rank.ready.disk)
            world.rank.close()
    assert 0 not in numbers
    assert numbers[0] == numbers[1] != numbers[2], "the second began with what the first kept"


def test_what_is_forgotten_stays_forgotten(tmp_path):
    file = opened(tmp_path)
    file.record(keys(3))
    assert file.clear()
    file.record(keys(4))
    assert slots_of(opened(tmp_path)) == []


@pytest.mark.parametrize("fault", ["cut short", "unwritable"])
def test_a_disk_that_fails_costs_keys_and_ends_no_engine(fault, tmp_path, monkeypatch):
    file = opened(tmp_path)
    if fault == "cut short":
        os.truncate(file.path, 0)
    else:
        monkeypatch.setattr(KeyFile, "_write", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    file.record(keys(3))
    file.record(keys(4))
    file.close(10)
    monkeypatch.undo()
    assert set(slots_of(opened(tmp_path))) <= {3, 4}
