"""Records of the job table from rows, as tests write them."""

from __future__ import annotations

from collections.abc import Sequence

from kvplane.base.job_table import JobKind, JobRow, JobsEnd, record_of
from kvplane.base.step import LOAD_COLUMNS, MOVE_COLUMNS, SAVE_COLUMNS, Orders


def record(rows: Sequence[JobRow]) -> bytes:
    """The record of these rows, which are of one part."""
    orders, first = Orders(), rows[0]
    for row in rows:
        assert row[2:5] == first[2:5], "rows of another part"
        names: Sequence[str]
        values: Sequence[int]
        if row.kind == JobKind.LOAD:
            names, values = (
                LOAD_COLUMNS,
                (row.job, row.tier, row.slot, row.version, row.block, row.group, row.stamp, row.key),
            )
        elif row.kind == JobKind.SAVE:
            names, values = SAVE_COLUMNS, (row.job, row.block, row.group, row.stamp, row.tier, row.slot, row.key)
        else:
            names, values = MOVE_COLUMNS, (row.job, row.tier, row.slot, row.version, row.block, row.stamp, row.key)
        for name, value in zip(names, values, strict=True):
            getattr(orders, name).append(value)
    return record_of(orders, (first.epoch, first.seq, first.part), {row.job: row.after for row in rows})


def results(ends: Sequence[JobsEnd]) -> dict[int, bool]:
    """Whether each job that ended is done."""
    return {job: is_done for first, count, is_done in ends for job in range(first, first + count)}
