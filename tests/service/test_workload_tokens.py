"""Tokens of a workload: equal for equal texts, different everywhere else."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.base.hashing import unpack_tokens
from kvplane_tools.replay.workloads.requests import POSITIONS, Span, TokenSource, text_of_ids

places = st.integers(0, 5_000)


def tokens(*spans: Span) -> list[int]:
    return unpack_tokens(TokenSource(spans).packed())


def test_a_token_contains_its_stream_and_position() -> None:
    assert tokens(Span(7, 0, 5)) == [0, 2**30 + 7, 2, 2**30 + 7, 4]
    assert tokens(Span(7, 3, 6, generated=True)) == [2**31 + 2**30 + 7, 2**31 + 4, 2**31 + 2**30 + 7]


@given(places, places, places, st.booleans())
def test_a_token_depends_on_its_position_and_not_on_the_slice(a: int, b: int, c: int, generated: bool) -> None:
    start, cut, stop = sorted((a, b, c))
    whole = tokens(Span(3, start, stop, generated))
    assert len(whole) == stop - start
    assert whole == tokens(Span(3, start, cut, generated), Span(3, cut, stop, generated))


def test_tokens_of_the_last_positions_and_streams_fit_32_bits() -> None:
    last = Span(2**30 - 1, POSITIONS - 3, POSITIONS, generated=True)
    assert tokens(last) == [2**32 - 1, 2**31 + POSITIONS - 2, 2**32 - 1]


def test_token_pairs_occur_in_one_stream_at_one_position_only() -> None:
    spans = [Span(stream, 0, 64, generated) for stream in range(8) for generated in (False, True)]
    pairs = [pair for span in spans for pair in pairwise(tokens(span))]
    assert len(set(pairs)) == len(pairs) == 16 * 63


ids_lists = st.lists(st.integers(0, 40) | st.integers(0, 2**20), min_size=1, max_size=30)


@given(ids_lists, st.integers(1, 12), st.data())
def test_equal_ids_have_equal_tokens_among_any_others(ids: list[int], tokens_per_id: int, data: st.DataObject) -> None:
    missing = data.draw(st.integers(0, tokens_per_id - 1))
    length = len(ids) * tokens_per_id - missing
    piece_by_piece = [token for h in ids for token in tokens(Span(5, h * tokens_per_id, (h + 1) * tokens_per_id))]
    text = text_of_ids(ids, tokens_per_id, length, stream=5)
    assert len(text) == length
    assert unpack_tokens(text.packed()) == piece_by_piece[:length]


def test_a_run_of_ids_is_one_slice_of_tokens() -> None:
    assert text_of_ids([4, 5, 6, 9, 10], 512, 2_100).spans == (Span(0, 2048, 3584), Span(0, 4608, 5172))
    assert text_of_ids([], 512, 0) == TokenSource(())


@pytest.mark.parametrize("length", [0, 512, 1025])
def test_a_length_beyond_the_ids_is_an_assertion(length: int) -> None:
    with pytest.raises(AssertionError):
        text_of_ids([1, 2], 512, length)
