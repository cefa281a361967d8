"""The rows of a step that is applied row by row, and the part of a step that they make."""

from __future__ import annotations

from collections.abc import Sequence

from kvplane.base.step import UNCHANGED, Admit, Cache, End, Facts, News, OnRefusal, Part, Run

FactsRow = tuple[int, int, int, Sequence[bytes], int, int, End, int]  # an `Update`
RunRow = tuple[int, int, int, int, int, int]  # slot, extra, lookahead, in_flight, flags, reserved


class PartRows:
    """The rows of one part, by section."""

    __slots__ = ("admits", "cache", "facts", "news", "runs")

    def __init__(self) -> None:
        self.facts: list[FactsRow] = []
        self.cache: Cache | None = None
        self.news: list[News] = []
        self.runs: list[RunRow] = []
        self.admits: list[Admit] = []

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
    slot, computed, appended, digests, commit, release_skipped, end, fence = zip(*updates, strict=True)
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
    )


def run_section(rows: Sequence[RunRow]) -> Run:
    """Return rows of running requests as a section. A refused row changes nothing."""
    if not rows:
        return Run(on_refusal=OnRefusal.SKIP)
    slot, extra, lookahead, in_flight, flags, reserved = zip(*rows, strict=True)
    return Run(
        list(slot),
        extra=_column(extra, 0),
        lookahead=_column(lookahead, 0),
        in_flight=_column(in_flight, -1),
        flags=_column(flags, 0),
        on_refusal=OnRefusal.SKIP,
        reserved=_column(reserved, 0),
    )


def admit_section(rows: Sequence[Admit]) -> Admit:
    """Return one section with the rows of sections of one row each."""
    merged = Admit(on_refusal=OnRefusal.SKIP)
    for name in ("slot", "extra", "lookahead", "external", "expected_hit", "encoder_tokens", "reserved", "watermark"):
        setattr(merged, name, [getattr(row, name)[0] for row in rows])
    for name in ("hit_limit", "min_new", "flags", "skip_zero_groups", "single_group_hit"):
        setattr(merged, name, [getattr(row, name)[0] for row in rows])
    return merged


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
    for name in ("request_id", "domain", "traceparent", "skip_reading", "max_tokens"):
        entries = [getattr(row, name) for row in rows]
        if any(entries):
            default = type(next(entry[0] for entry in entries if entry))()
            setattr(merged, name, [entry[0] if entry else default for entry in entries])
    return merged
