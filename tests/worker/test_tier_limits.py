"""Tiers that a worker cannot have, and orders that it cannot carry out: refused by name, and nothing changes."""

from __future__ import annotations

import logging
import re
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer

from kvplane.base.errors import InvalidArgument, KvplaneError, OutOfMemory, WorkerExists
from kvplane.base.groups import TierKind, TierSpec
from kvplane_worker import cli
from kvplane_worker.memory import free_host_bytes, is_in_memory
from kvplane_worker.tiers import DiskSlots, HostSlots, TierOptions
from kvplane_worker.tiers.seal import FORMAT
from kvplane_worker.tiers.start import MOST_AT_ONCE, _check_size, _slots
from tests.worker.tier_rig import Rig

HOST, DISK = TierSpec(TierKind.HOST, 4), TierSpec(TierKind.DISK, 4)
WIDTH = 5000


def slots(spec, folder=None, width=WIDTH, most=None):
    options = TierOptions((spec,), folder, "w", most_bytes={} if most is None else {spec.kind: most})
    _check_size(options, 0, width)
    buffers: Any = SimpleNamespace(plan=SimpleNamespace(digest=lambda: "plan"), memory=torch.zeros(1))
    return _slots(options, 0, width, buffers)


def names_remedy(error: KvplaneError, field: str) -> None:
    assert error.field == field
    assert error.remedy, error


@pytest.mark.parametrize("kind", TierKind)
def test_a_slot_has_the_bytes_that_a_plan_counts(kind, tmp_path):
    """`kvplane plan` computes how many slots fit by `TierKind.slot_bytes`."""
    made = slots(TierSpec(kind, 3), tmp_path)
    size = made._stride if isinstance(made, DiskSlots) else made.slot_bytes
    assert size == kind.slot_bytes(WIDTH)
    made.close()


@pytest.mark.parametrize("kind", [TierKind.HOST, TierKind.DISK])
def test_a_tier_above_the_limit_of_the_operator_is_refused(kind, tmp_path):
    most = 3 * kind.slot_bytes(WIDTH) + 1
    with pytest.raises(OutOfMemory, match=f"this worker may use {most}") as refused:
        slots(TierSpec(kind, 4), tmp_path, most=most)
    names_remedy(refused.value, "tiers[0].num_blocks")
    assert refused.value.metadata["num_blocks"] == "3"
    app = typer.Typer()
    app.command()(cli.command)
    options = {name for one in typer.main.get_command(app).params for name in one.opts}
    assert {*re.findall("--[a-z-]+", str(refused.value))} & options == {f"--{kind.value}-size"}
    assert not list(tmp_path.iterdir())
    slots(TierSpec(kind, 3), tmp_path, most=most).close()


def test_a_disk_tier_without_a_disk_is_refused():
    with pytest.raises(InvalidArgument) as refused:
        slots(DISK)
    names_remedy(refused.value, "tiers[0]")


def test_a_folder_that_is_a_file_is_refused_and_left_alone(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(InvalidArgument) as refused:
        slots(DISK, file)
    names_remedy(refused.value, "--disk")
    assert file.read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_refused():
    with pytest.raises(InvalidArgument) as refused:
        slots(DISK, Path("/proc/tiers"))
    names_remedy(refused.value, "--disk")


def test_a_link_in_place_of_the_file_is_refused_and_its_target_left_alone(tmp_path):
    first = slots(DISK, tmp_path / "real")
    (name,) = (tmp_path / "real").iterdir()
    first.close()
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / name.name).symlink_to(mine)
    with pytest.raises(InvalidArgument) as refused:
        slots(DISK, tmp_path / "linked")
    names_remedy(refused.value, "--disk")
    assert mine.read_text() == "mine"


def test_a_file_of_another_worker_is_refused_and_left_alone(tmp_path):
    first = slots(DISK, tmp_path)
    before = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    with pytest.raises(WorkerExists) as refused:
        slots(DISK, tmp_path)
    names_remedy(refused.value, "--disk")
    assert {path.name: path.stat().st_size for path in tmp_path.iterdir()} == before
    first.close()


def test_a_tier_above_the_free_room_is_refused(tmp_path):
    for spec, disk in ((TierSpec(TierKind.HOST, 1 << 40), None), (TierSpec(TierKind.DISK, 1 << 40), tmp_path)):
        with pytest.raises(OutOfMemory) as refused:
            slots(spec, disk)
        names_remedy(refused.value, "tiers")
        assert int(refused.value.metadata["num_blocks"]) < 1 << 40


def test_blocks_above_one_read_of_the_system_are_refused_on_disks(tmp_path):
    with pytest.raises(InvalidArgument, match=f"reads at most {MOST_AT_ONCE}") as refused:
        slots(DISK, tmp_path, width=4 << 30)
    names_remedy(refused.value, "tiers[0]")
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_memory_is_named(tmp_path, monkeypatch, caplog):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"disk / ext4 rw 0 0\nmemory {tmp_path}/in\\040memory tmpfs rw 0 0\n")
    assert is_in_memory(tmp_path / "in memory" / "tiers", mounts)
    assert not is_in_memory(tmp_path / "other", mounts)
    monkeypatch.setattr("kvplane_worker.tiers.start.is_in_memory", lambda folder: True)
    with caplog.at_level(logging.WARNING):
        slots(DISK, tmp_path / "tiers").close()
    assert "is in memory, not on a disk" in caplog.text


def test_free_memory_ends_at_the_limit_of_the_container(tmp_path):
    everything = free_host_bytes(tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert free_host_bytes(tmp_path) == pytest.approx(everything, rel=0.2)
    (tmp_path / "memory.max").write_text("5000\n")
    assert free_host_bytes(tmp_path) == 4000
    (tmp_path / "memory.current").write_text("9000\n")
    assert free_host_bytes(tmp_path) == 0


@pytest.fixture
def rig(tmp_path):
    made = Rig(disk=tmp_path)
    yield made
    made.movers.close()


ORDERS = {
    "a load of a tier that is not there": lambda rig, job: rig.load(job, [(0, 1, 9)], tier=7),
    "a load of a slot behind the last": lambda rig, job: rig.load(job, [(1 << 20, 1, 9)]),
    "a load of a slot of the disk behind the last": lambda rig, job: rig.load(job, [(1 << 20, 1, 9)], tier=1),
    "a load into a block behind the last": lambda rig, job: rig.load(job, [(0, 1, 1 << 20)]),
    "a load of another version": lambda rig, job: rig.load(job, [(0, 1 << 40, 9)]),
    "a save of a block behind the last": lambda rig, job: rig.save(job, 1 << 20, 3),
    "a save into a slot behind the last": lambda rig, job: rig.save(job, 3, 1 << 20),
    "a save into a tier that is not there": lambda rig, job: rig.save(job, 3, 3, tier=7),
    "a move from a slot behind the last": lambda rig, job: rig.move(job, 1 << 20, 1, 3),
    "a move to a slot behind the last": lambda rig, job: rig.move(job, 0, 1, 1 << 20),
}


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_of_what_is_not_there_fails_its_job_alone(name, rig):
    rig.save(1, 3, 0)
    assert rig.until(1)
    before, sizes = rig.pages.memory.clone(), [path.stat().st_size for path in rig.disk.path.parent.iterdir()]
    ORDERS[name](rig, 2)
    assert not rig.until(2)
    assert rig.pages.memory.equal(before)
    assert [path.stat().st_size for path in rig.disk.path.parent.iterdir()] == sizes
    rig.load(3, [(0, 1, 9)])
    assert rig.until(3)
    assert rig.page(0, 9) == rig.page(0, 3)


def test_a_header_of_a_later_format_is_refused(rig):
    rig.save(1, 3, 0)
    assert rig.until(1)
    host = rig.movers.tiers[0]
    assert isinstance(host, HostSlots)
    later = bytearray(host._header(0))
    struct.pack_into("<8s", later, 0, FORMAT[:-1] + b"3")
    host._set_header(0, bytes(later))
    before = rig.pages.memory.clone()
    rig.load(2, [(0, 1, 9)])
    assert not rig.until(2)
    assert rig.pages.memory.equal(before)
    assert host.counts.refused == 1
