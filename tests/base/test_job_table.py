"""The job table: two rings in shared memory, each with one writer and one reader."""

from __future__ import annotations

import pytest

from kvplane.base.errors import FailedPrecondition, InvalidArgument
from kvplane.base.job_table import MAX_JOBS, JobKind, JobRow, JobTable, job_table_bytes, record_of
from kvplane.base.packed_ints import PackedInts
from kvplane.base.step import Orders
from tests.base.job_rows import record

ROWS = 5
RECORD_BYTES = 96  # of one load of one row


@pytest.fixture
def buffer():
    return bytearray(job_table_bytes(ROWS))


@pytest.fixture
def table(buffer):
    return JobTable.create(buffer, ROWS)


def row(job, **changes):
    return JobRow(job, JobKind.LOAD, 3, 4, 0, 2, 0, 7, 1 << 50, 9, (1 << 64) - 1, 1)._replace(**changes)


def save(job, **changes):
    return row(job, kind=JobKind.SAVE, after=0, version=job, **changes)


def move(job, **changes):
    return row(job, kind=JobKind.MOVE, after=0, group=0, stamp=(1 << 32) - 1, **changes)


def test_rows_arrive_once_and_in_order_around_the_ring(table, buffer):
    other = JobTable(buffer)
    for first in range(1, 60, 4):
        rows = [row(first), row(first, slot=8), save(first + 1), save(first + 2, slot=1), move(first + 3)]
        assert table.order(record(rows))
        assert other.take() == [tuple(rows[:2]), tuple(rows[2:4]), tuple(rows[4:])]
        assert other.take() == []


def test_records_of_any_size_pass_the_end_of_the_ring(table, buffer):
    other, sizes = JobTable(buffer), set[int]()
    for number in range(1, 200):
        rows = [save(number * 10 + at) for at in range(number % 7)] + [row(number * 10 + 9)] * (number % 3)
        if rows:
            sizes.add(len(record(rows)))
            assert table.order(record(rows))
            assert [one for some in other.take() for one in some] == sorted(rows, key=lambda one: one.kind)
    assert len(sizes) > 12


def test_a_full_table_takes_all_rows_or_none(table):
    for job in range(ROWS):
        assert table.order(record([row(job + 1)])), "as many rows as it has, however few a record has"
    assert not table.order(record([save(7)]))
    assert [one.job for some in table.take() for one in some] == [1, 2, 3, 4, 5]
    assert not table.order(record([save(job) for job in range(10, 10 + 4 * ROWS)]))
    assert table.take() == []
    assert table.order(record([save(8), save(9)]))
    assert [one.job for some in table.take() for one in some] == [8, 9]


def test_columns_of_an_answer_and_lists_give_the_same_record():
    names = ("save_job", "save_stamp", "save_key", "save_tier", "save_slot", "save_block", "save_group")
    columns = {name: [at, at + 1, 7] for at, name in enumerate(names)}
    packed = {name: PackedInts("QQQIIII"[at], column) for at, (name, column) in enumerate(columns.items())}
    assert record_of(Orders(**columns), (1, 2, 3), {}) == record_of(Orders(**packed), (1, 2, 3), {})
    assert record_of(Orders(), (1, 2, 3), {}) == b""


@pytest.mark.parametrize("name", ["save_stamp", "save_group"])
def test_columns_of_different_lengths_are_refused(name):
    columns = ("save_job", "save_stamp", "save_key", "save_tier", "save_slot", "save_block", "save_group")
    orders = Orders(**{one: [1, 2] for one in columns})
    setattr(orders, name, [1])
    with pytest.raises(InvalidArgument, match=f"{name} 1"):
        record_of(orders, (1, 1, 0), {})


@pytest.mark.parametrize("word", range(RECORD_BYTES // 8))
@pytest.mark.parametrize("stale", [b"\xee" * 8, bytes(8)])
def test_a_record_that_is_not_visible_whole_is_taken_later(table, buffer, word, stale):
    """A reader may see the position before a word of the record, as on processors that reorder writes."""
    table.order(record([row(1)]))
    at = 64 + 8 * word
    written, buffer[at : at + 8] = bytes(buffer[at : at + 8]), stale
    if written != stale:
        assert table.take() == []
    buffer[at : at + 8] = written
    assert table.take() == [(row(1),)]


def test_an_earlier_record_at_the_same_place_is_not_taken(table, buffer):
    """Nothing of the new record is visible, but the position behind it."""
    for _ in range(ROWS):
        assert table.order(record([row(1)]))
        before = bytes(buffer[64 : 64 + ROWS * RECORD_BYTES])
        assert len(table.take()) == 1
    table.order(record([row(1)]))
    after, buffer[64 : 64 + ROWS * RECORD_BYTES] = bytes(buffer[64 : 64 + ROWS * RECORD_BYTES]), before
    assert table.take() == []
    buffer[64 : 64 + ROWS * RECORD_BYTES] = after
    assert table.take() == [(row(1),)]


def test_a_record_is_no_longer_than_what_was_written(table, buffer):
    """Its head says how long it is; whatever that is, a reader stays in the ring."""
    table.order(record([row(1)]))
    for first in range(64 + 28, 64 + 44, 4):
        whole = bytes(buffer)
        buffer[first : first + 4] = b"\xff" * 4
        assert table.take() == []
        buffer[:] = whole


def test_ends_are_kept_for_every_job_in_flight(table):
    for job in range(1, 3 * MAX_JOBS):
        table.end(job << 32, is_done=job % 2 == 1, count=job % 5 + 1)
    last = table.num_ended
    assert table.ends_from(last - MAX_JOBS) == [
        (job << 32, job % 5 + 1, job % 2 == 1) for job in range(last - MAX_JOBS + 1, last + 1)
    ]
    with pytest.raises(FailedPrecondition, match="new epoch"):
        table.ends_from(0)


@pytest.mark.parametrize("word", range(3))
def test_an_end_that_is_not_visible_whole_is_read_later(table, buffer, word):
    table.end(1 << 32, is_done=True)
    table.end(2 << 32, is_done=False, count=7)
    at = len(buffer) - 8 * (2 * MAX_JOBS * 3 - 3 - word)
    written, buffer[at : at + 8] = bytes(buffer[at : at + 8]), b"\xee" * 8
    assert table.ends_from(0) == [(1 << 32, 1, True)]
    buffer[at : at + 8] = written
    assert table.ends_from(1) == [(2 << 32, 7, False)]


def test_the_life_is_that_of_the_movers(table, buffer):
    assert table.life == 0
    JobTable(buffer).begin_life(8)
    assert table.life == 8


@pytest.mark.parametrize("bad", [b"", bytes(64), b"kvpjobs\0" + bytes(100), b"kvpjobs\0\2\0\0\0\xff\0\0\0" + bytes(64)])
def test_a_buffer_without_a_table_is_refused(bad):
    with pytest.raises(InvalidArgument, match="no job table"):
        JobTable(bytearray(bad))


def test_a_table_of_another_version_is_refused(table, buffer):
    buffer[8] = 1
    with pytest.raises(InvalidArgument, match="version 3"):
        JobTable(buffer)


@pytest.mark.parametrize("rows", [0, ROWS + 1])
def test_a_table_that_does_not_fit_is_refused(buffer, rows):
    with pytest.raises(InvalidArgument) as refused:
        JobTable.create(buffer, rows)
    assert refused.value.field == "num_rows"
