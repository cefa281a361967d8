"""The hit of a prompt with several groups of different kinds.

Each group accepts a candidate length or shortens it; the hit is what all of them accept.
"""

from __future__ import annotations

from itertools import permutations

import pytest

from kvplane_core.face.interface import INSIDE
from kvplane_core.spec.lookup import PrefixLookup
from tests.core.builders import Engine, chunked, digests, full, ring, state, window

A16 = "aaaabbbbccccdddd"


def test_a_hybrid_hit_is_the_length_that_every_group_has_cached():
    """Full attention has 12 tokens; the window of 8 needs two blocks in a row, and one of them is gone."""
    engine = Engine(full(), window(8))
    tables = engine.serve(0, A16).table
    assert engine.would_hit(A16).num_tokens == 12
    engine.cache(evicted=[tables[1][2]])
    assert engine.would_hit(A16).num_tokens == 8
    engine.cache(evicted=[tables[0][1]])
    assert engine.would_hit(A16).num_tokens == 4, "a run that begins at block 0 counts though it is short"


def test_a_hybrid_hit_has_null_blocks_before_the_window():
    engine = Engine(full(), window(8))
    tables = engine.serve(0, A16).table
    hit = engine.would_hit(A16)
    assert hit.blocks == (tables[0][:3], [0, *tables[1][1:3]])


def test_full_attention_hit_is_truncated_to_the_common_hit():
    engine = Engine(full(), window(8))
    tables = engine.serve(0, A16).table
    engine.cache(evicted=[tables[1][2], tables[1][1]])
    hit = engine.would_hit(A16)
    assert hit.num_tokens == 4
    assert hit.blocks == (tables[0][:1], tables[1][:1])


def test_longest_hit_of_one_group_is_the_single_group_hit():
    """Full attention knows 12 tokens of this prefix: where another request parted, or a group lost its blocks. Groups
    that keep few blocks keep the ones at the single-group hit once they pass it.
    """
    engine = Engine(full(), window(8))
    tables = engine.serve(0, A16).table
    assert engine.would_hit(A16).single_group_hit == 0
    engine.cache(evicted=[tables[1][2]])
    assert engine.would_hit(A16).single_group_hit == 12
    assert engine.admit(0, A16).single_group_hit == 12


def lengths_of_each(engine, text, max_tokens):
    lookup = engine.replica.coordinator.lookup
    return lookup.find_each(digests(engine.spec, text), "", max_tokens, INSIDE)


def test_groups_looked_up_each_by_itself_do_not_shorten_each_other():
    """The state at 12 tokens is found although full attention ends at 8, and the other way round."""
    engine = Engine(full(), state())
    attention: list[int] = []
    states: list[int] = []
    engine.admit(0, A16, cap=4)
    for _ in range(3):
        states.append(engine.table(0, 1)[len(states)])
        attention = engine.table(0)
        engine.run(0, cap=4)
    engine.end(0)
    assert lengths_of_each(engine, A16, 15) == ([attention, [0, 0, states[2]]], [12, 12])
    engine.cache(evicted=[attention[2]])
    assert lengths_of_each(engine, A16, 15) == ([attention[:2], [0, 0, states[2]]], [8, 12])
    assert engine.would_hit(A16).num_tokens == 8
    engine.cache(evicted=states[1:])
    assert lengths_of_each(engine, A16, 15) == ([attention[:2], states[:1]], [8, 4])
    assert engine.would_hit(A16).num_tokens == 4


def test_a_group_looked_up_by_itself_has_at_most_the_tokens_asked_for():
    """A group that leaves out its last matched block reads one block further for it, as in a look-up of all groups."""
    engine = Engine(full(drops_last_block=True), window(8), ring())
    engine.serve(0, A16 + "e")
    assert lengths_of_each(engine, A16, 8)[1] == [8, 8, 0]
    assert lengths_of_each(engine, A16, 0)[1] == [0, 0, 0]
    assert lengths_of_each(engine, "zzzz" + A16, 8)[1] == [0, 0, 0]


GROUPS = {"full": full(), "near": window(8), "far": window(12, lookup_class=4), "chunk": chunked(8), "state": state()}
MIXES = [
    names
    for count, kinds in [(2, ("full", "near")), (3, ("full", "near", "far")), (4, ("full", "near", "chunk", "state"))]
    for names in permutations(kinds, count)
]


@pytest.mark.parametrize("names", MIXES, ids=" ".join)
def test_a_hybrid_hit_does_not_depend_on_the_order_of_groups(names):
    engine = Engine(*(GROUPS[name] for name in names))
    engine.admit(0, A16 + "e", cap=8)
    engine.run(0, cap=4)
    engine.run(0, cap=5)
    near = engine.table(0, names.index("near"))
    engine.end(0)
    assert engine.would_hit(A16 + "e").num_tokens == (12 if "state" in names else 16)
    engine.cache(evicted=[near[2]])
    assert engine.would_hit(A16 + "e").num_tokens == 8


def test_window_groups_without_full_attention_have_a_common_hit():
    engine = Engine(window(8), window(12, lookup_class=4))
    far = engine.serve(0, A16 + "e").table[1]
    assert engine.would_hit(A16 + "e").num_tokens == 16
    engine.cache(evicted=[far[3]])
    assert engine.would_hit(A16 + "e").num_tokens == 12
    engine.cache(evicted=[far[1]])
    assert engine.would_hit(A16 + "e").num_tokens == 4


def test_groups_of_one_format_are_looked_up_together():
    """Both windows have one class: a block counts only if both have it, and it takes one search, not two."""
    engine = Engine(window(8), full(), window(8))
    tables = engine.serve(0, A16 + "e").table
    lookup = PrefixLookup(engine.spec, engine.replica.coordinator.managers, engine.replica.coordinator.pool)
    assert [one.groups for one in lookup.classes] == [(1,), (0, 2)], "full attention is asked first"
    engine.cache(evicted=[tables[2][3]])
    assert engine.would_hit(A16 + "e").num_tokens == 12
    assert engine.would_hit(A16 + "e").blocks[0] == [0, *tables[0][1:3]]


def test_hybrid_hits_are_multiples_of_the_largest_block_size():
    """Blocks of 4 and 8: the block of 4 behind the last block of 8 cannot be used."""
    engine = Engine(full(4), full(8, lookup_class=1))
    engine.serve(0, A16[:12])
    assert engine.would_hit(A16).num_tokens == 8


def test_hybrid_hits_are_multiples_of_the_least_common_multiple_of_block_sizes():
    engine = Engine(full(4), full(6, lookup_class=1), hash_block_size=2, scheduler_block_size=12)
    engine.serve(0, "a" * 30)
    assert engine.would_hit("a" * 40).num_tokens == 24


def test_blocks_beyond_the_last_common_boundary_are_not_cached():
    """It could never be part of a hit."""
    engine = Engine(full(4), full(8, lookup_class=1))
    engine.serve(0, A16[:12])
    assert len(engine.keyed(0)) == 2
    assert len(engine.keyed(1)) == 1


def test_equal_blocks_of_two_groups_have_separate_keys():
    engine = Engine(full(), full(lookup_class=1))
    tables = engine.serve(0, A16).table
    assert not set(tables[0]) & set(tables[1])
    assert (engine.keyed(0), engine.keyed(1)) == (tables[0], tables[1])


def test_an_uncached_group_does_not_limit_the_hit():
    engine = Engine(full(), ring())
    engine.serve(0, A16)
    assert engine.would_hit(A16).num_tokens == 12


def test_an_allocation_never_evicts_the_hit_of_its_own_request():
    """The pool is so short that the new blocks come from what is cached; the hit is taken off the list first."""
    engine = Engine(full(), full(lookup_class=1), num_blocks=9)
    tables = engine.serve(0, "aaaabbbb").table
    engine.serve(1, "zzzz")
    again = engine.admit(2, "aaaabbbbcccc")
    assert again.hit == 8
    assert [table[:2] for table in again.table] == tables
    assert not set(again.new[0] + again.new[1]) & {*tables[0], *tables[1]}
