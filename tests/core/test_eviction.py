"""Eviction policies: which cached block leaves first, and that no policy changes anything but the order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.base.groups import AlignSpec, EvictionPolicy
from kvplane.base.step import EventKind, RemoveReason
from kvplane_core.face.columns import U32, zeros
from kvplane_core.face.state import digest, export_state
from kvplane_core.spec.eviction import TurnTailList, WindowTailList, kept_indices
from kvplane_core.spec.freelist import FreeList
from kvplane_core.spec.loading import load_state
from tests.core.builders import Engine, chunked, full, state, window
from tests.core.test_freelist import order

LRU, WINDOW_TAIL = EvictionPolicy.LRU, EvictionPolicy.WINDOW_TAIL
LEFT, EVICTED = RemoveReason.LEFT_WINDOW, RemoveReason.EVICTED


# -- the list ----------------------------------------------------------------------------------------------------------

MOVE = st.tuples(
    st.sampled_from(["pop", "remove", "append", "prepend", "append_left_window"]), st.integers(0, 9), st.integers(0, 4)
)


@given(st.lists(MOVE, max_size=60))
def test_the_list_of_window_tail_equals_two_lists(moves):
    """One with the blocks without a key and, behind them, those that left a window; one with all others."""
    free, first, rest, out = WindowTailList(10), list(range(1, 10)), list[int](), list[int]()
    for move, where, count in moves:
        if move == "pop":
            count = min(count, len(first) + len(rest))
            let_go, others = first[:count], rest[: max(count - len(first), 0)]
            assert free.pop(count) == let_go + others
            assert free.let_go == set(let_go)
            out += let_go + others
            del first[:count], rest[: len(others)]
        elif move == "remove" and first + rest:
            block = (first + rest)[where % len(first + rest)]
            free.remove(block)
            (first if block in first else rest).remove(block)
            out.append(block)
        elif move != "remove":
            some = out[:count]
            del out[:count]
            getattr(free, move)(some)
            if move == "append":
                rest += some
            else:
                first = first + some if move == "append_left_window" else some + first
        assert (order(free), list(free.first())) == (first + rest, first)
        assert free.count == len(first + rest)


def test_lru_puts_blocks_that_left_a_window_at_the_back():
    free = FreeList(5)
    free.append_left_window(free.pop(1))
    assert (order(free), free.let_go) == ([2, 3, 4, 1], frozenset())


@given(st.permutations(range(1, 10)), st.integers(0, 9), st.sets(st.integers(1, 9)))
def test_a_new_engine_life_puts_the_divider_before_the_blocks_with_a_key(blocks, num_first, keyed):
    free, tokens = WindowTailList(10), zeros(U32, 10)
    free.rebuild(blocks, num_first)
    for block in keyed:
        tokens[block] = 4
    free.put_unkeyed_first(tokens)
    assert order(free) == [one for one in blocks if one not in keyed] + [one for one in blocks if one in keyed]
    assert {*free.first()} == {*blocks} - keyed


@pytest.mark.parametrize("num_unkeyed", [0, 2, 4])
def test_a_recovery_puts_the_divider_before_the_blocks_with_a_key(num_unkeyed):
    free = WindowTailList(5)
    free.rebuild([4, 1, 3, 2], num_unkeyed)
    assert order(free) == [4, 1, 3, 2]
    assert list(free.first()) == [4, 1, 3, 2][:num_unkeyed]


# -- which blocks are kept ---------------------------------------------------------------------------------------------


PROMPT = "aaaabbbbccccddddeeeeffff"  # 6 blocks; a repeat resumes at 20


def drawn(engine, slot, group):
    """Which blocks of a request's table are kept when they leave: "k"; "." otherwise."""
    manager = engine.replica.coordinator.managers[group]
    kept = kept_indices(manager, slot)
    return "".join(".k"[index in kept] for index in range(len(manager.table[slot])))


@pytest.mark.parametrize(
    ("group", "changes", "expected"),
    [
        (window(4), {}, "...kk."),  # the window before 20 and the one before 16
        (window(8), {}, "..kkk."),
        (window(4), {"keep_divergence_boundary": True}, "..kkk."),
        (window(4, drops_last_block=True), {}, "..kkkk"),  # resumes at 16 or 20, and reads a block behind
        (chunked(8, lookup_class=1), {}, "....k."),  # a hit of 16 begins a chunk, so it needs no block
    ],
)
def test_the_blocks_of_a_hit_at_the_replay_boundary_and_of_one_a_unit_shorter_are_kept(group, changes, expected):
    engine = Engine(group, full(), eviction=WINDOW_TAIL, **changes)
    engine.admit(0, PROMPT)
    assert drawn(engine, 0, 0) == expected


def test_the_blocks_of_the_hit_and_of_a_single_group_hit_are_kept():
    engine = Engine(window(4), full(), eviction=WINDOW_TAIL)
    engine.serve(0, "aaaabbbb?")
    assert engine.admit(0, PROMPT).hit == 8
    assert drawn(engine, 0, 0) == "kk.kk."
    engine.cache(evicted=[block for block in engine.table(0)[:3] if block])
    admitted = engine.admit(1, "aaaabbbbcccc????????????")
    assert (admitted.hit, admitted.single_group_hit) == (4, 12)
    assert drawn(engine, 1, 0) == "kkkkk."


def test_the_hit_of_an_earlier_request_in_the_slot_is_forgotten():
    engine = Engine(window(4), full(), eviction=WINDOW_TAIL)
    engine.serve(0, "aaaabbbb?")
    engine.serve(0, PROMPT)
    assert engine.replica.requests.hit_end == {}


# -- what is evicted first ---------------------------------------------------------------------------------------------


def pressed(eviction, **changes):
    """An engine whose request has left blocks of a window behind, and whose pool has just been used up by others.

    Returns the engine, and the reasons for which blocks of the window group and of full attention lost their keys.
    """
    engine = Engine(window(4), full(), num_blocks=23, eviction=eviction, **changes)
    engine.serve(0, "zzzzyyyyx")  # older than what leaves the window: LRU evicts it first
    engine.admit(1, PROMPT)
    engine.extend(1, "g")
    gone = [event for event in engine.admit(2, "o" * 12).result.events if event.kind is EventKind.REMOVED]
    return engine, [(event.group, event.reason) for event in gone]


def test_blocks_that_left_a_window_are_evicted_first():
    for eviction, expected in ((LRU, {EVICTED}), (WINDOW_TAIL, {LEFT})):
        engine, gone = pressed(eviction)
        assert {reason for _, reason in gone} == expected
        assert engine.would_hit("zzzzyyyyx").num_tokens == (8 if eviction is WINDOW_TAIL else 0)


def test_a_prompt_that_repeats_or_differs_in_its_last_block_still_hits():
    engine, _ = pressed(WINDOW_TAIL)
    assert engine.would_hit(PROMPT).num_tokens == 20
    assert engine.would_hit(PROMPT[:-5] + "?????").num_tokens == 16


def test_states_are_evicted_as_by_lru():
    orders = []
    for eviction in EvictionPolicy:
        engine = Engine(state(), full(), num_blocks=40, eviction=eviction)
        engine.admit(0, PROMPT)
        for letter in "ghijklmno":
            engine.extend(0, letter)
        engine.end(0)
        orders.append((engine.free_order, engine.keyed(0)))
    assert orders[0] == orders[1]
    assert len(orders[0][1]) > 2


def test_keys_that_are_registered_sparsely_are_evicted_as_by_lru():
    """With retention_interval 0 every key is at a kept boundary."""
    orders = []
    for eviction in EvictionPolicy:
        engine, gone = pressed(eviction, retention_interval=0)
        orders.append((engine.free_order, [group for group, _ in gone]))
    assert orders[0] == orders[1]


# -- the state ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changed", ["num_first", "hit_end"])
def test_the_policy_s_part_of_the_state_decides(changed):
    engine = Engine(window(4), full(), num_blocks=40, eviction=WINDOW_TAIL)
    engine.serve(0, "aaaabbbb?")
    engine.admit(0, PROMPT)
    engine.extend(0, "g")
    replica = engine.replica
    raw, before = export_state(replica), digest(replica)
    loaded = load_state(replica.spec, raw)
    assert (export_state(loaded), digest(loaded)) == (raw, before)
    if changed == "hit_end":
        loaded.requests.hit_end.clear()
    else:
        free = loaded.coordinator.pool.free
        assert isinstance(free, WindowTailList)
        free.rebuild(free, 0)
    assert digest(loaded) != before


# -- turns -------------------------------------------------------------------------------------------------------------

TURN_TAIL = EvictionPolicy.TURN_TAIL


def chat(policy=TURN_TAIL, num_blocks=60):
    """An engine whose hits end inside blocks of 8 tokens, at multiples of 2."""
    groups = full(8), state(8)
    align = AlignSpec(8, 4096, True)
    return Engine(*groups, num_blocks=num_blocks, hash_block_size=2, partial_hits=True, align=align, eviction=policy)


def first_out(engine):
    """(group, tokens) of the free blocks with a key that leave first."""
    pool = engine.replica.coordinator.pool
    first = pool.free.first()
    return [(pool.key[block][1], pool.key_tokens[block]) for block in first if pool.key[block]]


def test_what_a_later_turn_copied_leaves_first():
    engine = chat()
    engine.serve(0, "aaaabb?")  # the block and the state of 6 tokens
    assert first_out(engine) == []
    assert engine.admit(0, "aaaabbccccdd?", cap=2).hit == 6
    engine.run(0)
    engine.run(0)
    engine.end(0)
    engine.idle()
    assert sorted(first_out(engine)) == [(0, 6), (1, 6), (1, 8)]  # and the state on the way to that of 12 tokens
    assert engine.would_hit("aaaabbccccdd??").num_tokens == 12


def test_what_two_prompts_copied_stays():
    engine = chat()
    engine.serve(0, "aaaabb?")
    for letter in "cd":
        assert engine.serve(0, f"aaaabb{letter * 6}?").hit == 6
    engine.idle()
    assert (0, 6) not in first_out(engine)
    assert (1, 6) not in first_out(engine)


def test_a_repeated_prompt_supersedes_nothing():
    engine = chat()
    for _ in range(2):
        engine.serve(0, "aaaabb?")
    engine.idle()
    assert engine.would_hit("aaaabb?").num_tokens == 6
    assert first_out(engine) == []


def test_the_last_states_of_a_prompt_leave_with_the_other_blocks_of_their_request():
    for policy in (WINDOW_TAIL, TURN_TAIL):
        engine = chat(policy)
        engine.admit(0, "aaaabb?")
        engine.run(0)  # the state of 6 tokens is free from here on
        engine.extend(0, "c")
        engine.extend(0, "c")
        engine.serve(1, "zzzzzzzzyyyyyyyyxxxxxx?")
        engine.end(0)
        engine.idle()
        pool = engine.replica.coordinator.pool
        keyed = [(pool.key[block][1], pool.key_tokens[block]) for block in engine.free_order if pool.key[block]]
        assert keyed.index((1, 6)) == (0 if policy is WINDOW_TAIL else len(keyed) - 3)
        assert keyed[-2:] == [(0, 8), (1, 8)]


def test_the_superseded_blocks_are_in_the_state():
    engine = chat()
    engine.serve(0, "aaaabb?")
    engine.admit(0, "aaaabbccccdd?")
    replica = engine.replica
    free = replica.coordinator.pool.free
    assert isinstance(free, TurnTailList)
    assert len(free.superseded) == 2
    loaded = load_state(replica.spec, export_state(replica))
    assert export_state(loaded) == export_state(replica)
    other = loaded.coordinator.pool.free
    assert isinstance(other, TurnTailList)
    before = digest(loaded)
    other.superseded.clear()
    assert digest(loaded) != before
    for block in list(free.superseded):
        replica.coordinator.pool.drop_keys(block, RemoveReason.DROPPED)
    assert free.superseded == {}
