"""The rows of a step that is applied row by row, and the part of a step that they make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import NamedTuple, TypeVar

from kvplane.base.sections import AdmitRow
from kvplane.base.step import (
    UNCHANGED,
    Admit,
    Cache,
    End,
    Facts,
    News,
    OnRefusal,
    Part,
    RowFlag,
    Run,
)

FactsRow = tuple[int, int, int, Sequence[bytes], int, int, End, int, int]  # an `Update`
_S = TypeVar("_S", Run, Admit)
_ADMIT_COLUMNS = AdmitRow._fields[1:]


class RunRow(NamedTuple):
    """A row of a running request, see `Run`."""

    slot: int
    extra: int = 0
    lookahead: int = 0
    in_flight: int = -1
    flags: int = 0
    reserved: int = 0


def admit_rows(section: Admit) -> Iterator[AdmitRow]:
    """Yield the rows of a section."""
    defaults = AdmitRow._field_defaults
    columns = [getattr(section, name) or repeat(defaults[name]) for name in _ADMIT_COLUMNS]
    return map(AdmitRow._make, zip(section.slot, *columns, strict=False))


class PartRows:
    """The rows of one part, by section."""

    __slots__ = ("admits", "cache", "facts", "news", "runs")

    def __init__(self) -> None:
        self.facts: list[FactsRow] = []
        self.cache: Cache | None = None
        self.news: list[News] = []
        self.runs: list[RunRow] = []
        self.admits: list[AdmitRow] = []

    def __bool__(self) -> bool:
        return bool(self.facts or self.cache or self.news or self.runs or self.admits)

    def part(self) -> Part:
        """Return the rows as a part: columns without entries where all rows have the default."""
        return Part(
            facts=facts_section(self.facts),
            cache=self.cache or Cache(),
            news=news_section(self.news),
            run=run_section(self.runs),
            admit=admit_section(self.admits),
        )


def _column(entries: Sequence[int], default: int) -> list[int]:
    """Return the entries as a column of a section; an empty column if every entry is the default."""
    return [] if entries.count(default) == len(entries) else list(entries)


def facts_section(updates: Sequence[FactsRow]) -> Facts:
    """Return rows of facts as a section."""
    if not updates:
        return Facts()
    slot, computed, appended, digests, commit, release_skipped, end, fence, hint = zip(*updates, strict=True)
    return Facts(
        slot=list(slot),
        computed=_column(computed, UNCHANGED),
        appended=_column(appended, 0),
        num_hashes=[len(one) for one in digests] if any(digests) else [],
        hashes=b"".join([digest for one in digests for digest in one]),
        commit=_column(commit, UNCHANGED),
        end=_column(end, End.NONE),
        fence=_column(fence, 0),
        release_skipped=_column(release_skipped, UNCHANGED),
        hint=_column(hint, UNCHANGED),
    )


def run_section(rows: Sequence[RunRow]) -> Run:
    """Return rows of running requests as a section. A refused row changes nothing."""
    return _filled(Run(on_refusal=OnRefusal.SKIP), rows)


def admit_section(rows: Sequence[AdmitRow]) -> Admit:
    """Return rows of waiting requests as a section."""
    return _filled(Admit(on_refusal=OnRefusal.SKIP), rows)


def _filled(section: _S, rows: Sequence[RunRow] | Sequence[AdmitRow]) -> _S:
    """Return the section with these rows: columns without entries where all rows have the default."""
    if rows:
        section.slot, *columns = map(list, zip(*rows, strict=True))
        for name, column in zip(rows[0]._fields[1:], columns, strict=True):
            setattr(section, name, _column(column, rows[0]._field_defaults[name]))
    return section


def news_section(rows: Sequence[News]) -> News:
    """Return one section with all rows; a column that only some rows have gets its default in the other rows."""
    if len(rows) < 2:
        return rows[0] if rows else News()
    merged = News(
        [row.slot[0] for row in rows],
        [row.num_tokens[0] for row in rows],
        num_hashes=[row.num_hashes[0] for row in rows],
        hashes=b"".join([row.hashes for row in rows]),
    )
    for name in ("request_id", "domain", "traceparent", "skip_reading", "max_tokens", "hint", "waited"):
        entries = [getattr(row, name) for row in rows]
        if any(entries):
            default = type(next(entry[0] for entry in entries if entry))()
            setattr(merged, name, [entry[0] if entry else default for entry in entries])
    return merged


class Update(NamedTuple):
    """One row of `Facts`: changes of one request, applied in the order of these fields.

    `digests` are the hashes of the blocks that became full.
    """

    slot: int
    computed: int = UNCHANGED
    appended: int = 0
    digests: Sequence[bytes] = ()
    commit: int = UNCHANGED
    release_skipped: int = UNCHANGED
    end: End = End.NONE
    fence: int = 0
    hint: int = UNCHANGED


UNALIGNED, DELAY_CACHING, FULL_FIT = int(RowFlag.UNALIGNED), int(RowFlag.DELAY_CACHING), int(RowFlag.FULL_FIT)


# Options of one admission: the entries of its row, of which the call itself gives slot, extra, expected_hit, min_new.
AdmitTerms = partial(AdmitRow, 0)


NO_TERMS = AdmitTerms()


def row_of(slot: int, num_hit: int, num_new: int, terms: AdmitRow, num_tokens: int, flags: int) -> AdmitRow:
    """Return the row of an admission of a request of `num_tokens` tokens; `flags` are set with those of `terms`."""
    return terms._replace(
        slot=slot,
        extra=num_hit + terms.external + num_new - num_tokens,
        expected_hit=num_hit,
        watermark=int(terms.watermark),
        flags=int(terms.flags) | flags,
        min_new=0,
    )
