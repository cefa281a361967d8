"""Parts built row by row."""

from __future__ import annotations

from kvplane.base.step import UNLIMITED, Budget, Cache, End, ExtraKeys, Part, RowFlag
from kvplane.session.rows import AdmitRow, FactRow, NewsRow, PeekRow, RunRow, part_of


def test_part_of_no_rows_is_the_empty_part():
    assert part_of() == Part()


def test_rows_are_added_to_their_sections_in_order():
    part = part_of(PeekRow(4), AdmitRow(3), FactRow(1), RunRow(2), NewsRow(3, [7, 8]), RunRow(1), PeekRow(5))
    assert part.facts.slot == [1]
    assert part.news.slot == [3]
    assert part.run.slot == [2, 1]
    assert part.admit.slot == [3]
    assert part.peek.slot == [4, 5]


def test_a_peek_row_has_its_limit():
    part = part_of(PeekRow(4, limit=32), PeekRow(5))
    assert (part.peek.slot, part.peek.limit) == ([4, 5], [32, UNLIMITED])


def test_a_column_of_defaults_is_omitted():
    part = part_of(RunRow(1), RunRow(2), AdmitRow(3), AdmitRow(4))
    assert (part.run.cap, part.run.flags, part.admit.external, part.admit.expected_hit) == ([], [], [], [])


def test_a_column_has_all_rows_when_one_row_differs():
    part = part_of(RunRow(1), RunRow(2, cap=9), AdmitRow(3, flags=RowFlag.UNALIGNED), AdmitRow(4))
    assert part.run.cap == [UNLIMITED, 9]
    assert part.admit.flags == [RowFlag.UNALIGNED, RowFlag.NONE]


def test_rows_count_their_tokens():
    part = part_of(FactRow(1, tokens=[5]), FactRow(2, end=End.FREE), NewsRow(3, [6, 7]), NewsRow(4, [8]))
    assert (part.facts.appended, part.facts.tokens, part.facts.end) == ([1, 0], [5], [End.NONE, End.FREE])
    assert (part.news.num_tokens, part.news.tokens) == ([2, 1], [6, 7, 8])
    assert (part.facts.num_hashes, part.news.num_hashes) == ([], [])


def test_rows_count_their_hashes():
    part = part_of(
        FactRow(1, num_tokens=16, hashes=[b"a" * 32]),
        FactRow(2, num_tokens=1),
        NewsRow(3, num_tokens=40, hashes=[b"b" * 32, b"c" * 32]),
    )
    assert (part.facts.appended, part.facts.num_hashes, part.facts.hashes) == ([16, 1], [1, 0], b"a" * 32)
    assert (part.news.num_tokens, part.news.num_hashes) == ([40], [2])
    assert part.news.hashes == b"b" * 32 + b"c" * 32


def test_texts_and_extra_keys_are_columns():
    keys = ExtraKeys(salt="s")
    part = part_of(NewsRow(1, [1], domain="a", extra_keys=keys, skip_reading=True), NewsRow(2, [1]))
    assert part.news.domain == ["a", ""]
    assert part.news.extra_keys == [keys, ExtraKeys()]
    assert part.news.skip_reading == [True, False]
    assert part.news.request_id == []


def test_budget_and_cache_are_passed_on():
    part = part_of(budget=Budget(tokens=5), cache=Cache(evicted=[3]))
    assert (part.budget, part.cache) == (Budget(tokens=5), Cache(evicted=[3]))
