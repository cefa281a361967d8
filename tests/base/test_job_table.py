"""The job table: two rings in shared memory, each with one writer and one reader."""

from __future__ import annotations

import pytest

from kvplane.base.errors import FailedPrecondition, InvalidArgument
from kvplane.base.job_table import MAX_JOBS, JobKind, JobRow, JobTable, job_table_bytes

ROWS = 5


@pytest.fixture
def buffer():
    return bytearray(job_table_bytes(ROWS))


@pytest.fixture
def table(buffer):
    return JobTable.create(buffer, ROWS)


def row(job, **changes):
    return JobRow(job, JobKind.LOAD, 0, 3, 4, 0, 2, 0, 7, 1 << 50, 9, (1 << 64) - 1, 1)._replace(**changes)


def test_rows_arrive_once_and_in_order_around_the_ring(table, buffer):
    other = JobTable(buffer)
    for first in range(1, 40, 3):
        rows = [row(job) for job in range(first, first + 3)]
        assert table.order(rows)
        assert other.take() == rows
        assert other.take() == []


def test_a_full_table_takes_all_rows_or_none(table):
    assert table.order([row(1), row(2), row(3)])
    assert not table.order([row(4), row(5), row(6)])
    assert table.order([row(4), row(5)])
    assert [one.job for one in table.take()] == [1, 2, 3, 4, 5]
    assert table.order([row(6)])


@pytest.mark.parametrize("word", range(14))
def test_a_row_that_is_not_visible_whole_is_taken_later(table, buffer, word):
    """A reader may see the count before a word of the row, as on processors that reorder writes."""
    table.order([row(1)])
    at = 64 + 8 * word
    written, buffer[at : at + 8] = bytes(buffer[at : at + 8]), b"\xee" * 8
    assert table.take() == []
    buffer[at : at + 8] = written
    assert table.take() == [row(1)]


def test_ends_are_kept_for_every_job_in_flight(table):
    for job in range(1, 3 * MAX_JOBS):
        table.end(job << 32, is_done=job % 2 == 1)
    last = table.num_ended
    assert table.ends_from(last - MAX_JOBS) == [
        (job << 32, job % 2 == 1) for job in range(last - MAX_JOBS + 1, last + 1)
    ]
    with pytest.raises(FailedPrecondition, match="new engine life"):
        table.ends_from(0)


def test_the_life_is_that_of_the_movers(table, buffer):
    assert table.life == 0
    JobTable(buffer).begin_life(8)
    assert table.life == 8


@pytest.mark.parametrize("bad", [b"", bytes(64), b"kvpjobs\0" + bytes(100), b"kvpjobs\0\1\0\0\0\xff\0\0\0" + bytes(64)])
def test_a_buffer_without_a_table_is_refused(bad):
    with pytest.raises(InvalidArgument, match="no job table"):
        JobTable(bytearray(bad))


@pytest.mark.parametrize("rows", [0, ROWS + 1])
def test_a_table_that_does_not_fit_is_refused(buffer, rows):
    with pytest.raises(InvalidArgument) as refused:
        JobTable.create(buffer, rows)
    assert refused.value.field == "num_rows"
