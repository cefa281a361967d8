"""Parts built from rows, one object per request: readable, for small engines and for tests.

    part_of(NewsRow(slot=0, tokens=prompt), AdmitRow(slot=0))
    part_of(FactRow(slot=0, tokens=[42]), RunRow(slot=0), budget=Budget(tokens=8192))

Each row costs about a microsecond. An engine with hundreds of rows per step fills the columns of `Part` directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from typing import TypeAlias

from kvplane.base.step import (
    ANY_HIT,
    NO_EXTRA_KEYS,
    UNCHANGED,
    UNLIMITED,
    Admit,
    Budget,
    Cache,
    End,
    ExtraKeys,
    Facts,
    News,
    Part,
    Resume,
    RowFlag,
    Run,
    Watermark,
)
from kvplane.base.typed import check

AS_COUNTED = -1


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a section of a part, for the request in a slot."""

    slot: int


@dataclass(frozen=True, slots=True)
class FactRow(Row):
    """What happened to one request; see `Facts`. Appended tokens are given as ids, or as a count with hashes."""

    tokens: Sequence[int] = ()
    num_tokens: int = 0
    hashes: Sequence[bytes] = ()
    computed: int = UNCHANGED
    commit: int = UNCHANGED
    end: End = End.NONE
    fence: int = 0


@dataclass(frozen=True, slots=True)
class NewsRow(Row):
    """One new request; see `News`. Its prompt is given as token ids, or as a count with hashes."""

    tokens: Sequence[int] = ()
    num_tokens: int = 0
    hashes: Sequence[bytes] = ()
    request_id: str = ""
    domain: str = ""
    extra_keys: ExtraKeys = NO_EXTRA_KEYS
    skip_reading: bool = False
    max_tokens: int = 0
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class ResumeRow(Row):
    """One request that continues with its blocks; see `Resume`.

    Attributes:
        tables: block ids of each group, as in `BlockTables`.
        launch_end: None = `computed`.
        loading: an external load may still write its pages; list them in `Revival.busy_blocks` too.
    """

    computed: int
    tables: Sequence[Sequence[int]]
    num_prompt: int
    launch_end: int | None = None
    single_group_hit: int = 0
    loading: bool = False


@dataclass(frozen=True, slots=True)
class RunRow(Row):
    """One running request; see `Run`."""

    extra: int = 0
    cap: int = UNLIMITED
    lookahead: int = 0
    in_flight: int = AS_COUNTED
    flags: RowFlag = RowFlag.NONE


@dataclass(frozen=True, slots=True)
class AdmitRow(Row):
    """One waiting request; see `Admit`."""

    extra: int = 0
    cap: int = UNLIMITED
    lookahead: int = 0
    external: int = 0
    expected_hit: int = ANY_HIT
    encoder_tokens: int = 0
    reserved: int = 0
    watermark: Watermark = Watermark.AUTO
    flags: RowFlag = RowFlag.NONE


@dataclass(frozen=True, slots=True)
class PeekRow(Row):
    """One look-up; see `Peek`."""


AnyRow: TypeAlias = FactRow | NewsRow | RunRow | AdmitRow | PeekRow
_CONTENT = {"tokens", "num_tokens", "hashes"}


def part_of(*rows: Row, budget: Budget | None = None, cache: Cache | None = None) -> Part:
    """A part with these rows, each in its section, in the given order.

    Raises InvalidArgument for a value of a wrong type; it names the row and the field.
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
    part.peek.slot = [row.slot for row in rows if isinstance(row, PeekRow)]
    return part


def resume_of(rows: Sequence[ResumeRow]) -> Resume:
    """The image of these requests; blocks in no table are free."""
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


def _fill(section: Facts | News | Run | Admit, rows: Sequence[Row]) -> None:
    """Set each column in which a row differs from the default."""
    if not rows:
        return
    for column in fields(rows[0]):
        if column.name in _CONTENT:
            continue
        values = [getattr(row, column.name) for row in rows]
        if column.default is MISSING or any(value != column.default for value in values):
            setattr(section, column.name, values)


def _fill_content(section: Facts | News, rows: Sequence[FactRow] | Sequence[NewsRow]) -> list[int]:
    """Set tokens and hashes; returns the column of token counts."""
    section.tokens = [token for row in rows for token in row.tokens]
    section.hashes = b"".join(digest for row in rows for digest in row.hashes)
    if section.hashes:
        section.num_hashes = [len(row.hashes) for row in rows]
    return [len(row.tokens) or row.num_tokens for row in rows]
