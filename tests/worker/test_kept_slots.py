"""A disk tier over restarts of its worker: it kept what the stamp table says, wherever the worker was killed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import NULL_BLOCK, TierKind, TierSpec
from kvplane.base.stamp_table import StampTable
from kvplane.base.stamps import Stamp
from kvplane_worker.tiers.disk import DiskSlots
from kvplane_worker.tiers.kept import Kept, kept_of, left_table, read_index
from kvplane_worker.tiers.seal import Content
from kvplane_worker.tiers.slots import HostSlots
from tests.base.job_rows import results
from tests.worker.test_page_buffers import BLOCKS
from tests.worker.tier_rig import EPOCH, SLOTS, Rig

SPEC = TierSpec(TierKind.DISK, SLOTS)
HOST_SLOT, DISK_SLOT, DISK = BLOCKS, BLOCKS + SLOTS, 1
NAME, WIDTH = "rank", 5000


@dataclass
class Left:
    """What a killed worker left: a copy of its file and of its stamp table; `done`: jobs whose end it had reported."""

    file: Path
    table: bytes
    done: dict[int, bool]


@pytest.fixture
def rig(tmp_path: Path):
    made = Rig(disk=tmp_path / "disk", num_threads=1)
    made.disk.begin(None)
    made.stamps.name_disks(made.disk.number)
    yield made
    if not made.movers._is_closed:
        made.movers.close()


def snapshots(rig: Rig, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Left]:
    """Record what is left before and after every act of the movers from now on, and in the middle of a write."""
    made = list[Left]()

    def leave() -> None:
        path = folder / str(len(made)) / NAME
        path.parent.mkdir()
        shutil.copy(rig.disk.path, path)
        made.append(Left(path, rig.stamps.snapshot(), results(rig.table.ends_from(0))))

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any) -> Any:
            leave()
            result = real(*args)
            leave()
            return result

        return act

    def torn(file: int, buffers: list[memoryview], offset: int) -> int:
        half = len(buffers[0]) // 2 // 4096 * 4096
        done = os.pwrite(file, buffers[0][:half], offset)
        leave()
        return done + os.pwrite(file, buffers[0][half:], offset + half)

    monkeypatch.setattr(rig.stamps, "write", watched(rig.stamps.write))
    monkeypatch.setattr(os, "pwritev", watched(torn))
    monkeypatch.setattr(rig.table, "end", watched(rig.table.end))
    monkeypatch.setattr(HostSlots, "write", watched(HostSlots.write))
    return made


def test_a_worker_killed_between_any_two_acts_leaves_nothing_wrong(rig: Rig, tmp_path: Path, monkeypatch):
    """Slots are saved, overwritten, and moved to; each time the worker could have been killed, the next one looks."""
    expected = {job: rig.page(0, block) for job, block in ((1, 3), (2, 4), (3, 5), (4, 6), (5, 6), (6, 7))}
    left = snapshots(rig, tmp_path, monkeypatch)
    rig.save(1, 3, 0, tier=DISK)
    rig.save(2, 4, 1, tier=DISK)
    rig.save(3, 5, 0, tier=DISK)  # another content of the slot
    rig.save(4, 6, 9)
    assert rig.until(4)
    rig.move(5, 9, 4, 1)
    rig.save(6, 7, 2, tier=DISK)
    rig.save(7, 8, 3, tier=DISK, stamp=1)  # fails
    assert not rig.until(7)
    assert len(left) > 30
    kept_somewhere = set[int]()
    for one in left:
        slots = DiskSlots(SPEC, rig.disk.slot_bytes, one.file.parent, NAME)
        kept = slots.take_over(left_table(one.table, BLOCKS + 2 * SLOTS), DISK_SLOT)
        assert kept is not None
        held = {slot: version for slot, version in enumerate(kept.versions) if version}
        for slot, version in held.items():
            row = slots.read([Content(slots.identity, DISK, slot, 0, version)], len(expected[version]))
            assert row is not None, "the table names what is written in full"
            assert bytes(row[0].tolist()) == expected[version]
        overwritten = {1: {3}, 2: {5}}  # by jobs that may have begun
        for job, slot in ((1, 0), (2, 1), (3, 0), (5, 1), (6, 2)):
            if one.done.get(job) and not overwritten.get(job):
                assert held.get(slot) == job, "what was reported as done is there"
        kept_somewhere |= set(held.values())
        slots.close()
    assert kept_somewhere == {1, 2, 3, 5, 6}


def test_a_worker_that_leaves_keeps_its_slots_for_the_next_one(rig: Rig, tmp_path: Path):
    page = rig.page(0, 3)
    rig.save(1, 3, 7, tier=DISK)
    assert rig.until(1)
    rig.movers.close(keep=True)
    slots = DiskSlots(SPEC, rig.disk.slot_bytes, tmp_path / "disk", NAME)
    kept = slots.take_over(None)
    assert kept is not None
    assert kept.owner_epoch == EPOCH
    assert [(slot, version) for slot, version in enumerate(kept.versions) if version] == [(7, 1)]
    slots.begin(kept)
    row = slots.read([Content(slots.identity, DISK, 7, 0, 1)], len(page))
    assert row is not None
    assert bytes(row[0].tolist()) == page
    slots.close()
    again = DiskSlots(SPEC, rig.disk.slot_bytes, tmp_path / "disk", NAME)
    assert again.take_over(None) is None, "the index is removed before slots are written"
    again.begin(None)
    assert again.read([Content(again.identity, DISK, 7, 0, 1)], len(page)) is None, "another identity"
    again.close()


def test_a_reset_and_an_eviction_outlive_the_worker(rig: Rig):
    """The ranks wrote them to the stamp table."""
    versions = [Stamp(0, EPOCH, counter).pack() for counter in range(10, 14)]
    rig.stamps.write(range(DISK_SLOT, DISK_SLOT + 4), versions)
    rig.stamps.write([NULL_BLOCK], [Stamp(0, EPOCH, 11).pack()])
    rig.stamps.write([DISK_SLOT + 3], [Stamp(0, EPOCH, 99).pack()])
    left = left_table(rig.stamps.snapshot(), BLOCKS + 2 * SLOTS)
    assert left is not None
    kept = kept_of(left, DISK_SLOT, SLOTS)
    assert list(kept.versions[:4]) == [0, 0, versions[2], Stamp(0, EPOCH, 99).pack()]


@pytest.mark.parametrize("damage", ["cut", "bit", "missing", "of another file"])
def test_a_damaged_index_is_not_used(rig: Rig, tmp_path: Path, damage: str):
    rig.save(1, 3, 7, tier=DISK)
    assert rig.until(1)
    identity = rig.disk.incarnation
    rig.movers.close(keep=True)
    index = tmp_path / "disk" / f"{NAME}.index"
    raw = bytearray(index.read_bytes())
    assert read_index(index, identity, SLOTS) is not None
    if damage == "cut":
        index.write_bytes(raw[:-9])
    elif damage == "bit":
        raw[60] ^= 4
        index.write_bytes(raw)
    elif damage == "missing":
        index.unlink()
    else:
        identity = bytes(16)
    assert read_index(index, identity, SLOTS) is None


@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "without end"])
def test_what_is_no_index_is_not_read(tmp_path: Path, kind: str):
    """A pipe would wait for a writer, a file of many gigabytes would fill the memory."""
    slots = DiskSlots(SPEC, WIDTH, tmp_path, NAME)
    slots.begin(None)
    slots.close(Kept(3, [5] * SLOTS))
    index = tmp_path / f"{NAME}.index"
    if kind == "without end":
        os.truncate(index, 1 << 42)
    else:
        other = index.rename(tmp_path / "other")
        {"pipe": os.mkfifo, "folder": os.mkdir, "link": lambda path: os.symlink(other, path)}[kind](index)
    again = DiskSlots(SPEC, WIDTH, tmp_path, NAME)
    assert again.take_over(None) is None
    if kind == "folder":
        with pytest.raises(InvalidArgument, match="cannot be removed") as refused:
            again.begin(None)
        assert refused.value.field == "--disk"
    else:
        again.begin(None)
        assert not os.path.lexists(index)
    again.close()


@pytest.mark.parametrize("fails", ["fsync", "open", "rename"])
def test_a_worker_leaves_although_its_index_cannot_be_written(tmp_path: Path, monkeypatch, caplog, fails: str):
    slots = DiskSlots(SPEC, WIDTH, tmp_path, NAME)
    slots.begin(None)

    def refuse(*args: object) -> None:
        raise OSError(5, "the disk fails")

    with monkeypatch.context() as patch:
        patch.setattr(*{"fsync": (os, "fsync"), "open": (os, "open"), "rename": (Path, "rename")}[fails], refuse)
        slots.close(Kept(3, [5] * SLOTS))
    assert "keeps nothing for the next worker" in caplog.text
    again = DiskSlots(SPEC, WIDTH, tmp_path, NAME)
    assert again.take_over(None) is None
    again.close()


def test_a_table_proves_nothing_of_another_file(rig: Rig, tmp_path: Path):
    """A worker of other weights was killed, and left its table; the file of these ones lost its index."""
    rig.save(1, 3, 7, tier=DISK)
    assert rig.until(1)
    left = left_table(rig.stamps.snapshot(), BLOCKS + 2 * SLOTS)
    assert left is not None
    shutil.copy(rig.disk.path, tmp_path / NAME)
    same = DiskSlots(SPEC, rig.disk.slot_bytes, tmp_path, NAME)
    kept = same.take_over(left, DISK_SLOT)
    assert kept is not None
    assert kept.versions[7] == 1
    left.name_disks(same.number + 1)
    assert same.take_over(left, DISK_SLOT) is None
    same.close()


def test_a_table_of_other_sizes_proves_nothing():
    table = StampTable.create(bytearray(4096), 20, incarnation=1)
    assert left_table(table.snapshot(), 20) is not None
    assert left_table(table.snapshot(), 21) is None
    assert left_table(b"", 20) is None
    assert left_table(table.snapshot()[:30], 20) is None


@pytest.mark.parametrize("change", [{"content": b"another content!"}, {"slots": SLOTS + 1}, {"width": 9000}])
def test_a_file_of_another_registration_begins_empty(tmp_path: Path, change: dict[str, Any]):
    held = DiskSlots(SPEC, WIDTH, tmp_path, NAME, b"the same content")
    held.begin(None)
    assert held.write([Content(held.identity, DISK, 0, 0, 5)], 100, lambda row: [True]) == [True]
    held.close(Kept(3, [5] * SLOTS))
    spec = TierSpec(TierKind.DISK, change.get("slots", SLOTS))
    other = DiskSlots(spec, change.get("width", WIDTH), tmp_path, NAME, change.get("content", b"the same content"))
    left = StampTable.create(bytearray(4096), SLOTS + 1, incarnation=1)
    left.write(range(SLOTS + 1), [5] * (SLOTS + 1))
    left.name_disks(held.number)
    assert other.take_over(left) is None
    other.begin(None)
    assert other.read([Content(other.identity, DISK, 0, 0, 5)], 100) is None
    other.close()
