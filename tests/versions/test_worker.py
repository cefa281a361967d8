"""Memory that an earlier version of a worker or an engine wrote is read as it was written."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from kvplane.base.job_table import JobTable, record_of
from kvplane.base.key_records import KeyRecords
from kvplane.base.stamp_table import StampTable
from kvplane.base.stamps import Stamp
from kvplane.base.step import Orders
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
    # An engine that is newer than its worker writes rows as the worker reads them: without keys.
    orders = Orders(
        load_job=[7], load_tier=[0], load_slot=[1], load_version=[3], load_block=[2], load_group=[0], load_stamp=[9],
        save_job=[8], save_block=[4], save_group=[0], save_stamp=[10], save_tier=[0], save_slot=[5],
    )  # fmt: skip
    named = replace(orders, load_key=[11], save_key=[12])
    for table, given in ((before, named), (now, orders)):
        assert table.order(record_of(given, (OWNER_EPOCH, 5, 0), {}, table.version))
    assert before.take() == now.take() != []
    assert before.ends_from(0) == now.ends_from(0) != []


def test_the_index_of_a_disk_tier_of_an_earlier_version(commit, tmp_path):
    shutil.copy(HERE / commit / "worker" / "disk_index", tmp_path / "index")
    kept = read_index(tmp_path / "index", IDENTITY, len(VERSIONS))
    assert kept is not None
    assert (kept.owner_epoch, tuple(kept.versions)) == (OWNER_EPOCH, VERSIONS)
