"""Parts built from rows, one object per row: easy to read, for small engines and for tests.

    part_of(NewsRow(slot=0, tokens=prompt), AdmitRow(slot=0))
    part_of(FactRow(slot=0, tokens=[42]), RunRow(slot=0), budget=Budget(tokens=8192))

Each row takes about a microsecond. An engine with hundreds of rows per step uses `kvplane.session.builder`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from typing import TypeAlias

from kvplane.base.sections import Prefetch
from kvplane.base.step import (
    NO_EXTRA_KEYS,
    UNCHANGED,
    Admit,
    Budget,
    Cache,
    End,
    ExtraKeys,
    Facts,
    News,
    Part,
    Peek,
    Resume,
    Run,
)
from kvplane.base.typed import check
from kvplane.session.section_rows import AdmitRow as AdmitRow
from kvplane.session.section_rows import PeekRow as PeekRow
from kvplane.session.section_rows import PrefetchRow as PrefetchRow
from kvplane.session.section_rows import Row as Row
from kvplane.session.section_rows import RunRow as RunRow


@dataclass(frozen=True, slots=True)
class FactRow(Row):
    """A row of the facts section: what happened to one request since the last step. For the attributes see `Facts`.

    Appended tokens are given as `tokens`, or as `num_tokens` and the `hashes` of the blocks that became full.
    """

    tokens: Sequence[int] = ()
    num_tokens: int = 0
    hashes: Sequence[bytes] = ()
    computed: int = UNCHANGED
    commit: int = UNCHANGED
    end: End = End.NONE
    fence: int = 0
    hint: int = UNCHANGED


@dataclass(frozen=True, slots=True)
class NewsRow(Row):
    """A row of the news section: one new request. For the attributes see `News`.

    Its prompt is given as `tokens`, or as `num_tokens` and the `hashes` of its full blocks.
    """

    tokens: Sequence[int] = ()
    num_tokens: int = 0
    hashes: Sequence[bytes] = ()
    request_id: str = ""
    domain: str = ""
    extra_keys: ExtraKeys = NO_EXTRA_KEYS
    skip_reading: bool = False
    max_tokens: int = 0
    traceparent: str = ""
    hint: int = 0
    waited: int = 0


@dataclass(frozen=True, slots=True)
class ResumeRow(Row):
    """A row of the image (see `Resume`): one request that continues with its blocks. For the other attributes see
    `Resume`.

    Attributes:
        tables: block ids of each group, as in `BlockTables`.
        launch_end: number of tokens after the last launch; None = `computed`.
        loading: 1 or True = a load, a transfer from outside, may still write the request's pages; list their blocks in
            `Revival.busy_blocks` too. 2 = the load is over, and the request has been granted no tokens since.
    """

    computed: int
    tables: Sequence[Sequence[int]]
    num_prompt: int
    launch_end: int | None = None
    single_group_hit: int = 0
    loading: int = 0


AnyRow: TypeAlias = FactRow | NewsRow | RunRow | AdmitRow | PeekRow | PrefetchRow
CONTENT = {"tokens", "num_tokens", "hashes"}  # attributes of rows that become several columns


def part_of(*rows: Row, budget: Budget | None = None, cache: Cache | None = None) -> Part:
    """Return a part with these rows, each in its section, in the given order.

    Raises InvalidArgument for a value of a wrong type; its field names the row and the attribute.
    """
    try:
        return _part_of(rows, budget, cache)
    except (AttributeError, TypeError, ValueError):
        for at, row in enumerate(rows):
            check(row, type(row), f"rows[{at}]")
        raise


def _part_of(rows: Sequence[Row], budget: Budget | None, cache: Cache | None) -> Part:
    for at, row in enumerate(rows):
        if not isinstance(row, AnyRow):
            check(row, AnyRow, f"rows[{at}]")
    part = Part(budget=budget or Budget(), cache=cache or Cache())
    facts = [row for row in rows if isinstance(row, FactRow)]
    news = [row for row in rows if isinstance(row, NewsRow)]
    _fill(part.facts, facts)
    part.facts.appended = _fill_content(part.facts, facts)
    _fill(part.news, news)
    part.news.num_tokens = _fill_content(part.news, news)
    _fill(part.run, [row for row in rows if isinstance(row, RunRow)])
    _fill(part.admit, [row for row in rows if isinstance(row, AdmitRow)])
    _fill(part.peek, [row for row in rows if isinstance(row, PeekRow)])
    _fill(part.prefetch, [row for row in rows if isinstance(row, PrefetchRow)])
    return part


def resume_of(rows: Sequence[ResumeRow]) -> Resume:
    """Return the image (see `Resume`) of these requests. Blocks that are in none of the tables are free."""
    tables = [table for row in rows for table in row.tables]
    return Resume(
        slot=[row.slot for row in rows],
        computed=[row.computed for row in rows],
        launch_end=[row.computed if row.launch_end is None else row.launch_end for row in rows],
        num_prompt=[row.num_prompt for row in rows],
        single_group_hit=[row.single_group_hit for row in rows],
        loading=[int(row.loading) for row in rows],
        num_blocks=[len(table) for table in tables],
        blocks=[block for table in tables for block in table],
    )


def _fill(section: Facts | News | Run | Admit | Peek | Prefetch, rows: Sequence[Row]) -> None:
    """Set each column of a section for which at least one row has a value other than the default."""
    if not rows:
        return
    for column in fields(rows[0]):
        if column.name in CONTENT:
            continue
        values = [getattr(row, column.name) for row in rows]
        if column.default is MISSING or any(value != column.default for value in values):
            setattr(section, column.name, values)


def _fill_content(section: Facts | News, rows: Sequence[FactRow] | Sequence[NewsRow]) -> list[int]:
    """Set the tokens and hashes of a section, and return its column of token counts."""
    section.tokens = [token for row in rows for token in row.tokens]
    section.hashes = b"".join(digest for row in rows for digest in row.hashes)
    if section.hashes:
        section.num_hashes = [len(row.hashes) for row in rows]
    return [len(row.tokens) or row.num_tokens for row in rows]
