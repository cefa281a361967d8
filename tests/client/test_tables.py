"""The block tables of an engine equal those of the service, except for entries that the service released."""

from __future__ import annotations

import pickle
from array import array
from contextlib import ExitStack
from copy import copy, deepcopy

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvplane.base.hashing import native
from kvplane.base.packed_ints import PackedInts
from kvplane.base.step import Admit, Blocks, Cache, End, Part, PartResult, RowFlag, Run, StepResult
from kvplane.session import tables
from kvplane.session.rows import AdmitRow, FactRow, NewsRow, RunRow, part_of
from kvplane.session.tables import BlockTables
from kvplane.wire.result import decode_result, encode_result
from kvplane_core.spec.replica import Replica
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


@pytest.fixture(params=["on", "off"], ids=["compiled", "python"])
def form(request, monkeypatch):
    """Each test with both ways of appending to tables."""
    if request.param == "on" and native._COMPILED is None:
        pytest.skip("the compiled module is not installed")
    monkeypatch.setenv(native.VARIABLE, request.param)
    tables._compiled.cache_clear()
    yield
    tables._compiled.cache_clear()


IDS = st.lists(st.integers(0, 2**32 - 1), max_size=4)
NEW_BLOCKS = st.lists(st.lists(st.lists(IDS, min_size=2, max_size=2), min_size=3, max_size=3), max_size=6)


@pytest.mark.usefixtures("form")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=NEW_BLOCKS, views=st.sets(st.integers(0, 5)))
def test_tables_are_the_ids_of_all_results_in_contiguous_memory(steps, views):
    """Results from the wire and of the core give the same tables, also while views of their memory exist."""
    expected: list[list[list[int]]] = [[[], []] for _ in range(3)]
    tables, local = BlockTables(2), BlockTables(2)
    admitted = PartResult(tables=Blocks(row=[0, 1, 2], group=[0, 0, 0], count=[0, 0, 0]))
    for each in (tables, local):
        each.update(Part(admit=Admit([7, 8, 9])), admitted)
    with ExitStack() as held:
        for number, rows in enumerate(steps):
            result = PartResult()
            for row, groups in enumerate(rows):
                for group, ids in enumerate(groups):
                    result.new_blocks.add(row, group, ids)
                    expected[row][group] += ids
            received = decode_result(encode_result(StepResult(1, 0, [result], 0))).parts[0]
            assert received.new_blocks == result.new_blocks
            assert not rows or isinstance(received.new_blocks.ids, PackedInts if any(map(any, rows)) else list)
            for each, answer in ((tables, received), (local, result)):
                each.update(Part(run=Run(array("I", [7, 8, 9]))), answer)
            if number in views:
                for slot in (7, 8, 9):
                    for table in tables[slot]:
                        held.enter_context(memoryview(table))
    for slot, groups in zip((7, 8, 9), expected, strict=True):
        assert tables[slot] == local[slot] == groups
        assert [memoryview(table).tolist() for table in tables[slot]] == groups


@pytest.mark.usefixtures("form")
def test_a_view_of_a_table_that_grows_keeps_its_entries():
    tables = BlockTables(1)
    first = PartResult(tables=Blocks(row=[0], group=[0], count=[2], ids=[5, 6]))
    tables.update(Part(admit=Admit([0])), first)
    view = memoryview(tables[0][0])
    for ids in ([7], [8, 9]):
        columns = [PackedInts("I", column) for column in ([0], [0], [len(ids)], ids)]
        tables.update(Part(run=Run(array("I", [0]))), PartResult(new_blocks=Blocks(*columns)))
    assert view.tolist() == [5, 6]
    assert tables[0][0] == [5, 6, 7, 8, 9]
    assert type(tables[0][0]) is PackedInts


@pytest.mark.usefixtures("form")
def test_blocks_of_a_request_without_tables_are_refused_after_those_before_them():
    tables = BlockTables(1)
    tables.update(Part(admit=Admit([0])), PartResult(tables=Blocks([0], [0], [0])))
    columns = [PackedInts("I", column) for column in ([0, 1], [0, 0], [1, 1], [5, 6])]
    with pytest.raises(KeyError, match="4"):
        tables.update(Part(run=Run(array("I", [0, 4]))), PartResult(new_blocks=Blocks(*columns)))
    assert tables[0] == [[5]]


@given(code=st.sampled_from("IQ"), numbers=IDS, others=IDS, cut=st.slices(4))
def test_packed_ints_read_like_a_list(code, numbers, others, cut):
    packed = PackedInts(code, numbers)
    assert (packed == others, packed != others) == (numbers == others, numbers != others)
    assert packed == PackedInts(code, numbers)
    assert (packed[cut], packed + others, others + packed) == (numbers[cut], numbers + others, others + numbers)
    assert (repr(packed), repr(packed[cut])) == (repr(numbers), repr(numbers[cut]))
    assert copy(packed) == deepcopy(packed) == pickle.loads(pickle.dumps(packed)) == numbers
    assert (packed == tuple(numbers), memoryview(packed).contiguous) == (False, True)
