"""A preempted request continues from where it was: with tiers it leaves keys for the last boundary that it holds."""

from __future__ import annotations

from kvplane.base.groups import AlignSpec, SavePolicy, TierKind, TierSpec
from kvplane.base.step import Cache, Facts, Part, Run
from tests.core.builders import DEFERRED, GRANTED, full, ring, run_rows, state, tokens, window
from tests.core.test_tiers import HOST, Mover
from tests.core.test_tiers import small_pools as small_pools

TEXT, MORE = "aaaabbbbcccc", "dddd"


def running(*groups, tiers=(HOST,), **changes):
    """A request with a prompt of 12 tokens that has computed 17: a hit at 16 is possible, if its window is kept."""
    groups = groups or (window(5), full())
    engine = Mover(*groups, **{"tiers": tiers, "retention_interval": 0, "num_blocks": 41, **changes})
    engine.admit(0, TEXT)
    for letter in MORE + "e":
        engine.extend(0, letter)
    engine.idle()
    return engine


def hit_again(engine, slot=0):
    """What the request hits when it comes back, at once."""
    return engine.admit(slot).hit


def test_a_preempted_request_hits_where_it_was():
    engine = running()
    engine.preempt(0)
    assert hit_again(engine) == 16


def test_without_tiers_it_hits_where_a_repeat_of_its_prompt_does():
    engine = running(tiers=())
    engine.preempt(0)
    assert hit_again(engine) == 8


def test_a_request_without_cached_groups_leaves_nothing():
    engine = running(ring())
    engine.preempt(0)
    assert hit_again(engine) == 0


def grow(engine, *slots, **columns):
    """Each request appends a token and computes it; what lacks a block preempts the last rows."""
    facts = Facts(list(slots), appended=[1] * len(slots), tokens=tokens("z" * len(slots)))
    (result,) = engine.step(Part(facts=facts, run=Run(list(slots), **columns)))
    return result


def test_a_victim_of_another_row_hits_where_it_was():
    engine = running(num_blocks=14)
    engine.admit(1, "xxxx")
    while not grow(engine, 1).preempted:
        assert engine.table(1)
        if engine.num_free == 0:
            break
    while not grow(engine, 1, 0).preempted:
        assert engine.table(0)
    engine.end(1)
    assert hit_again(engine) >= 16


def test_a_window_that_has_gone_on_leaves_nothing():
    """For a hit at 16, the first block of the window of 7 tokens before it is needed, which 18 tokens do not need."""
    engine = running(window(7), full())
    engine.extend(0, "e")
    engine.idle()
    engine.extend(0, "e")
    engine.idle()
    assert engine.table(0)[2] == 0
    engine.preempt(0)
    assert engine.admit(0).hit == 8


def test_a_state_that_ends_with_a_block_is_left():
    engine = Mover(state(), full(), retention_interval=0, num_blocks=41, align=AlignSpec(4, 4))
    engine.admit(0, TEXT + MORE, cap=8)
    engine.idle()
    engine.preempt(0)
    assert hit_again(engine) == 8


def test_a_state_that_has_gone_on_leaves_nothing():
    engine = running(state(), full(), align=AlignSpec(4, 4))
    engine.preempt(0)
    assert hit_again(engine) == 8, "of the prompt"


def test_what_a_failed_step_computed_is_withdrawn():
    engine = Mover(window(5), full(), retention_interval=0, num_blocks=41)
    engine.admit(0, TEXT + MORE, cap=8)
    engine.idle()
    engine.executed = engine.seq
    lost = engine.step(Part(run=run_rows(0, cap=[8])))
    assert lost[0].granted == [8]
    failed = engine.seq
    engine.preempt(0)
    assert engine.would_hit(TEXT + MORE + "x").num_tokens == 16
    engine.cache(failed_steps=[failed])
    assert engine.would_hit(TEXT + MORE + "x").num_tokens == 0, "the blocks of the first eight tokens had no window"


def test_what_the_same_step_granted_is_not_computed():
    engine = running(num_blocks=14)
    engine.admit(1, "xxxx")
    while engine.num_free:
        grow(engine, 1)
    while not (result := grow(engine, 0, 1, victims=[0])).preempted:
        assert result.granted == [1, 1]
    hit = engine.would_hit(TEXT + MORE + "x")
    assert (hit.num_tokens, hit.single_group_hit) == (0, 16), "no window is left"


def test_a_request_that_waits_for_its_load_leaves_nothing():
    engine = Mover(window(5), full(), retention_interval=0)
    engine.save(TEXT)
    asked = engine.ask(3, TEXT + "x")
    assert asked.status is GRANTED
    engine.preempt(3)
    assert engine.would_hit(TEXT + "x").num_tokens == 0
    assert engine.ask(3).status in (DEFERRED, GRANTED)


def test_the_last_blocks_of_the_next_victim_are_saved_before_they_are_evicted():
    engine = Mover(full(), num_blocks=10)
    engine.admit(0, TEXT)
    engine.admit(1, TEXT.upper())
    for _ in range(4):
        grow(engine, 0, 1)
        engine.report()
    saved = {key[2] for key in engine.tiers.each[0].key.values()}
    others, digests = (engine.replica.requests.content[slot].digests for slot in (0, 1))
    assert saved >= set(digests[:3])
    assert not saved & set(others)


def test_what_is_used_once_is_saved_for_a_request_that_comes_back():
    engine = running(tiers=(TierSpec(TierKind.HOST, 64, SavePolicy.REUSE),), num_blocks=401)
    engine.end(0)
    for _ in range(4):
        engine.report()
    assert engine.tiers.each[0].num_held == 0
    engine = running(tiers=(TierSpec(TierKind.HOST, 64, SavePolicy.REUSE),), num_blocks=401)
    engine.preempt(0)
    for _ in range(9):
        engine.report()
    assert engine.tiers.each[0].num_held >= 4


def test_no_key_is_left_twice():
    engine = running()
    keyed = engine.keyed()
    engine.preempt(0)
    assert len(engine.keyed()) == len(keyed) + 1, "the window before 16"
    engine.admit(0)
    engine.step(Part(cache=Cache()))
    engine.preempt(0)
    assert len(engine.keyed()) == len(keyed) + 1
