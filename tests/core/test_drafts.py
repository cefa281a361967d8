"""Draft layers (EAGLE, MTP): the drafter recomputes the last matched block, so its groups drop it from a hit.

Its state at the last position of a block depends on the token that follows, which the hash of the block does not cover.
"""

from __future__ import annotations

import pytest

from kvplane_core.spec.coordinator import Coordinator
from kvplane_core.spec.requests import Requests
from tests.core.builders import Engine, find_in, full, replica_spec, state, window

TEXT = "aaaabbbbccccdddd"


def kept(engine, slot, group=0):
    keys = engine.pool.key
    return "".join("0" if not block else ".x"[keys[block] is not None] for block in engine.table(slot, group))


# -- dropping ----------------------------------------------------------------------------------------------------------


def test_a_dropping_group_drops_the_last_block_of_its_hit():
    engine = Engine(full(drops_last_block=True))
    engine.serve(0, TEXT)
    assert engine.would_hit(TEXT + "e").num_tokens == 12
    assert engine.would_hit(TEXT).num_tokens == 8, "of the 12 that could be hit"
    assert engine.would_hit("aaaab").num_tokens == 0


def test_several_dropping_groups_drop_one_block_together():
    engine = Engine(full(drops_last_block=True), window(8, drops_last_block=True))
    engine.serve(0, TEXT + "eeee")
    assert engine.would_hit(TEXT + "eeeef").num_tokens == 16


def test_groups_without_draft_layers_drop_no_block():
    """The window holds the draft layers. Full attention has 16 tokens; the window looks one block past the candidate
    and drops it, so that both agree on 12 or, if that further block is there, on more.
    """
    engine = Engine(full(), window(8, drops_last_block=True))
    engine.serve(0, TEXT)
    assert engine.would_hit(TEXT + "e").num_tokens == 12
    longer = Engine(full(), window(8, drops_last_block=True))
    longer.serve(0, TEXT + "eeee")
    assert longer.would_hit(TEXT + "e").num_tokens == 12, "hashes end at 16, there is nothing further to look at"
    assert longer.would_hit(TEXT + "eeee").num_tokens == 16, "the fifth block was looked at and dropped"


def test_a_drop_repeats_only_when_another_group_has_shortened_the_candidate():
    """The far window loses its third block: 16 is shortened to 8 by it, and the near window checks 8 again."""
    engine = Engine(full(), window(8, drops_last_block=True), window(12, lookup_class=4))
    tables = engine.serve(0, TEXT + "eeee").table
    assert engine.would_hit(TEXT + "eeee").num_tokens == 16
    engine.cache(evicted=[tables[2][2]])
    assert engine.would_hit(TEXT + "eeee").num_tokens == 8


def test_a_group_of_the_same_format_as_a_dropping_group_drops_a_block():
    """Groups of one format are looked up jointly; that only one of them holds draft layers changes nothing."""
    engine = Engine(window(8, is_draft=True, drops_last_block=True), full(), window(8))
    assert [manager.drops_last_block for manager in engine.replica.coordinator.managers] == [True, False, True]


def test_a_state_group_drops_no_block():
    """Draft models have no recurrent layers: dropping would only lose the state."""
    assert find_in(state(), "xxxx", drops_last_block=True) == "000x"
    engine = Engine(state(), full(drops_last_block=True))
    engine.admit(0, TEXT, cap=8)
    engine.run(0, cap=4)
    engine.run(0, cap=4)
    assert engine.would_hit(TEXT + "e").num_tokens == 12


# -- what is kept for it -----------------------------------------------------------------------------------------------


def test_a_dropping_window_keeps_one_more_block():
    """A hit at 16 looks at the block 16..19 too and drops it: 3 blocks instead of 2, up to and with that one."""
    spec = replica_spec(window(8, drops_last_block=True), full(), retention_interval=0)
    manager = Coordinator(spec, Requests()).managers[0]
    assert manager.reachable_blocks(0, 7, [16]) == [False, False, True, True, True, False, False]
    plain = Coordinator(replica_spec(window(8), full(), retention_interval=0), Requests()).managers[0]
    assert plain.reachable_blocks(0, 7, [16]) == [False, False, True, True, False, False, False]


@pytest.mark.parametrize(("length", "expected"), [(20, ".xxxx"), (21, "..xxx."), (22, "..xxx.")])
def test_replay_boundaries_are_those_that_a_repeated_prompt_can_hit(length, expected):
    """A repeat of 20 tokens matches 19, so 16, and drops to 12; a longer prompt matches 20 and drops to 16. With 21
    both are 16. Each takes a window of two blocks and the block behind it.
    """
    engine = Engine(window(8, drops_last_block=True), full(), retention_interval=0)
    engine.admit(0, "a" * length)
    assert kept(engine, 0) == expected


@pytest.mark.parametrize("length", range(9, 33))
def test_repeated_and_longer_prompts_lose_one_block_to_a_dropping_group(length):
    """A repeat may look at its own last block, past the tokens that it can hit, and drops that one."""
    engine = Engine(window(8, drops_last_block=True), full(drops_last_block=True), retention_interval=0)
    engine.serve(0, "a" * length)
    assert engine.would_hit("a" * length).num_tokens == length // 4 * 4 - 4
    assert engine.would_hit("a" * length + "b").num_tokens == length // 4 * 4 - 4


def test_a_dropping_group_registers_one_block_past_the_common_boundary():
    """Hits are multiples of 16. The window with draft layers must find the block behind 32 to drop it."""
    plain, dropping = [Engine(window(4, 4, drops_last_block=drops), full(16)) for drops in (False, True)]
    for engine in (plain, dropping):
        engine.admit(0, "a" * 38)
    assert kept(plain, 0) == "...x...x.."
    assert kept(dropping, 0) == "...xx..xx."
    assert dropping.would_hit("a" * 36 + "b").num_tokens == 32


@pytest.mark.parametrize(("drops", "boundary"), [(False, 20), (True, 16)])
def test_a_state_is_kept_one_block_lower_with_a_dropping_group(drops, boundary):
    """Full attention has 20 of 22 tokens and drops the last block for the drafter: the state worth a key is at 16."""
    engine = Engine(state(), full(drops_last_block=drops), retention_interval=0, num_blocks=60)
    engine.admit(0, "a" * 22, cap=4)
    for _ in range(5):
        engine.run(0, cap=4)
    states = engine.keyed(group=0)
    assert [engine.pool.key_tokens[block] for block in states] == [boundary]
    engine.end(0)
    assert engine.would_hit("a" * 22).num_tokens == boundary


# -- drafters of several modules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lookahead", "cached"), [(0, [1, 2]), (1, [1, 2]), (2, [1]), (3, [1])])
def test_prefill_lookahead_delays_the_keys_of_the_last_tokens(lookahead, cached):
    """A drafter of L modules prefills the last L - 1 tokens again with the next chunk, so their block waits."""
    engine = Engine(full(drops_last_block=True), prefill_lookahead=lookahead)
    engine.admit(0, "aaaabbbbcccc", cap=8)
    assert engine.keyed() == cached
    engine.run(0, cap=lookahead or 1)
    assert engine.keyed() == [1, 2]
