"""The block tables of an engine equal those of the service, except for entries that the service released."""

from __future__ import annotations

import pytest

from kvplane.base.step import Cache, End, RowFlag
from kvplane.session.rows import AdmitRow, FactRow, NewsRow, RunRow, part_of
from kvplane.session.tables import BlockTables
from kvplane_service.core.replica import Replica
from tests.client.mini_engine import FULL, HYBRID, STATE, MiniEngine, spec_of
from tests.client.stepper import Stepper


@pytest.mark.parametrize("spec", [spec_of(FULL), HYBRID, STATE], ids=["full", "window", "state"])
def test_block_tables_equal_those_of_the_service(spec):
    replica, tables = Replica(spec), BlockTables(len(spec.groups))
    step = Stepper(replica)

    def ask(part):
        (answer,) = step(part).parts
        tables.update(part, answer)
        for slot in range(24):
            expected = replica.coordinator.tables(slot) if replica.requests.is_live(slot) else []
            assert (slot in tables) == any(expected)
            for mine, theirs in zip(tables[slot], expected, strict=True) if slot in tables else ():
                assert len(mine) == len(theirs)
                assert all(b == 0 or a == b for a, b in zip(mine, theirs, strict=True))
        return answer

    engine = MiniEngine(ask)
    engine.run()
    assert engine.num_preempted
    assert engine.num_hit
    assert len(tables) == 0


def test_full_tables_replace_earlier_ones():
    step, tables = Stepper(Replica(spec_of(FULL))), BlockTables(1)
    parts = [
        part_of(NewsRow(0, range(20)), AdmitRow(0, cap=16)),
        part_of(RunRow(0)),
    ]
    parts[1].with_tables = True
    for part in parts:
        tables.update(part, step(part).parts[0])
    assert tables[0] == [[1, 2]]


def test_a_held_request_keeps_its_table_until_it_is_released():
    step, tables = Stepper(Replica(spec_of(FULL))), BlockTables(1)
    seen = []
    for part in (
        part_of(NewsRow(0, range(20)), AdmitRow(0)),
        part_of(FactRow(0, end=End.HELD)),
        part_of(cache=Cache(released=[0])),
    ):
        tables.update(part, step(part).parts[0])
        seen.append(0 in tables)
    assert seen == [True, True, False]


def test_a_load_that_ended_keeps_the_table_of_its_running_request():
    step, tables = Stepper(Replica(spec_of(FULL))), BlockTables(1)
    late = AdmitRow(0, cap=0, external=16, flags=RowFlag.DELAY_CACHING)
    for part in (part_of(NewsRow(0, range(20)), late), part_of(cache=Cache(released=[0])), part_of(RunRow(0))):
        tables.update(part, step(part).parts[0])
    assert tables[0] == [[1, 2]]
