"""Hits that end inside a block: the shared block is copied before it is written (copy on write).

Hashes are finer than blocks (2 tokens here, blocks of 4). With its full blocks a prompt registers its last hash
boundary, so that a repeat of it loses at most a hash unit, not a block. Every group must be able to take part.

    tokens   a a | a a | b b | c            prompt of 7: hash boundary 6, inside the second block of 4
"""

from __future__ import annotations

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import AlignSpec
from kvplane.base.step import EventKind, RemoveReason
from kvplane_core.spec.replica import Replica
from tests.core.builders import (
    GRANTED,
    REFUSED,
    Engine,
    digests,
    find_in,
    full,
    replica_spec,
    ring,
    state,
    window,
)


def two_sizes(**changes):
    """Two kinds of full attention with blocks of 2 and of 4; only the second can be hit inside a block."""
    return Engine(full(2), full(4, lookup_class=1), partial_hits=True, **changes)


def with_state(*more):
    """State and full attention in blocks of 8, hashes of 4: how hybrids with large blocks are served."""
    align = AlignSpec(8, 4096, stop_at_tail=True)
    return Engine(state(8), full(8), *more, hash_block_size=4, partial_hits=True, align=align)


def prefill(engine, slot, prompt):
    """Admit a prompt and compute it to its end, in clipped chunks."""
    done = engine.admit(slot, prompt)
    while engine.computed(slot) < len(prompt):
        engine.run(slot)
    return done


def copies(result):
    orders = result.orders
    return list(zip(orders.copy_group, orders.copy_src, orders.copy_dst, strict=True))


# -- finding -----------------------------------------------------------------------------------------------------------


def test_a_prompt_registers_a_key_at_its_last_hash_boundary():
    engine = two_sizes()
    engine.serve(0, "aaaabbc")
    assert engine.would_hit("aaaabbx").num_tokens == 6
    assert engine.would_hit("aaaabbcd").num_tokens == 6
    assert engine.would_hit("aaaabXX").num_tokens == 4


def test_without_partial_hits_a_hit_ends_at_a_block():
    engine = Engine(full(2), full(4, lookup_class=1))
    engine.serve(0, "aaaabbc")
    assert engine.would_hit("aaaabbx").num_tokens == 4


def test_a_partial_hit_leaves_the_last_token_to_compute():
    engine = two_sizes()
    engine.serve(0, "aaaabb")
    assert engine.would_hit("aaaabb").num_tokens == 4, "its own boundary is 4: 6 would leave nothing to compute"
    assert engine.would_hit("aaaabbx").num_tokens == 4


def test_a_partial_hit_is_the_longest_hash_boundary():
    """One more block of 8 behind the full ones: boundaries 14, 12, 10 are tried in this order."""
    engine = Engine(full(2), full(8, lookup_class=1), partial_hits=True)
    engine.serve(0, "aaaabbbbccd")
    assert engine.would_hit("aaaabbbbccddddd").num_tokens == 10
    engine.serve(1, "aaaabbbbccddd")
    assert engine.would_hit("aaaabbbbccddddd").num_tokens == 12


def test_a_state_is_found_at_hash_boundaries():
    assert find_in(state(4), "..x", hash_block_size=2, scheduler_block_size=4, partial_hits=True) == "00x"


# -- copy on write -----------------------------------------------------------------------------------------------------


def test_a_partially_hit_block_is_copied_and_stays_cached():
    engine = two_sizes()
    source = engine.serve(0, "aaaabbc").table[1][1]
    again = engine.admit(1, "aaaabbdd")
    target = again.table[1][1]
    assert copies(again.result) == [(1, source, target)]
    assert again.new[1] == [target], "the copy is a new block of the request"
    assert again.granted == 2
    assert engine.would_hit("aaaabbx").blocks[1][1] == source


def test_two_requests_each_copy_a_partially_hit_block():
    engine = two_sizes()
    source = engine.serve(0, "aaaabbc").table[1][1]
    pairs = [copies(engine.admit(slot, "aaaabb" + "de"[slot - 1] * 2).result) for slot in (1, 2)]
    assert [pair[0][1] for pair in pairs] == [source, source]
    assert pairs[0][0][2] != pairs[1][0][2]


def test_a_hit_that_ends_with_a_block_needs_no_copy():
    engine = two_sizes()
    engine.serve(0, "aaaabbbbc")
    again = engine.admit(1, "aaaabbbbd")
    assert (again.hit, copies(again.result)) == (8, [])


def test_a_copied_block_has_no_key():
    engine = two_sizes()
    engine.serve(0, "aaaabbc")
    copy = engine.admit(1, "aaaabbddeeee", cap=1).table[1][1]
    assert engine.pool.key[copy] is None
    engine.run(1, cap=1)
    assert engine.pool.key_tokens[copy] == 8, "it is keyed when it is full, by its own request"


def test_a_copy_target_is_zeroed_before_the_copy():
    """Orders run zeroes before copies. The reference lists the target whether or not the group zeroes its blocks."""
    engine = two_sizes()
    engine.serve(0, "aaaabbc")
    again = engine.admit(1, "aaaabbdd")
    assert again.result.orders.zero_block == again.new[1]
    assert again.result.orders.zero_group == [1]


@pytest.mark.parametrize(("num_blocks", "status"), [(20, GRANTED), (19, REFUSED)])
def test_a_partial_hit_needs_one_more_block(num_blocks, status):
    """3 blocks of 2 and 2 of 4 are adopted from the free list; new are the copy and one block of 2: 7 in all."""
    engine = two_sizes(num_blocks=num_blocks)
    engine.serve(0, "aaaabbc")
    engine.admit(9, "z" * 16)
    assert engine.num_free == num_blocks - 1 - 12
    assert engine.admit(1, "aaaabbdd").status is status


# -- a state is overwritten in place -----------------------------------------------------------------------------------


def test_a_running_state_at_the_prompt_s_boundary_is_moved_before_it_is_overwritten():
    """The worker's table of a running request only grows, so the request keeps its block, and the content with its key
    moves to the copy.
    """
    engine = with_state()
    engine.admit(0, "a" * 13)
    engine.run(0)
    running = engine.table(0)[1]
    assert (engine.computed(0), engine.pool.key_tokens[running]) == (12, 12)
    moved = engine.run(0)
    ((group, source, target),) = copies(moved.result)
    assert (group, source) == (0, running)
    assert engine.table(0)[1] == running
    assert engine.pool.key[running] is None
    assert engine.pool.key_tokens[target] == 12


def test_a_repeated_prompt_hits_the_moved_state():
    engine = with_state()
    prefill(engine, 0, "a" * 13)
    engine.end(0)
    again = prefill(engine, 1, "a" * 13 + "b" * 9)
    assert again.hit == 12
    assert {group for group, _, _ in copies(again.result)} == {0, 1}


def test_a_partially_hit_state_is_copied_and_stays_cached():
    engine = with_state()
    prefill(engine, 0, "a" * 13)
    engine.end(0)
    sources = set()
    for slot in (1, 2):
        again = engine.admit(slot, "a" * 12 + "bcd"[slot] * 9)
        sources |= {source for group, source, _ in copies(again.result) if group == 0}
        assert engine.pool.references[engine.table(slot)[1]] >= 1
    assert len(sources) == 1


# -- from partial to full ----------------------------------------------------------------------------------------------


def test_a_block_that_fills_replaces_its_key_with_a_longer_one():
    """Removed, then Stored; the prompt's boundary is then registered again as a further key of the full block."""
    engine = two_sizes()
    engine.admit(0, "aaaabbc")
    made = digests(engine.spec, "aaaabbcc")
    block = engine.table(0, 1)[1]
    events = [one for one in engine.run(0, text="c").result.events if one.group == 1]
    assert [(one.kind, one.hashes) for one in events] == [
        (EventKind.REMOVED, (made[2],)),
        (EventKind.STORED, (made[3],)),
        (EventKind.STORED, (made[2],)),
    ]
    assert events[0].reason is RemoveReason.PROMOTED
    assert engine.pool.key_tokens[block] == 8
    assert list(engine.pool.more_keys[block]) == [("", 1, made[2])]
    assert engine.would_hit("aaaabbx").num_tokens == 6, "the shorter prefix still hits"


# -- who can take part -------------------------------------------------------------------------------------------------


def test_a_window_with_blocks_larger_than_a_hash_disables_partial_hits():
    with pytest.raises(InvalidArgument) as caught:
        Replica(replica_spec(window(8, 4), full(4), full(2), partial_hits=True))
    assert caught.value.field == "partial_hits"


def test_a_window_with_blocks_of_one_hash_allows_partial_hits():
    engine = Engine(window(4, 2), full(4), partial_hits=True)
    engine.serve(0, "aaaabbc")
    assert engine.would_hit("aaaabbx").num_tokens == 6


def test_an_uncached_group_allows_partial_hits():
    engine = with_state()
    with_ring = Engine(
        state(8),
        full(8),
        ring(8),
        hash_block_size=4,
        scheduler_block_size=8,
        partial_hits=True,
        align=engine.spec.align,
    )
    prefill(with_ring, 0, "a" * 13)
    with_ring.end(0)
    assert with_ring.would_hit("a" * 14).num_tokens == 12


# -- drafts ------------------------------------------------------------------------------------------------------------


def test_drafts_drop_one_hash_of_a_partial_hit():
    """12 tokens found, 10 left: they are in all three blocks. Without partial hits a whole block goes."""
    assert find_in(full(4), "xxx", drops_last_block=True, hash_block_size=2, partial_hits=True) == "xxx"
    assert find_in(full(4), "xxx", drops_last_block=True, hash_block_size=2) == "xx"
