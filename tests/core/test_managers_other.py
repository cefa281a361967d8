"""Managers of prompt-and-window attention (R-SWA), ring buffers, cross attention and sinks."""

from __future__ import annotations

import pytest

from kvplane.base.groups import MambaMode
from kvplane.base.step import Facts, Part, RowFlag
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


def test_prompt_and_window_attention_frees_the_blocks_between_them():
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


def test_prompt_and_window_attention_holds_a_bounded_number_of_blocks():
    engine = Engine(prompt_and_window(4), num_blocks=8)
    engine.admit(0, "aaaabb")
    for _ in range(60):
        assert engine.run(0, text="c").granted == [1]
    assert engine.num_free >= 3


def test_prompt_and_window_attention_frees_no_block_of_the_prompt():
    engine = Engine(prompt_and_window(4))
    engine.admit(0, "a" * 20, cap=12)
    engine.run(0)
    assert held(engine, 0) == "xxxxx"


def test_prompt_and_window_attention_is_looked_up_like_full_attention():
    engine = Engine(prompt_and_window(4))
    engine.serve(0, "aaaabbbbccccd")
    assert engine.would_hit("aaaabbbbccccd").num_tokens == 12


def test_prompt_and_window_attention_caches_prompts_only():
    """Generated tokens do not read the gap, so the page of a block behind the prompt is not that of a longer prompt."""
    engine = Engine(prompt_and_window(4))
    engine.admit(0, "aaaabbbbc")
    engine.extend(0, "cccddddeeee")
    engine.end(0)
    assert engine.would_hit("aaaabbbbccccddddeeeef").num_tokens == 8
    engine.serve(1, "aaaabbbbccccddddeeeef")  # a prompt: every token reads all before it
    engine.admit(2, "aaaabbbbc", cap=1)
    engine.extend(2, "cccddddeeee")
    engine.preempt(2)
    assert engine.admit(2).hit == 8, "its tokens behind the prompt read less than those of request 1"


def test_prompt_and_window_attention_keeps_the_gap_while_a_load_writes_it():
    engine = Engine(prompt_and_window(4), num_blocks=9)
    engine.admit(0, "aaaa")
    engine.extend(0, "bbbbccccddddeeee", cap=1)
    engine.preempt(0)
    assert engine.admit(0, external=12, cap=0, flags=RowFlag.DELAY_CACHING).status is GRANTED
    before = engine.table(0)
    engine.step(Part(facts=Facts([0], release_skipped=[16])))
    assert engine.table(0) == before
    engine.step(Part(facts=Facts([0], commit=[16], release_skipped=[16])))
    assert held(engine, 0) == "x..x"


# -- ring: one block per request, overwritten in place -----------------------------------------------------------------


def test_a_ring_has_one_block_while_its_request_runs():
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
    assert engine.keyed() == engine.keyed(group=0) != []


def test_a_ring_has_one_block_for_external_tokens():
    engine = Engine(full(), ring())
    admitted = engine.admit(0, "aaaabbbbc", external=8)
    assert [len(table) for table in admitted.table] == [3, 1]


def test_an_admission_counts_one_block_for_a_ring():
    assert Engine(full(), ring(), num_blocks=4).admit(0, "aaaabbbb").status is GRANTED
    engine = Engine(full(), ring(), num_blocks=4)
    assert engine.admit(0, "aaaabbbbc").status is NEVER_FITS


# -- cross attention: blocks by encoder tokens, once -------------------------------------------------------------------


def test_cross_attention_blocks_cover_the_encoder_tokens():
    engine = Engine(full(), cross(), enable_caching=False)
    admitted = engine.admit(0, "aa", encoder_tokens=9)
    assert [len(table) for table in admitted.table] == [1, 3]
    for _ in range(20):
        engine.run(0, text="a")
    assert engine.table(0, 1) == admitted.table[1]
    engine.end(0)
    assert engine.num_free == 100


def test_cross_attention_without_encoder_tokens_has_no_blocks():
    engine = Engine(full(), cross(), enable_caching=False)
    assert engine.admit(0, "aa").table[1] == []


def test_an_admission_counts_cross_attention_blocks():
    engine = Engine(full(), cross(), num_blocks=4, enable_caching=False)
    assert engine.admit(0, "aa", encoder_tokens=8).status is GRANTED
    engine.end(0)
    assert engine.admit(1, "aa", encoder_tokens=9).status is NEVER_FITS
    engine.admit(2, "z")
    assert engine.admit(3, "aa", encoder_tokens=8).status is REFUSED


def test_full_fit_counts_cross_attention_blocks():
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


def test_sink_attention_is_looked_up_like_full_attention():
    engine = Engine(sinks(8), num_blocks=10)
    engine.serve(0, "aaaabbbbc")
    assert engine.would_hit("aaaabbbbc").num_tokens == 8


def test_reset_and_new_epoch_keep_sink_blocks():
    engine = Engine(sinks(8), num_blocks=10)
    engine.serve(0, "aaaabbbbc")
    assert engine.cache(reset=True).reset_done
    engine.replica.begin_epoch(1)
    engine.seq = 0
    assert engine.idle().free_blocks == 7


def test_a_request_larger_than_the_pool_without_sinks_never_fits():
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


@pytest.mark.parametrize("drafts", [0, 2])
def test_full_fit_of_a_running_row_counts_what_it_lacks(drafts):
    """A running request has its states; those of an admission are not counted again."""
    engine = Engine(state(speculative_blocks=drafts), full(), num_blocks=6 + drafts)
    engine.admit(0, "aaaabb")
    assert engine.run(0, text="b", flags=int(RowFlag.FULL_FIT)).granted == [1]
