"""Full attention and MLA: a request has a block for every token until it ends."""

from __future__ import annotations

import pytest

from kvplane.base.groups import GroupKind, GroupSpec
from tests.core.builders import GRANTED, REFUSED, Engine, find_in, full


@pytest.mark.parametrize("kind", [GroupKind.FULL_ATTENTION, GroupKind.MLA])
def test_full_attention_allocates_one_block_per_started_block_of_tokens(kind):
    engine = Engine(GroupSpec(kind, 4))
    assert len(engine.admit(0, "a").table[0]) == 1
    assert len(engine.admit(1, "bbbb").table[0]) == 1
    assert len(engine.admit(2, "ccccc").table[0]) == 2


def test_blocks_are_allocated_as_tokens_are_computed():
    engine = Engine(full())
    assert engine.admit(0, "aaaabbbbccccd", cap=5).new == [[1, 2]]
    assert engine.run(0, cap=3).new == {}, "the second block had room for them"
    assert engine.run(0).new == {0: [[3, 4]]}


def test_full_attention_frees_no_block_while_the_request_runs():
    engine = Engine(full())
    engine.admit(0, "aaaa")
    for letter in "bbbbccccdddd":
        engine.run(0, text=letter)
    assert engine.table(0) == [1, 2, 3, 4]
    assert engine.num_free == 96


def test_lookahead_gets_slots_but_no_keys():
    """Slots for drafts to come: they may be rejected, so nothing is registered for them."""
    engine = Engine(full())
    assert engine.admit(0, "aaaabbb", lookahead=3).table == [[1, 2, 3]]
    assert engine.keyed() == [1]
    assert engine.run(0, text="b", lookahead=3).new == {}, "8 + 3 tokens fit"
    assert engine.keyed() == [1, 2]
    assert engine.run(0, text="c", lookahead=4).new == {0: [[4]]}


def test_lookahead_is_limited_by_max_model_len():
    engine = Engine(full(), max_model_len=8)
    assert engine.admit(0, "aaaabbb", lookahead=9).table == [[1, 2]]


def test_drafts_take_slots_and_rejected_ones_are_computed_again():
    """Extra tokens beyond the known ones are drafts. A fact takes the rejected ones back; their slots stay."""
    engine = Engine(full())
    engine.admit(0, "aaa")
    assert engine.run(0, text="a", extra=3).granted == [4]
    assert engine.computed(0) == 7
    assert engine.keyed() == [1], "tokens 4..6 are drafts"
    engine.fact(0, computed=5)
    assert engine.run(0, text="b").granted == [0], "one draft was right: token 4 is computed"
    assert engine.run(0, text="b", extra=3).new == {0: [[3]]}
    assert engine.table(0) == [1, 2, 3]


def test_an_allocation_without_enough_blocks_is_refused_and_changes_nothing():
    engine = Engine(full(), num_blocks=5)
    engine.serve(0, "aaaabbbb")
    engine.admit(1, "zz")
    before = engine.free_order
    refused = engine.admit(2, "aaaabbbbccccdddd")
    assert (refused.status, refused.hit, refused.granted, refused.table) == (REFUSED, 8, 0, [[]])
    assert engine.free_order == before
    assert engine.pool.references[1] == 0
    assert engine.replica.counters.refused == 1


def test_free_hit_blocks_count_as_blocks_to_allocate():
    """Adopting them takes them off the free list, so what they need is not there for the new blocks."""
    engine = Engine(full(), num_blocks=5)
    engine.serve(0, "aaaabbbb")
    assert engine.admit(1, "aaaabbbbccccdddd").status is GRANTED
    engine.end(1)
    engine.admit(2, "z")
    assert engine.admit(3, "aaaabbbbccccdddd").status is REFUSED, "2 to adopt + 2 new > 3 free"


def test_hit_blocks_in_use_need_no_free_blocks():
    engine = Engine(full(), num_blocks=5)
    engine.admit(0, "aaaabbbb")
    assert engine.admit(1, "aaaabbbbccccdddd").status is GRANTED
    assert engine.num_free == 0


def test_new_blocks_are_listed_for_zeroing_where_the_group_asks_for_it():
    engine = Engine(full(zero_new_blocks=True), full(lookup_class=1))
    admitted = engine.admit(0, "aaaabbbbc")
    assert admitted.result.orders.zero_block == admitted.new[0]
    assert admitted.result.orders.zero_group == [0, 0, 0]
    again = engine.admit(1, "aaaabbbbc").result.orders
    assert len(again.zero_block) == 1, "adopted pages are not zeroed"


def test_full_attention_lookup_ends_at_the_first_miss():
    assert find_in(full(), "xx.x") == "xx"
    assert find_in(full(), ".xxx") == ""
    assert find_in(full(), "xxxx", max_tokens=11) == "xx"
    assert find_in(full(), "xxxx", drops_last_block=True) == "xxx"
    assert find_in(full(), "....", drops_last_block=True) == ""
