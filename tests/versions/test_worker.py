"""Memory that an earlier version of a worker or an engine wrote is read as it was written."""

from __future__ import annotations

import shutil

import pytest

from kvplane.base.job_table import JobTable
from kvplane.base.key_records import KeyRecords
from kvplane.base.stamp_table import StampTable
from kvplane.base.stamps import Stamp
from kvplane_worker.tiers.kept import read_index
from tests.client.lasting import INCARNATION
from tests.versions.kept import COMMITS, HERE
from tests.versions.write import BLOCKS, DISKS, IDENTITY, OWNER_EPOCH, VERSIONS, write_worker

pytestmark = pytest.mark.parametrize("commit", COMMITS)


def test_a_stamp_table_of_an_earlier_version(commit):
    table = StampTable(bytearray((HERE / commit / "worker" / "stamp_table").read_bytes()))
    assert (table.num_blocks, table.incarnation, table.owner_epoch) == (BLOCKS, INCARNATION, OWNER_EPOCH)
    assert (table.disk_incarnation, table.executed, table.position, table.moving_from) == (DISKS, 1, (2, 0), 2)
    stamps = [Stamp(0, OWNER_EPOCH, (2 - block % 2) * 100 + block).pack() for block in range(1, BLOCKS)]
    assert table.read_all() == (0, *stamps)


def test_records_of_keys_of_an_earlier_version(commit, tmp_path):
    write_worker(tmp_path / "now")
    raw = bytearray((HERE / commit / "worker" / "key_records").read_bytes())
    now = bytearray((tmp_path / "now" / "key_records").read_bytes())
    assert bytes(KeyRecords(raw).records()) == bytes(KeyRecords(now).records())


def test_a_job_table_of_an_earlier_version(commit, tmp_path):
    write_worker(tmp_path / "now")
    tables = [(HERE / commit / "worker" / "job_table"), tmp_path / "now" / "job_table"]
    before, now = (JobTable(bytearray(path.read_bytes())) for path in tables)
    assert before.life == now.life == OWNER_EPOCH
    assert before.take() == now.take() != []
    assert before.ends_from(0) == now.ends_from(0) != []


def test_the_index_of_a_disk_tier_of_an_earlier_version(commit, tmp_path):
    shutil.copy(HERE / commit / "worker" / "disk_index", tmp_path / "index")
    kept = read_index(tmp_path / "index", IDENTITY, len(VERSIONS))
    assert kept is not None
    assert (kept.owner_epoch, tuple(kept.versions)) == (OWNER_EPOCH, VERSIONS)
