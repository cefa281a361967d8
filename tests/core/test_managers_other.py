"""R-SWA, ring buffers, cross attention and sinks."""

from __future__ import annotations

import pytest

from kvplane.base.groups import MambaMode
from kvplane.base.step import RowFlag
from tests.core.builders import (
    GRANTED,
    NEVER_FITS,
    REFUSED,
    Engine,
    cross,
    full,
    prompt_and_window,
    ring,
    sinks,
    state,
)


def held(engine, slot, group=0):
    return "".join("." if block == 0 else "x" for block in engine.table(slot, group))


# -- R-SWA: the prompt and a window over what was generated ------------------------------------------------------------


def test_only_the_gap_between_prompt_and_window_is_given_back():
    """Prompt of 6 tokens (blocks 0 and 1), window 4. With 17 computed tokens the window starts at 13, in block 3."""
    engine = Engine(prompt_and_window(4))
    engine.admit(0, "aaaabb")
    for _ in range(11):
        engine.run(0, text="c")
    assert (engine.computed(0), held(engine, 0)) == (17, "xx.xx")
    engine.run(0, text="c")
    assert held(engine, 0) == "xx.xx", "17 - 4 = 13: block 3 still has token 13"
    for _ in range(4):
        engine.run(0, text="c")
    assert held(engine, 0) == "xx..xx"


def test_a_request_holds_its_prompt_and_a_window_however_long_it_runs():
    engine = Engine(prompt_and_window(4), num_blocks=8)
    engine.admit(0, "aaaabb")
    for _ in range(60):
        assert engine.run(0, text="c").granted == [1]
    assert engine.num_free >= 3


def test_the_prefill_gives_nothing_back():
    engine = Engine(prompt_and_window(4))
    engine.admit(0, "a" * 20, cap=12)
    engine.run(0)
    assert held(engine, 0) == "xxxxx"


def test_it_is_looked_up_like_full_attention():
    engine = Engine(prompt_and_window(4))
    engine.serve(0, "aaaabbbbccccd")
    assert engine.would_hit("aaaabbbbccccd").num_tokens == 12


# -- ring: one block per request, overwritten in place -----------------------------------------------------------------


def test_a_ring_is_one_block_for_life():
    engine = Engine(full(), ring())
    admitted = engine.admit(0, "aaaabb")
    assert [len(table) for table in admitted.table] == [2, 1]
    for _ in range(20):
        engine.run(0, text="b")
    assert engine.table(0, 1) == admitted.table[1]
    engine.end(0)
    assert engine.num_free == 100


def test_a_ring_is_never_cached_nor_part_of_a_hit():
    engine = Engine(full(), ring())
    first = engine.serve(0, "aaaabbbbc")
    again = engine.admit(1, "aaaabbbbc")
    assert again.hit == 8
    assert again.table[0][:2] == first.table[0][:2]
    assert len(again.new[1]) == 1
    assert {engine.pool.key[block].group for block in engine.keyed()} == {0}


def test_a_ring_serves_tokens_from_outside_too():
    engine = Engine(full(), ring())
    admitted = engine.admit(0, "aaaabbbbc", external=8)
    assert [len(table) for table in admitted.table] == [3, 1]


def test_a_ring_counts_as_one_block_when_there_are_few():
    assert Engine(full(), ring(), num_blocks=4).admit(0, "aaaabbbb").status is GRANTED
    engine = Engine(full(), ring(), num_blocks=4)
    assert engine.admit(0, "aaaabbbbc").status is NEVER_FITS


# -- cross attention: blocks by encoder tokens, once -------------------------------------------------------------------


def test_cross_attention_blocks_follow_the_encoder_and_stay():
    engine = Engine(full(), cross(), enable_caching=False)
    admitted = engine.admit(0, "aa", encoder_tokens=9)
    assert [len(table) for table in admitted.table] == [1, 3]
    for _ in range(20):
        engine.run(0, text="a")
    assert engine.table(0, 1) == admitted.table[1]
    engine.end(0)
    assert engine.num_free == 100


def test_without_an_encoder_there_are_none():
    engine = Engine(full(), cross(), enable_caching=False)
    assert engine.admit(0, "aa").table[1] == []


def test_the_encoder_counts_when_blocks_are_few():
    engine = Engine(full(), cross(), num_blocks=4, enable_caching=False)
    assert engine.admit(0, "aa", encoder_tokens=8).status is GRANTED
    engine.end(0)
    assert engine.admit(1, "aa", encoder_tokens=9).status is NEVER_FITS
    engine.admit(2, "z")
    assert engine.admit(3, "aa", encoder_tokens=8).status is REFUSED


def test_encoder_blocks_count_in_the_full_sequence_check():
    engine = Engine(full(), cross(), num_blocks=5, enable_caching=False)
    assert engine.admit(0, "a" * 12, encoder_tokens=4, cap=1, flags=RowFlag.FULL_FIT).status is GRANTED
    engine.end(0)
    assert engine.admit(1, "a" * 12, encoder_tokens=5, cap=1, flags=RowFlag.FULL_FIT).status is NEVER_FITS


# -- sinks: full attention, and blocks that the group holds permanently ------------------------------------------------


def test_sink_blocks_are_held_for_the_life_of_the_pool():
    engine = Engine(sinks(8), num_blocks=10)
    assert engine.pool.reserved == [1, 2]
    assert engine.num_free == 7
    assert engine.admit(0, "aaaabbbbc").table == [[3, 4, 5]], "no table has them"
    engine.end(0)
    assert engine.num_free == 7


def test_with_sink_blocks_it_is_full_attention():
    engine = Engine(sinks(8), num_blocks=10)
    engine.serve(0, "aaaabbbbc")
    assert engine.would_hit("aaaabbbbc").num_tokens == 8


def test_sinks_are_neither_lost_by_a_reset_nor_by_a_new_epoch():
    engine = Engine(sinks(8), num_blocks=10)
    engine.serve(0, "aaaabbbbc")
    assert engine.cache(reset=True).reset_done
    engine.replica.begin_epoch(1)
    engine.seq = 0
    assert engine.idle().free_blocks == 7


def test_a_request_never_fits_into_what_sinks_leave():
    engine = Engine(sinks(8), num_blocks=10)
    assert engine.admit(0, "a" * 28).status is GRANTED
    engine.end(0)
    assert engine.admit(0, "a" * 29).status is NEVER_FITS


# -- recurrent state without caching: one block for the longest request ------------------------------------------------


@pytest.mark.parametrize(("drafts", "blocks"), [(0, 1), (2, 3)])
def test_uncached_state_is_one_block_and_one_per_draft(drafts, blocks):
    uncached = state(64, mamba_mode=MambaMode.NONE, speculative_blocks=drafts)
    engine = Engine(uncached, full(), max_model_len=64, enable_caching=False, scheduler_block_size=4)
    admitted = engine.admit(0, "aaaabb")
    assert [len(table) for table in admitted.table] == [blocks, 2]
    for _ in range(30):
        assert engine.run(0, text="b").granted == [1]
    assert engine.table(0) == admitted.table[0]
