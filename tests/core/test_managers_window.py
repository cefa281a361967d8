"""Sliding window attention: blocks outside the window are freed, and a hit needs only the window before its end.

Window 4: token t attends to t - 3 .. t, so when 7 tokens are computed the next one needs 4..6 and block 0 may go.

    0 1 2 3 | 4 5 6 [7]
    skipped   window
"""

from __future__ import annotations

import pytest

from kvplane.base.groups import GroupKind, GroupSpec
from kvplane.base.step import RowFlag
from tests.core.builders import GRANTED, NEVER_FITS, REFUSED, Engine, find_in, full, window

KINDS = [GroupKind.SLIDING_WINDOW, GroupKind.SLIDING_WINDOW_MLA]


def run_to(engine, slot, num_tokens):
    """Decode until `num_tokens` are computed."""
    while engine.computed(slot) < num_tokens:
        engine.run(slot, text="x")


# -- giving back -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_window_attention_frees_a_block_without_a_token_in_the_window(kind):
    engine = Engine(GroupSpec(kind, 4, window=4))
    engine.admit(0, "aaaabb")
    run_to(engine, 0, 7)
    assert engine.table(0) == [1, 2], "decided before token 6 was computed"
    run_to(engine, 0, 8)
    assert engine.table(0) == [0, 2]
    run_to(engine, 0, 11)
    assert engine.table(0) == [0, 2, 3]
    run_to(engine, 0, 13)
    assert engine.table(0) == [0, 0, 3, 4]


def test_window_attention_frees_blocks_during_a_prefill():
    engine = Engine(window(4), num_blocks=6)
    engine.admit(0, "aaaabbbbccccddddeeee", cap=8)
    assert engine.run(0, cap=8).granted == [8]
    assert engine.table(0)[0] == 0
    assert len(engine.table(0)) == 4
    assert engine.run(0, cap=4).granted == [4]
    assert [block != 0 for block in engine.table(0)] == [False, False, False, True, True]


def test_a_window_of_one_token_needs_only_the_block_being_written():
    engine = Engine(window(1))
    engine.admit(0, "aaaa")
    run_to(engine, 0, 9)
    assert [block != 0 for block in engine.table(0)] == [False, False, True]


def test_window_attention_frees_each_block_once():
    """The table keeps nulls in their place, and running on releases nothing twice (references would go below 0)."""
    engine = Engine(window(4), full())
    engine.admit(0, "aaaa")
    run_to(engine, 0, 30)
    assert engine.table(0)[:6] == [0] * 6
    assert engine.num_free == 100 - 8 - 2


def test_a_request_that_ends_frees_its_window_and_not_the_nulls_before_it():
    engine = Engine(window(4), num_blocks=8, enable_caching=False)
    engine.admit(0, "a" * 16)
    run_to(engine, 0, 18)
    null, *_, last, running = engine.table(0)
    assert (null, engine.table(0).count(0)) == (0, 3)
    before = engine.num_free
    engine.end(0)
    assert engine.num_free == before + 2 == 7
    assert engine.free_order[:2] == [running, last]
    assert 0 not in engine.free_order


def test_blocks_that_leave_the_window_together_are_freed_tail_first():
    engine = Engine(window(4), num_blocks=20, enable_caching=False)
    engine.admit(0, "a" * 16)
    engine.run(0, text="b")
    assert engine.table(0) == [0, 0, 0, 4, 3], "blocks 3, 2, 1 came back in this order, and the first was taken again"
    assert engine.free_order[:2] == [2, 1]


def test_window_attention_keeps_blocks_of_tokens_in_flight():
    """Steps that were sent but not executed still read it: the window is counted from what is processed."""
    engine = Engine(window(4))
    engine.admit(0, "aaaabbb")
    engine.executed = 0
    engine.run(0, text="b")
    assert engine.table(0)[0] == 1, "all 7 tokens are still in flight"
    engine.executed = 1
    engine.run(0, text="c")
    assert engine.table(0)[0] == 0


def test_window_attention_uses_the_tokens_in_flight_stated_by_the_engine():
    engine = Engine(window(4))
    engine.admit(0, "aaaabbb")
    engine.run(0, text="b", in_flight=7)
    assert engine.table(0)[0] == 1
    engine.run(0, text="c", in_flight=0)
    assert engine.table(0)[0] == 0


def test_tokens_retained_for_a_prefill_that_looks_ahead_shift_the_window():
    engine = Engine(window(4, extra_retained_tokens=2))
    engine.admit(0, "aaaabb")
    run_to(engine, 0, 9)
    assert engine.table(0)[0] == 1
    run_to(engine, 0, 10)
    assert engine.table(0)[0] == 0


def test_a_refused_row_releases_blocks_outside_its_window():
    """No row reads blocks outside the window: they are released even if the call fails (as in the reference)."""
    engine = Engine(full(), window(4), num_blocks=8)
    engine.admit(0, "aaaabbbb")
    engine.admit(1, "zzzz")
    assert engine.num_free == 1
    assert engine.extend(0, "ccccdddd").granted == [0]
    assert engine.table(0, 1)[0] == 0
    assert engine.num_free == 2


# -- what a request holds at most --------------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_pool_is_admitted_when_its_window_fits():
    """With a cap, the full-sequence check counts what the window holds at once, not the whole sequence."""
    capped = window(4, admission_cap_blocks=4)
    fits = {"cap": 8, "flags": RowFlag.FULL_FIT}
    assert Engine(capped, num_blocks=6).admit(0, "a" * 100, **fits).status is GRANTED
    assert Engine(window(4), num_blocks=6).admit(0, "a" * 100, **fits).status is NEVER_FITS


def test_a_window_cap_above_the_free_blocks_is_refused_and_not_never_fits():
    engine = Engine(window(4, admission_cap_blocks=4), num_blocks=6)
    engine.admit(0, "zzzzyyyy")
    assert engine.admit(1, "a" * 100, cap=8, flags=RowFlag.FULL_FIT).status is REFUSED


# -- finding -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cached", "found"),
    [
        ("....", ""),
        ("xxxx", "00xx"),  # window 8 = two blocks before the next token
        ("..xx", "00xx"),
        ("xxx.", "0xx"),
        ("xx.x", "xx"),
        ("x.x.", "x"),  # a run from block 0 counts at any length
        ("x..x", "x"),
        (".x..", ""),
        (".x.x", ""),
        ("xx..", "xx"),
        (".xx.", "0xx"),
        ("x.xx", "00xx"),
    ],
)
def test_a_window_hit_is_the_last_run_of_blocks_that_fills_the_window(cached, found):
    assert find_in(window(8), cached) == found


@pytest.mark.parametrize(
    ("tokens", "needed"),
    [(1, 0), (2, 1), (4, 1), (5, 1), (6, 2), (9, 2), (10, 3)],
)
def test_number_of_blocks_that_a_window_reaches_back(tokens, needed):
    """A window of w tokens reaches w - 1 back, so ceil((w - 1) / 4) blocks before an aligned position."""
    expected = "00000" + "x" * 5
    found = find_in(window(tokens), "xxxxx")
    assert found == expected[max(needed, 1) : max(needed, 1) + 5], "a window of 1 still asks for the last block"


@pytest.mark.parametrize(
    ("cached", "found"),
    [("xxxx", "0xx"), ("xxx.", "xx"), ("xx..", "x"), ("x...", ""), (".xx.", ""), (".xxx", "0xx"), ("x.xx", "")],
)
def test_a_dropping_window_needs_one_block_more_and_hits_one_less(cached, found):
    assert find_in(window(8), cached, drops_last_block=True) == found


def test_a_window_hit_ends_at_a_boundary_common_to_all_groups():
    """Hits are multiples of 8 tokens here, blocks have 4."""
    assert find_in(window(8), "xxx.", scheduler_block_size=8) == "xx"
    assert find_in(window(8), ".xx.", scheduler_block_size=8) == "", "a run of two that ends at 12 is of no use"
    assert find_in(window(4), ".x.x", scheduler_block_size=8) == "000x"
    assert find_in(window(4), ".xx.", scheduler_block_size=8) == "0x"


def test_a_window_hit_is_searched_below_the_cap():
    assert find_in(window(8), "xxxx", max_tokens=15) == "0xx"
    assert find_in(window(8), "xxxx", max_tokens=3) == ""


def test_a_window_hit_shortened_by_another_group_keeps_its_null_blocks():
    """The window has 16 tokens as two nulls and two blocks; cut to the 12 of full attention, as one and two."""
    engine = Engine(window(8), full())
    tables = engine.serve(0, "a" * 17).table
    assert engine.would_hit("a" * 17).blocks[0] == [0, 0, *tables[0][2:4]]
    engine.cache(evicted=[tables[1][3]])
    assert engine.would_hit("a" * 17).blocks == ([0, *tables[0][1:3]], tables[1][:3])
    again = engine.admit(1, "a" * 17)
    assert again.hit == 12
    assert again.table[0][:3] == [0, *tables[0][1:3]]


def test_an_adopted_window_starts_with_null_blocks():
    engine = Engine(window(8))
    first = engine.serve(0, "aaaabbbbccccd").table[0]
    again = engine.admit(1, "aaaabbbbccccd")
    assert again.hit == 12
    assert again.table == [[0, first[1], first[2], *again.new[0]]]
