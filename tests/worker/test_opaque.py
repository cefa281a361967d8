"""A worker without a service lends raw memory, whose layout only the engine knows, and keeps it for an equal plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvplane.base.errors import FailedPrecondition, NoPlan, OtherWriter, OutOfMemory, WrongPlan
from kvplane.base.key_records import KeyRecord
from kvplane.base.rank_plan import RankPlan
from kvplane.base.stamp_table import StampTable, table_bytes
from kvplane.base.step import Orders
from kvplane.rank import CallersMoves, Rank
from kvplane_worker.attach import attach, read_stamps
from kvplane_worker.process import WorkerOptions
from tests.cli.processes import run_kvplane
from tests.worker.rig import World

BLOCKS, SIZE = 16, 16 * 100 + 3
PLAN = RankPlan.opaque(BLOCKS, SIZE, "layout-1")


class Alone(World):
    """A world without a service."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.device, self.children = folder, "cpu", []

    def options(self, rank: int = 0, replica: str = "r", folder: str = "") -> WorkerOptions:
        return WorkerOptions("", replica, rank, self.device, self.folder / (folder or f"{replica}-{rank}"))


@pytest.fixture
def alone(tmp_path):
    it = Alone(tmp_path)
    yield it
    it.end()


def test_the_memory_of_an_equal_plan_survives_the_engine_that_wrote_it(alone):
    _, address = alone.worker()
    engine = alone.engine()
    first = engine.do("attach_opaque", address, PLAN)
    engine.do("write_raw", 5, b"page", [(3, 77)])
    engine.kill()
    again = alone.engine()
    assert again.do("attach_opaque", address, PLAN) == first
    assert again.do("read_raw", 5, 4) == b"page"
    assert read_stamps(address).read(3) == 77


OTHERS = RankPlan.opaque(BLOCKS, SIZE, "layout-2"), RankPlan.opaque(BLOCKS, 2 * SIZE, "layout-1")


@pytest.mark.parametrize("other", OTHERS)
def test_another_plan_gets_new_memory(alone, other):
    _, address = alone.worker()
    engine = alone.engine()
    first = engine.do("attach_opaque", address, PLAN)
    engine.do("write_raw", 5, b"page", [(3, 77)])
    engine.kill()
    again = alone.engine()
    assert again.do("attach_opaque", address, other) != first
    assert again.do("read_raw", 5, 4) == bytes(4)
    assert read_stamps(address).read_all() == (0,) * BLOCKS
    assert len(alone.shared_files()) == 3  # the memory of the first plan is freed


def test_every_byte_belongs_to_the_engine(alone):
    """The incarnation, which shows damage, is behind the pages."""
    _, address = alone.worker()
    engine = alone.engine()
    first = engine.do("attach_opaque", address, PLAN)
    engine.do("write_raw", 0, b"\xff" * SIZE, [])
    engine.kill()
    assert alone.engine().do("attach_opaque", address, PLAN) == first


def test_a_living_engine_keeps_its_pages_against_any_plan(alone):
    _, address = alone.worker()
    engine = alone.engine()
    first = engine.do("attach_opaque", address, PLAN)
    for plan in (PLAN, RankPlan.opaque(BLOCKS, SIZE, "layout-2")):
        assert isinstance(alone.engine().do("attach_opaque", address, plan), OtherWriter)
    assert isinstance(engine.do("attach_opaque", address, RankPlan.opaque(2, 9, "x")), FailedPrecondition)
    assert engine.do("attach_opaque", address, PLAN) == first


def test_a_plan_is_needed_and_must_fit(alone):
    _, address = alone.worker()
    with pytest.raises(NoPlan, match="no engine has given it a plan"):
        attach(address)
    engine = alone.engine()
    too_large = engine.do("attach_opaque", address, RankPlan.opaque(BLOCKS, 1 << 45, "layout-1"))
    assert isinstance(too_large, OutOfMemory)
    alone.engine().do("attach_opaque", address, PLAN)  # the refused process holds nothing


def test_a_worker_with_a_service_takes_no_plan_from_an_engine(here):
    _, address = here.worker()
    with pytest.raises(WrongPlan, match="comes from its service"):
        attach(address, opaque_plan=PLAN)


def test_the_command_wants_a_service_or_an_opaque_worker():
    for words in ([], ["--service", "a:1", "--opaque"]):
        done = run_kvplane("worker", "--replica", "r", *words)
        assert done.returncode == 2
        assert "either --service or --opaque" in done.stderr


def test_pages_of_an_opaque_plan_are_moved_by_the_engine_alone(alone):
    _, address = alone.worker()
    engine = alone.engine()
    engine.do("attach_opaque", address, PLAN)
    refused = engine.do("group_of_opaque")
    assert isinstance(refused, FailedPrecondition)
    assert "only the engine knows" in str(refused)


def test_records_follow_the_stamp_table(alone):
    _, address = alone.worker()
    engine = alone.engine()
    engine.do("attach_opaque", address, PLAN)
    engine.do("write_record", KeyRecord(3, 77, b"d" * 32, 1, 64))
    engine.kill()
    again = alone.engine()
    again.do("attach_opaque", address, PLAN)
    assert again.do("read_record", 3) == 77


def test_a_rank_writes_stamps_only_and_its_caller_reports_zeroes_and_copies():
    table = StampTable.create(bytearray(table_bytes(8)), 8, 1)
    mover = CallersMoves(num_groups=1)
    rank = Rank(table, mover)
    rank.claim(1)
    for seq in (1, 2, 3):
        rank.carry_out(1, seq, 0, Orders(stamp_block=[seq], stamp=[9 + seq], zero_block=[seq], zero_group=[0]))
    assert (table.read_all()[1:4], table.moving_from) == ((10, 11, 12), 1)
    rank.executed(1)
    rank.poll()
    assert (table.executed, table.moving_from) == (1, 2)  # the zeroes of later steps may still run
    mover.done()
    rank.poll()
    assert table.moving_from == 0
