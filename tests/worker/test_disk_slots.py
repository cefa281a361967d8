"""The slots of a disk tier: a file of fixed size, and whatever becomes of its bytes, nothing wrong is read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch

from kvplane.base.errors import InvalidArgument, OutOfMemory, PermissionDenied, WorkerExists
from kvplane.base.groups import TierKind, TierSpec
from kvplane_worker.tiers import disk
from kvplane_worker.tiers.disk import FAILURES, DiskSlots
from kvplane_worker.tiers.kept import Kept
from kvplane_worker.tiers.seal import HEADER_BYTES, Content
from kvplane_worker.tiers.slots import ALIGNMENT_BYTES
from tests.cli.processes import KVPLANE
from tests.worker.tier_rig import Rig

SPEC = TierSpec(TierKind.DISK, 30)
DISK, CASES = 1, 120


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(disk=tmp_path)
    yield made
    made.movers.close()


def test_a_page_that_moved_to_the_disk_is_loaded_from_there(rig: Rig):
    saved = {block: rig.page(0, block) for block in (3, 1, 7)}
    for at, block in enumerate(saved):
        rig.save(at + 1, block, at)
        assert rig.until(at + 1)
        rig.move(at + 11, at, at + 1, 20 + at)
        assert rig.until(at + 11)
    rig.load(30, [(20 + at, at + 11, 12 + at) for at in range(3)], tier=DISK)
    assert rig.until(30)
    assert [rig.page(0, 12 + at) for at in range(3)] == list(saved.values())
    assert rig.disk.counts.loaded == rig.disk.counts.saved == 3


def test_a_move_of_another_version_fails(rig: Rig):
    rig.save(1, 3, 0)
    assert rig.until(1)
    rig.move(2, 0, 9, 20)
    assert not rig.until(2)


def test_no_damage_of_the_file_reaches_a_page(rig: Rig):
    """Bits are flipped, the end of the slot is lost, or another slot is copied over it."""
    stride = rig.disk._stride
    num_bytes, loaded = rig.pages.group(0).bytes_per_block, 0
    for seed in range(CASES):
        rng, job = Random(seed), 10 * (seed + 1)
        rig.save(job, rng.randrange(1, 12), seed % 8, tier=DISK)
        assert rig.until(job)
        slot = bytearray(read_aligned(rig.disk, seed % 8))
        sound = bytes(slot)
        how = rng.randrange(3)
        used = [*range(HEADER_BYTES), *range(ALIGNMENT_BYTES, ALIGNMENT_BYTES + num_bytes)]
        if how == 0:
            slot[rng.choice(used)] ^= 1 << rng.randrange(8)
        elif how == 1:
            first = rng.choice(used)
            slot[first:] = bytes(stride - first)
        else:
            slot[:] = read_aligned(rig.disk, (seed + 1) % 8)
        write_aligned(rig.disk, slot, seed % 8)
        before = rig.pages.memory.clone()
        rig.load(job + 1, [(seed % 8, job, 20)], tier=DISK)
        if rig.until(job + 1):
            assert all(slot[at] == sound[at] for at in used), f"seed {seed}"
            loaded += 1
        else:
            assert rig.pages.memory.equal(before), f"seed {seed}"
    assert loaded < CASES // 10, "nothing was damaged"


def read_aligned(slots: DiskSlots, slot: int) -> bytes:
    view, _ = slots._buffer(1, slots.slot_bytes)
    os.preadv(slots._file, [view], slots._at(slot))
    return bytes(view)


def write_aligned(slots: DiskSlots, data: bytes | bytearray, slot: int) -> None:
    view, _ = slots._buffer(1, slots.slot_bytes)
    view[:] = data
    assert os.pwritev(slots._file, [view], slots._at(slot)) == len(data)


def test_a_file_that_became_shorter_fails_loads_and_is_left_alone_for_a_while(rig: Rig, monkeypatch):
    monkeypatch.setattr(disk, "PAUSE_S", 0.0)
    rig.save(1, 3, 20, tier=DISK)
    rig.save(2, 4, 0, tier=DISK)
    assert rig.until(1)
    assert rig.until(2)
    os.ftruncate(rig.disk._file, rig.disk._at(1))
    for job in range(10, 10 + FAILURES):
        rig.load(job, [(20, 1, 9)], tier=DISK)
        assert not rig.until(job)
    monkeypatch.setattr(rig.disk, "_paused_until", float("inf"))
    rig.load(20, [(0, 2, 9)], tier=DISK)
    assert not rig.until(20)
    rig.save(21, 5, 0, tier=DISK)
    assert not rig.until(21)
    assert (rig.disk.counts.failed, rig.disk.counts.refused) == (FAILURES, 0), "a disk that fails damages nothing"
    monkeypatch.setattr(rig.disk, "_paused_until", 0.0)
    rig.load(22, [(0, 2, 9)], tier=DISK)
    assert rig.until(22)


def test_a_file_system_without_direct_access_is_used_through_its_cache(tmp_path: Path, monkeypatch):
    real = os.open

    def refuse(path, flags, *args):
        if flags & os.O_DIRECT:
            raise OSError(22, "no O_DIRECT")
        return real(path, flags, *args)

    monkeypatch.setattr(os, "open", refuse)
    rig = Rig(disk=tmp_path)
    assert not rig.disk.is_direct
    rig.save(1, 3, 5, tier=DISK)
    assert rig.until(1)
    rig.load(2, [(5, 1, 9)], tier=DISK)
    assert rig.until(2)
    rig.movers.close()


def test_two_workers_do_not_use_one_file(tmp_path: Path):
    held = DiskSlots(SPEC, 5000, tmp_path / "new", "name")
    with pytest.raises(WorkerExists, match="folder of its own"):
        DiskSlots(SPEC, 5000, tmp_path / "new", "name")
    held.close()
    again = DiskSlots(SPEC, 5000, tmp_path / "new", "name")
    assert again.slot_bytes == 8192
    again.close()


def test_what_a_file_held_for_another_registration_is_gone_when_a_worker_begins(tmp_path: Path):
    held = DiskSlots(SPEC, 5000, tmp_path, "name", b"one registration")
    held.begin(None)
    secret = b"keys and values!" * 200
    assert held.write([Content(held.identity, 1, 3, 0, 9)], len(secret), filled_with(secret)) == [True]
    held.close(Kept(1, [0, 0, 0, 9, *[0] * 26]))
    assert secret in (tmp_path / "name").read_bytes()
    later = DiskSlots(SPEC, 5000, tmp_path, "name", b"the next of them")
    assert later.take_over(None) is None
    later.begin(None)
    assert secret[:16] not in (tmp_path / "name").read_bytes()
    later.close(erase=True)
    assert list(tmp_path.iterdir()) == []


def filled_with(secret: bytes):
    def fill(rows):
        rows[0] = torch.frombuffer(bytearray(secret), dtype=torch.uint8)
        return [True]

    return fill


def test_erase_removes_the_files_that_no_worker_uses_and_nothing_else(tmp_path: Path):
    left, used = DiskSlots(SPEC, 5000, tmp_path, "left.slots"), DiskSlots(SPEC, 5000, tmp_path, "used.slots")
    left.begin(None)
    left.close(Kept(1, [0] * 30))
    used.begin(None)
    (tmp_path / "thesis.slots").write_bytes(b"my thesis")
    (tmp_path / "link.slots").symlink_to(tmp_path / "thesis.slots")
    os.mkfifo(tmp_path / "pipe.slots")
    assert list(disk.erase_left(tmp_path)) == [(tmp_path / "left.slots", True), (tmp_path / "used.slots", False)]
    names = {one.name for one in tmp_path.iterdir()}
    assert names == {"used.slots", "thesis.slots", "link.slots", "pipe.slots"}
    done = subprocess.run([*KVPLANE, "erase", str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, f"a worker uses {tmp_path}/used.slots\n"), done.stderr
    used.close()
    done = subprocess.run([*KVPLANE, "erase", str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"erased {tmp_path}/used.slots\n"), done.stderr


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o1777])
def test_a_folder_that_others_can_write_to_is_refused_with_a_remedy(tmp_path: Path, mode: int):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    with pytest.raises(PermissionDenied, match=r"others cannot write to.*chmod go-w") as refused:
        DiskSlots(SPEC, 5000, tmp_path / "open", "name")
    assert (refused.value.field, [*(tmp_path / "open").iterdir()]) == ("--disk", [])


def test_a_folder_below_one_of_another_user_is_refused(tmp_path: Path, monkeypatch):
    real = os.stat(tmp_path)
    monkeypatch.setattr(Path, "stat", lambda self: SimpleNamespace(st_uid=12345, st_mode=real.st_mode))
    with pytest.raises(PermissionDenied, match="belongs to another user, who could replace"):
        DiskSlots(SPEC, 5000, tmp_path / "own", "name")


def test_a_folder_that_is_a_link_is_followed_before_it_is_checked(tmp_path: Path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "open")
    with pytest.raises(PermissionDenied):
        DiskSlots(SPEC, 5000, tmp_path / "link", "name")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_in_a_volume_of_root_a_worker_of_another_user_makes_its_own_folder(tmp_path: Path):
    volume = Path(tempfile.mkdtemp())
    volume.chmod(0o2777)
    script = (
        "import os; from pathlib import Path; from kvplane.base.groups import TierKind, TierSpec\n"
        "from kvplane_worker.tiers.disk import DiskSlots; os.setgid(65534); os.setuid(65534)\n"
        f"print(DiskSlots(TierSpec(TierKind.DISK, 3), 5000, Path({str(volume)!r}), 'name').path)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == str(volume / "kvplane-65534" / "name"), done.stderr
    assert (volume / "kvplane-65534").stat().st_mode & 0o777 == 0o700
    shutil.rmtree(volume)


def test_a_file_of_something_else_is_refused_and_not_changed(tmp_path: Path):
    (tmp_path / "name").write_bytes(b"my thesis" * 1000)
    with pytest.raises(InvalidArgument, match="no file of a disk tier") as refused:
        DiskSlots(SPEC, 5000, tmp_path, "name")
    assert refused.value.field == "--disk"
    assert (tmp_path / "name").read_bytes() == b"my thesis" * 1000


@pytest.mark.parametrize(
    "content", [bytes(4096) + b"image of a disk" * 9000, bytes(8) + b"x" * 9000, b"kvptier3" + b"later" * 9000, b"x"]
)
def test_only_an_empty_file_or_one_of_a_tier_is_written(tmp_path: Path, content: bytes):
    (tmp_path / "name").write_bytes(content)
    with pytest.raises(InvalidArgument, match="no file of a disk tier"):
        DiskSlots(SPEC, 5000, tmp_path, "name")
    assert (tmp_path / "name").read_bytes() == content
    (tmp_path / "empty").touch()
    DiskSlots(SPEC, 5000, tmp_path, "empty").close()


def test_a_pipe_in_place_of_the_file_is_refused_and_stays(tmp_path: Path):
    os.mkfifo(tmp_path / "name")
    with pytest.raises(InvalidArgument, match="no file of a disk tier"):
        DiskSlots(SPEC, 5000, tmp_path, "name")
    assert (tmp_path / "name").is_fifo()


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch):
    """It has the form of a tier's file, and that user can write what it says into its slots."""
    DiskSlots(SPEC, 5000, tmp_path, "name").close()
    monkeypatch.setattr(disk, "_private", lambda folder: folder)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(InvalidArgument, match="of this user"):
        DiskSlots(SPEC, 5000, tmp_path, "name")


def test_a_worker_that_is_killed_while_it_reserves_its_file_can_start_again(tmp_path: Path, monkeypatch):
    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    for step in ("ftruncate", "posix_fallocate"):
        with monkeypatch.context() as patch:
            patch.setattr(os, step, killed)
            with pytest.raises(KeyboardInterrupt):
                DiskSlots(SPEC, 5000, tmp_path, "name")
        again = DiskSlots(SPEC, 5000, tmp_path, "name")
        assert again.take_over(None) is None
        again.close()
        again.path.unlink()


def test_a_disk_without_room_is_refused_with_what_fits(tmp_path: Path):
    with pytest.raises(OutOfMemory, match="free") as refused:
        DiskSlots(TierSpec(TierKind.DISK, 1 << 22), 1 << 30, tmp_path, "name")
    assert int(refused.value.metadata["num_blocks"]) < 1 << 22
    assert not list(tmp_path.iterdir())


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument) as refused:
        DiskSlots(SPEC, 5000, tmp_path / "file", "name")
    assert refused.value.field == "--disk"
