"""Recurrent state (Mamba, linear attention): one block is one state, and only the last state of a request is alive.

A chunk writes its end state into the block of its last token, so the blocks in between stay null:

    tokens    0..3    4..7    8..11      a chunk of 8, then one of 4
    table     null     s0      s1

States at block boundaries stay behind as cached prefixes. A hit needs one of them, whatever is cached before it.
"""

from __future__ import annotations

import pytest

from kvplane.base.groups import AlignSpec, MambaMode
from kvplane.base.step import Budget, Facts, Part, RowFlag
from tests.core.builders import (
    DEFERRED,
    GRANTED,
    NO_ROOM,
    REFERENCE,
    REFUSED,
    SAFE,
    Engine,
    admit_row,
    find_in,
    full,
    run_rows,
    state,
    tokens,
)


def shape(engine, slot=0):
    """The state table, drawn: "." null, "x" a state."""
    return "".join("." if block == 0 else "x" for block in engine.table(slot))


def hybrid(**changes):
    """One state group and one of full attention."""
    return Engine(state(), full(), **{"num_blocks": 60, **changes})


# -- tables ------------------------------------------------------------------------------------------------------------


def test_a_state_table_has_null_blocks_and_one_state_per_chunk():
    engine = hybrid()
    assert engine.admit(0, "a" * 13, cap=12).new[0] == [0, 0, engine.table(0)[2]]
    assert shape(engine) == "..x"


def test_decoding_writes_its_state_in_place_until_the_block_is_full():
    engine = hybrid()
    engine.admit(0, "aaaab")
    running = engine.table(0)[1]
    for _ in range(3):
        assert engine.run(0, text="b").new == {}
    assert engine.table(0) == [0, running]
    engine.run(0, text="c")
    assert engine.table(0)[:2] == [0, running], "the state at 8 stays: it is what token 8 continues from"
    assert shape(engine) == ".xx"


def test_states_are_freed_one_step_after_the_next_state():
    """The step that is sent now continues from the state before, so that one goes when the next step is sent."""
    engine = hybrid()
    engine.admit(0, "a" * 20, cap=8)
    assert shape(engine) == ".x"
    engine.run(0, cap=4)
    assert shape(engine) == ".xx"
    engine.run(0, cap=4)
    assert shape(engine) == "..xx"
    engine.run(0, cap=4)
    assert shape(engine) == "...xx"


def test_a_freed_state_can_be_hit():
    engine = hybrid()
    engine.admit(0, "a" * 20, cap=8)
    engine.run(0, cap=4)
    engine.run(0, cap=8)
    engine.run(0, text="b")
    assert shape(engine) == "....xx"
    assert engine.would_hit("a" * 9).num_tokens == 8
    assert engine.would_hit("a" * 15).num_tokens == 12


@pytest.mark.parametrize("chunks", [[4] * 10, [8] * 5, [12, 4, 20, 4], [40], [3, 5, 1, 7, 2, 22]])
def test_a_request_never_holds_more_than_two_states(chunks):
    engine = hybrid()
    engine.admit(0, "a" * 40, cap=chunks[0])
    for cap in chunks[1:]:
        engine.run(0, cap=cap)
        assert shape(engine).count("x") <= 2
    for _ in range(12):
        engine.run(0, text="b")
        assert shape(engine).count("x") <= 2


def test_lookahead_needs_no_state():
    """Draft models have no recurrent layers."""
    engine = hybrid()
    assert shape_of(engine.admit(0, "aaaab", lookahead=20).table[0]) == ".x"


def shape_of(table):
    return "".join("." if block == 0 else "x" for block in table)


# -- admission ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "drafts", "states"), [("aaaa", 0, 1), ("a" * 23, 0, 1), ("aaaa", 2, 3), ("a" * 23, 2, 3)]
)
def test_counted_state_blocks_equal_allocated_ones(text, drafts, states):
    """The pool of exactly that many blocks is enough, one less is not."""
    blocks = states + -(-len(text) // 4)
    group = state(speculative_blocks=drafts)
    fits = Engine(group, full(), num_blocks=blocks + 1)
    assert fits.admit(0, text).status is GRANTED
    assert fits.num_free == 0
    assert Engine(group, full(), num_blocks=blocks).admit(0, text).status is not GRANTED


def test_a_state_hit_takes_its_block_off_the_free_list():
    """4 full blocks and a state are adopted from the free list, and one of each is new: 7 in all."""
    for num_free, status in [(7, GRANTED), (6, REFUSED)]:
        engine = hybrid(num_blocks=20)
        engine.admit(0, "a" * 17, cap=16)
        engine.end(0)
        engine.admit(9, "z" * 4 * (18 - num_free))
        assert engine.num_free == num_free
        assert engine.admit(1, "a" * 17).status is status


# -- hits in the same step ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [SAFE, REFERENCE])
def test_a_state_of_this_step_is_not_ready_in_this_step(rule):
    """Attention pages could be read as they are written, a state not: the request waits a step."""
    engine = hybrid(commit=rule)
    text = "aaaabbbbc"
    news = engine.news(0, text)
    news.slot, news.num_tokens, news.tokens = [0, 1], [9, 9], news.tokens * 2
    (result,) = engine.step(Part(news=news, admit=admit_row(0, 1, cap=8)))
    assert result.admit_status == [GRANTED, DEFERRED]
    assert engine.admit(1).hit == 8


def test_the_reference_rule_lets_the_next_step_hit_a_state():
    """Its engine runs steps in order, so in the next step the state is written before it is read. A step that does not
    run at all is what commit=safe waits for.
    """
    for rule, status in [(REFERENCE, GRANTED), (SAFE, DEFERRED)]:
        engine = hybrid(commit=rule)
        engine.executed = 0
        engine.admit(0, "aaaabbbbc", cap=8)
        assert engine.admit(1, "aaaabbbbc").status is status


# -- draft tokens ------------------------------------------------------------------------------------------------------


def test_draft_states_follow_the_running_state():
    engine = Engine(state(speculative_blocks=2), full(), num_blocks=60)
    engine.admit(0, "aaaabb")
    assert shape(engine) == ".xxx"
    running = engine.table(0)
    engine.extend(0, "bb")
    assert engine.table(0) == running, "8 tokens fit"
    engine.run(0, text="c")
    assert engine.table(0)[:4] == running, "the first draft state is the running one now"
    assert shape(engine) == ".xxxx"


def test_draft_states_that_a_chunk_leaves_behind_move_to_the_end():
    engine = Engine(state(speculative_blocks=2), full(), num_blocks=60)
    engine.admit(0, "a" * 20, cap=8)
    _, kept, first, second = engine.table(0)
    engine.run(0, cap=12)
    assert engine.table(0)[:6] == [0, kept, 0, 0, first, second]
    assert shape(engine) == ".x..xxx"


def test_a_draft_state_that_is_shared_cannot_move():
    engine = Engine(state(speculative_blocks=2), full(), num_blocks=60)
    engine.admit(0, "a" * 20, cap=8)
    engine.pool.touch([engine.table(0)[2]])
    with pytest.raises(AssertionError, match="is shared or keyed"):
        engine.run(0, cap=12)


def test_a_changing_number_of_drafts_keeps_the_table():
    """Tokens that are rejected leave the table longer than needed; a later step with fewer drafts takes nothing."""
    engine = Engine(state(speculative_blocks=3), full(), num_blocks=60)
    engine.admit(0, "aaaabb")
    for drafts, accepted in [(3, 0), (0, 0), (1, 1), (3, 2), (2, 0), (3, 3), (0, 0)]:
        computed = engine.computed(0)
        assert engine.extend(0, "b", extra=drafts).granted == [1 + drafts]
        verified = Facts([0], [computed + 1 + accepted], [accepted], tokens("b" * accepted))
        engine.step(Part(facts=verified))
        assert shape(engine).count("x") <= 3 + 2
        assert len(engine.table(0)) >= -(-engine.computed(0) // 4) + 3


# -- finding -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cached", "found"), [("....", ""), ("x...", "x"), ("x.x.", "00x"), ("...x", "000x")])
def test_a_state_hit_ends_at_the_last_cached_state(cached, found):
    assert find_in(state(), cached) == found


def test_a_state_hit_is_not_shortened_for_drafts():
    assert find_in(state(), "xxxx", drops_last_block=True) == "000x"


def test_a_state_off_the_common_boundaries_is_not_hit():
    assert find_in(state(), "x.x.", scheduler_block_size=8) == ""
    assert find_in(state(), ".xx.", scheduler_block_size=8) == "0x"


def test_an_adopted_state_is_where_the_request_continues():
    engine = hybrid()
    engine.admit(0, "a" * 12 + "b", cap=12)
    cached = engine.table(0)[2]
    engine.end(0)
    again = engine.admit(1, "a" * 12 + "cc")
    assert again.hit == 12
    assert again.table[0] == [0, 0, cached, *again.new[0]]
    engine.run(1, text="c")
    assert engine.table(1)[2] == 0, "the step before this one was the last to read it"
    assert engine.would_hit("a" * 12 + "d").num_tokens == 12, "cached it stays"


# -- where chunks end --------------------------------------------------------------------------------------------------


def chunks_of(engine, prompt, slot=0, **columns):
    """How a prompt is cut."""
    admitted = engine.admit(slot, prompt, **columns)
    granted = [admitted.granted]
    while engine.computed(slot) < len(prompt):
        granted += engine.run(slot, **columns).granted
    return granted


def test_aligned_chunks_end_at_block_boundaries():
    """Up to 10 tokens a step: 8 are whole blocks. The last boundary of the prompt gets a state of its own."""
    engine = hybrid(align=AlignSpec(4, 10))
    assert chunks_of(engine, "a" * 30, cap=10) == [8, 8, 8, 4, 2]


def test_an_aligned_prompt_that_ends_on_a_boundary_stops_one_block_before_it():
    """A repeat of it resumes at most at its last token but one."""
    assert chunks_of(hybrid(align=AlignSpec(4, 100)), "a" * 16) == [12, 4]


def test_an_aligned_prompt_of_less_than_a_block_is_one_chunk():
    assert chunks_of(hybrid(align=AlignSpec(4, 100)), "aaa") == [3]


def test_unaligned_rows_are_not_clipped():
    engine = hybrid(align=AlignSpec(4, 10))
    assert engine.admit(0, "a" * 30, cap=10, flags=RowFlag.UNALIGNED).granted == 10
    assert engine.run(0, cap=9, flags=RowFlag.UNALIGNED).granted == [9]


def test_row_flag_bit_1_has_no_effect():
    assert chunks_of(hybrid(align=AlignSpec(4, 10)), "a" * 30, cap=10, flags=1) == [8, 8, 8, 4, 2]


def test_with_partial_hits_a_chunk_also_stops_at_the_last_hash_boundary():
    engine = Engine(state(8), full(8), full(2, lookup_class=1), partial_hits=True, align=AlignSpec(8, 100, True))
    assert chunks_of(engine, "a" * 13) == [8, 4, 1]


def test_a_chunk_that_begins_inside_a_block_first_fills_it():
    engine = Engine(state(8), full(8), full(2, lookup_class=1), partial_hits=True, align=AlignSpec(8, 100, True))
    assert chunks_of(engine, "a" * 13) == [8, 4, 1]
    engine.end(0)
    again = engine.admit(1, "a" * 13 + "b" * 20)
    assert (again.hit, again.granted) == (12, 4)


def test_chunk_stops_at_the_single_group_hit():
    """Another request parted at 12: full attention has the prefix, the state at 12 is missing and is made now."""
    engine = hybrid(align=AlignSpec(4, 100))
    engine.admit(0, "a" * 12 + "b" * 12)
    engine.end(0)
    assert engine.would_hit("a" * 12 + "c" * 12).num_tokens == 0
    again = engine.admit(1, "a" * 12 + "c" * 12)
    assert (again.hit, again.single_group_hit, again.granted) == (0, 12, 12)
    assert engine.would_hit("a" * 12 + "d" * 12).num_tokens == 12


def test_a_block_larger_than_any_chunk_advances_in_parts():
    engine = Engine(state(16), full(16), num_blocks=60, align=AlignSpec(16, 8))
    assert chunks_of(engine, "a" * 40, cap=8) == [8, 8, 8, 8, 8]


def test_a_chunk_that_cannot_reach_a_boundary_waits_for_more_of_the_budget():
    """A budget of at least one block, from which other rows took tokens, is whole again in a later step."""
    engine = Engine(state(16), full(16), num_blocks=60, align=AlignSpec(16, 16))
    engine.admit(1, "b" * 8)
    left = Part(run=run_rows(1, extra=0), facts=Facts([1], appended=[1], tokens=[7]), budget=Budget(tokens=16))
    left.news, left.admit = engine.news(0, "a" * 40), admit_row(0)
    assert engine.step(left)[0].admit_status == [NO_ROOM]
    assert engine.admit(0, budget=Budget(tokens=20)).granted == 16
    assert engine.replica.counters.unaligned_chunks == 0


def test_decode_rows_are_not_clipped():
    engine = Engine(state(speculative_blocks=3), full(), num_blocks=60, align=AlignSpec(4, 10))
    chunks_of(engine, "aaaaa")
    assert engine.run(0, text="b", extra=3).granted == [4]


@pytest.mark.parametrize("granted", [0, 1])
def test_a_request_that_goes_back_below_a_hit_that_ends_in_a_state_is_preempted(granted):
    """No launch left a state there, though as many draft states as tokens are taken back."""
    engine = Engine(state(4, speculative_blocks=2), full(), num_blocks=40, align=AlignSpec(4, 4096))
    engine.serve(0, "aaaabbbbc")
    engine.idle()
    engine.idle()
    engine.admit(1, "aaaabbbbcd", cap=granted, min_new=0)
    (result,) = engine.step(Part(facts=Facts([1], computed=[7])))
    assert result.preempted == [1]


def test_a_request_goes_back_below_no_hit_whose_key_was_evicted():
    engine = Engine(state(4, speculative_blocks=2), full(), num_blocks=40, align=AlignSpec(4, 4096))
    engine.serve(0, "aaaabbbbc")
    engine.idle()
    engine.idle()
    engine.admit(1, "aaaabbbbcd", cap=0, min_new=0)
    engine.cache(evicted=[block for table in engine.replica.coordinator.tables(1) for block in table if block])
    assert engine.fact(1, computed=7).preempted == [1]


@pytest.mark.parametrize("mode", [MambaMode.ALIGN, MambaMode.NONE])
def test_a_request_goes_back_below_no_load_of_a_state(mode):
    cached = mode is MambaMode.ALIGN
    engine = Engine(state(4, speculative_blocks=2, mamba_mode=mode), full(), num_blocks=40, enable_caching=cached)
    engine.admit(0, "aaaabbbbcd", external=8, cap=0, flags=int(RowFlag.DELAY_CACHING))
    assert engine.fact(0, computed=7).preempted == [0]


@pytest.mark.parametrize(
    ("facts", "preempted"),
    [
        ([(12, 0)], []),  # all drafts were rejected; their tokens come later
        ([(12, 1)], []),
        ([(13, 0), (12, 1)], []),
        ([(11, 0)], [0]),  # the first token of the launch
        ([(11, 1)], [0]),
        ([(13, 2)], []),  # one is accepted
        ([(12, 2)], [0]),  # and taken back
        ([(12, 3)], [0]),
        ([(13, 2), (12, 0)], [0]),
    ],
)
def test_a_request_goes_back_to_states_behind_drafts_alone(facts, preempted):
    """A launch of one known token and two drafts, from 11 tokens to 14."""
    engine = Engine(state(4, speculative_blocks=2), full(), num_blocks=40)
    engine.admit(0, "aaaabbbbcccd", cap=11)
    assert engine.run(0, extra=2).granted == [3]
    for computed, appended in facts:
        assert engine.replica.requests.running[0]
        rows = Facts([0], computed=[computed], appended=[appended], tokens=tokens("d" * appended))
        (result,) = engine.step(Part(facts=rows))
    assert result.preempted == preempted


def test_drafts_of_launches_behind_each_other_are_rejected():
    """The second was planned behind the drafts of the first: its outcome goes as far back as it began."""
    engine = Engine(state(4, speculative_blocks=2), full(), num_blocks=40)
    engine.admit(0, "aaaabbbbcccd", cap=11)
    assert (engine.run(0, extra=2).granted, engine.run(0, extra=5).granted) == ([3], [3])
    for computed in (15, 13):
        (result,) = engine.step(Part(facts=Facts([0], computed=[computed], appended=[1], tokens=tokens("d"))))
        assert result.preempted == []
    assert engine.run(0).granted == [1]
