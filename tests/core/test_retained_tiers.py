"""What is retained stays in tiers that retain: their slots with its keys are evicted after all others, by priority."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import SavePolicy, TierKind, TierSpec
from kvplane.base.values import MAX_RETAINED_PER_BLOCK, RetainOutcome
from kvplane_core.face import inspect
from kvplane_core.face.state import export_state
from kvplane_core.spec.loading import load_state
from tests.core.builders import digests, full, replica_spec, used_of
from tests.core.test_retain import OVER_BUDGET, RETAINED, retain
from tests.core.test_tiers import Mover
from tests.core.test_tiers import small_pools as small_pools

TEXT, OTHER = "aaaabbbbcccc", "ddddeeeeffff"
HOST = TierSpec(TierKind.HOST, 40, retained_percent=100)
DISK = TierSpec(TierKind.DISK, 40, retained_percent=100)
OVER_HOST, OVER_DISK = RetainOutcome.OVER_HOST_BUDGET, RetainOutcome.OVER_DISK_BUDGET


def holding(*texts, tiers=(HOST,), groups=(), **changes):
    """An engine that has cached these texts, whose blocks are free."""
    engine = Mover(*(groups or (full(),)), tiers=tiers, **changes)
    for text in texts or (TEXT,):
        engine.serve(0, text + "x")
    return engine


def flood(engine, times=30, first=300):
    """Other prompts, which together need the pool and the tiers several times; every job is done."""
    for number in range(times):
        engine.serve(1, "".join(chr(first + 16 * number + at) for at in range(13)))
        engine.report()


def drown(engine, first=2000):
    """The same, then a prompt that needs the whole device."""
    flood(engine, first=first)
    engine.serve(1, chr(first - 1) * 80)
    engine.report()


def held(engine, text=TEXT, number=0):
    """How many blocks of a text a tier has."""
    return sum(engine.tiers.each[number].find(key) is not None for key in keys_of(engine, text))


def keys_of(engine, text=TEXT, group=0):
    return [("", group, digest) for digest in digests(engine.spec, text)]


def in_tier(**changes):
    """An engine with OTHER in the first tier alone."""
    engine = holding(OTHER, **changes)
    flood(engine, 4)
    engine.serve(1, "z" * 80)
    engine.report()
    assert (held(engine, OTHER), engine.outside(OTHER + "x")) == (3, 0)
    return engine


@pytest.mark.parametrize("is_retained", [False, True])
def test_what_is_retained_stays_in_the_tier_behind_the_device(is_retained):
    engine = holding()
    if is_retained:
        assert retain(engine) == (12, 3, 18, RETAINED)
    drown(engine)
    assert engine.outside(TEXT + "x") == 0
    assert held(engine) == (3 if is_retained else 0)
    assert engine.tiers.each[0].num_retained == (3 if is_retained else 0)
    assert engine.ask(6, TEXT + "x").hit == (12 if is_retained else 0)


def test_a_tier_without_a_share_saves_what_is_retained_and_evicts_it_like_any_other():
    engine = holding(tiers=(replace(HOST, retained_percent=0),))
    retain(engine)
    drown(engine)
    assert held(engine) == 3
    drown(engine, first=3000)
    assert held(engine) == 0
    assert not engine.pool.retained.each, "what no place has is not retained any more"


def squeeze(engine, times):
    """Prompts that leave the device little else than what is retained, while jobs are done."""
    for number in range(times):
        engine.admit(1, chr(5000 + number) * 44)
        engine.report()
        engine.report()
        engine.end(1)


def test_retained_slots_do_not_stop_a_tier():
    engine = holding("a" * 12, "b" * 12, "c" * 12, tiers=(replace(HOST, num_blocks=8),))
    for letter, priority in zip("abc", (50, 0, 100), strict=True):
        retain(engine, letter * 12, priority=priority)
    squeeze(engine, 6)
    assert engine.tiers.counters.saved > 12


def test_lower_priorities_are_evicted_first_and_ends_of_prefixes_before_beginnings():
    texts = {"a" * 12: 50, "b" * 12: 0, "c" * 12: 100}
    engine = holding(*texts)
    for text, priority in texts.items():
        retain(engine, text, priority=priority)
    drown(engine)
    order = [key for key, _ in engine.tiers.each[0].in_order()][-9:]
    assert order == [key for text in ("b" * 12, "a" * 12, "c" * 12) for key in reversed(keys_of(engine, text))]
    retain(engine, "a" * 12, priority=0)
    order = [key for key, _ in engine.tiers.each[0].in_order()][-9:]
    assert order == [key for text in ("b" * 12, "a" * 12, "c" * 12) for key in reversed(keys_of(engine, text))]
    retain(engine, "b" * 12, until=0)
    assert engine.tiers.each[0].num_retained == 6
    last = [key for key, _ in engine.tiers.each[0].in_order()][-9:-6]
    assert last == list(reversed(keys_of(engine, "b" * 12))), "as if it were used now"


@pytest.mark.parametrize("save", SavePolicy)
def test_what_the_host_evicts_moves_to_the_disk_and_stays_there(save):
    engine = holding("a" * 12, "b" * 12, "c" * 12, tiers=(replace(HOST, num_blocks=10), replace(DISK, save=save)))
    for letter in "abc":
        retain(engine, letter * 12)
    squeeze(engine, 8)
    assert held(engine, "a" * 12, number=1) > 0
    assert engine.tiers.each[1].num_retained > 0
    drown(engine)
    assert engine.tiers.each[1].num_retained > 0


def test_a_tier_that_saves_what_is_used_twice_saves_what_is_retained():
    for is_retained in (False, True):
        engine = holding(tiers=(replace(HOST, save=SavePolicy.REUSE),))
        flood(engine, 2)
        if is_retained:
            retain(engine)
        drown(engine)
        assert held(engine) == (3 if is_retained else 0)


def test_a_prefix_that_is_only_in_a_tier_is_retained_and_counts_there():
    engine = in_tier()
    assert retain(engine, OTHER, percent=10) == (12, 3, 1, RETAINED)
    assert used_of(engine.pool.retained) == {"": [0, 3]}
    drown(engine)
    assert held(engine, OTHER) == 3


def test_what_counts_in_a_tier_is_evicted_from_the_device_like_any_other():
    engine = in_tier()
    retain(engine, OTHER)
    assert engine.ask(6, OTHER + "x").hit == 12
    engine.cache(jobs_done=engine.loads)
    engine.end(6)
    assert (engine.outside(OTHER + "x"), engine.pool.retained.num_free) == (12, 0)
    assert retain(engine, OTHER, percent=10)[3] == OVER_BUDGET, "now it would count on the device"
    assert retain(engine, OTHER, percent=20) == (12, 3, 1, RETAINED)
    assert used_of(engine.pool.retained) == {"": [3, 3]}
    assert engine.pool.retained.num_free == 3
    drown(engine)
    assert held(engine, OTHER) == 3


SHARES = {
    "host": ((replace(HOST, retained_percent=5),), 100, OVER_HOST, 2),
    "disk": ((HOST, replace(DISK, num_blocks=9, retained_percent=20)), 100, OVER_DISK, 1),
    "owner": ((replace(HOST, num_blocks=9),), 30, OVER_HOST, 2),
    "device": ((HOST,), 10, OVER_BUDGET, 2),
}


@pytest.mark.parametrize("share", SHARES)
def test_more_than_a_share_is_refused_with_what_is_left_and_changes_nothing(share):
    tiers, percent, outcome, left = SHARES[share]
    engine = holding(tiers=tiers)
    before = export_state(engine.replica)
    assert retain(engine, percent=percent) == (12, 3, left, outcome)
    assert not engine.pool.retained.each
    assert len(export_state(engine.replica)) == len(before)
    assert retain(engine, TEXT[:4], percent=percent) == (4, 1, left - 1, RETAINED)
    assert retain(engine, percent=percent) == (12, 3, left - 1, outcome)


def test_prefixes_of_an_owner_count_what_they_share_once_in_each_place():
    engine = in_tier()
    retain(engine, OTHER[:8], owner="a")
    engine.serve(0, OTHER[:4] + "x")
    assert retain(engine, OTHER, owner="a")[3] == RETAINED
    assert used_of(engine.pool.retained) == {"a": [1, 3]}
    assert retain(engine, OTHER, owner="b")[3] == RETAINED
    assert retain(engine, OTHER, owner="a", until=0)[3] is RetainOutcome.RELEASED
    assert used_of(engine.pool.retained) == {"a": [0, 2], "b": [1, 3]}
    retain(engine, OTHER, owner="b", until=0)
    retain(engine, OTHER[:8], owner="a", until=0)
    assert used_of(engine.pool.retained) == {}
    assert engine.tiers.each[0].num_retained == 0


def test_it_ends_with_its_time():
    engine = in_tier()
    retain(engine, OTHER, until=50)
    assert engine.tiers.each[0].num_retained == 3
    retain(engine, "none", now=49)
    assert engine.tiers.each[0].num_retained == 3
    retain(engine, "none", now=50)
    assert (engine.tiers.each[0].num_retained, engine.pool.retained.each) == (0, {})
    drown(engine)
    assert held(engine, OTHER) == 0


@pytest.mark.parametrize("loss", ["load", "reset", "memory", "life"])
def test_it_ends_with_the_loss_of_its_content(loss):
    engine = in_tier()
    retain(engine, OTHER)
    if loss == "load":
        engine.ask(6, OTHER + "x")
        engine.cache(jobs_failed=engine.loads)
    elif loss == "reset":
        assert engine.cache(reset=True).reset_done
    else:
        shown = engine.shown() if loss == "life" else []
        for slot in range(len(shown)):
            shown[slot] *= slot < engine.spec.num_blocks
        engine.replica.begin_epoch(1, shown, memory_is_new=loss == "memory")
        engine.seq = 0
        engine.idle()
    assert (engine.tiers.each[0].num_retained, engine.pool.retained.each) == (0, {})
    assert engine.pool.retained.of_key == {}


def test_a_save_in_vain_of_the_last_copy_ends_it():
    engine = holding()
    retain(engine)
    engine.serve(1, "y" * 40)
    assert {key in engine.tiers.each[0].writing for key in keys_of(engine)} == {True}
    engine.serve(1, "z" * 80)
    assert len(engine.pool.retained.of_key) == 3, "they may come yet"
    engine.report()
    assert engine.tiers.counters.discarded >= 3
    assert engine.pool.retained.each == {}


def test_a_new_engine_life_keeps_what_the_tiers_still_have():
    engine = in_tier()
    retain(engine, OTHER, priority=3)
    engine.replica.begin_epoch(1, engine.shown())
    assert engine.tiers.each[0].num_retained == 3
    engine.seq = 0
    drown(engine)
    assert held(engine, OTHER) == 3


def test_the_exported_state_has_retained_slots_in_their_order():
    engine = holding(TEXT, OTHER, tiers=(HOST, DISK))
    retain(engine, TEXT, priority=7)
    retain(engine, OTHER, priority=3)
    drown(engine)
    assert engine.tiers.each[0].num_retained == 6
    raw = export_state(engine.replica)
    other = load_state(engine.spec, raw)
    inspect.check(other)
    assert export_state(other) == raw
    order = [key for key, _ in other.tiers.each[0].in_order()]
    assert order[-6:-3] == [key for key, _ in engine.tiers.each[0].in_order()][-6:-3]
    assert set(order[-3:]) == set(keys_of(engine, TEXT))


def test_the_limit_of_all_prefixes_counts_slots_that_retain():
    engine = holding(tiers=(replace(HOST, num_blocks=4),))
    most = MAX_RETAINED_PER_BLOCK * (engine.spec.num_blocks + 4)
    outcomes = [retain(engine, owner=str(number), percent=100)[3] for number in range(most // 3 + 1)]
    assert outcomes == [RETAINED] * (most // 3) + [RetainOutcome.TOO_MANY]


def test_a_share_is_a_percentage():
    for percent in (-1, 101):
        with pytest.raises(InvalidArgument) as refused:
            replica_spec(full(), tiers=(replace(HOST, retained_percent=percent),)).validate()
        assert refused.value.field == "tiers[0].retained_percent"
