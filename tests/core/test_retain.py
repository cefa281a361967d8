"""Retained prefixes are evicted after all others, and change nothing else: see `spec/retained.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvplane import wire
from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import AlignSpec, EvictionPolicy
from kvplane.base.sections import Retain
from kvplane.base.step import Part, Step
from kvplane.base.values import MAX_RETAINED, MAX_RETAINED_NS, MAX_RETAINED_PER_BLOCK, RetainOutcome
from kvplane_core.face import inspect
from kvplane_core.face.state import export_state, read_entries
from kvplane_core.spec.loading import load_state
from kvplane_service.decisions.text import operation_lines
from tests.core.builders import Engine, digests, full, new_replica, state, used_of, window
from tests.core.test_split import split_spec

TEXT = "aaaabbbbcccc"
RETAINED, RELEASED, OVER_BUDGET, TOO_MANY, OTHER_OWNER = list(RetainOutcome)[:5]
FOREVER = 10**9
ALIGNED = AlignSpec(4, 4096)
POLICIES = {
    "lru": (full(), EvictionPolicy.LRU),
    "window_tail": (window(6), EvictionPolicy.WINDOW_TAIL),
    "turn_tail": (state(), EvictionPolicy.TURN_TAIL),
    "hazard": (full(), EvictionPolicy.HAZARD),
}


def holding(*groups, text=TEXT, num_blocks=21, **changes):
    """An engine that has cached a text, whose blocks are free."""
    engine = Engine(*(groups or (full(),)), num_blocks=num_blocks, **changes)
    serve(engine, text)
    return engine


def serve(engine, text, slot=0):
    """Compute a text and end it; returns the hit."""
    hit = engine.admit(slot, text + "x").hit
    while engine.computed(slot) <= len(text):
        engine.run(slot)
    engine.end(slot)
    engine.idle()
    return hit


def rows_for(engine, text=TEXT, owner="", priority=0, until=FOREVER, percent=100, now=0, domain=""):
    hashes = digests(engine.spec, text)
    columns = {"domain": [domain], "owner": [owner], "priority": [priority], "until_ns": [until], "percent": [percent]}
    return Retain([len(hashes)], b"".join(hashes), now_ns=[now], **columns)


def retain(engine, text=TEXT, **columns):
    """Retain a text; returns (hit, blocks, left, outcome)."""
    (result,) = engine.step(Part(retain=rows_for(engine, text, **columns)))
    done = result.retained
    return done.hit[0], done.blocks[0], done.left[0], RetainOutcome(done.outcome[0])


def flood(engine, times=30, slot=1):
    """Other prompts, which together need the pool several times."""
    for number in range(times):
        serve(engine, chr(200 + number) * 12, slot)


def kept(engine, text=TEXT):
    return engine.outside(text + "x")


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_retained_survives_pressure_that_leaves_other_blocks(policy):
    group, eviction = POLICIES[policy]
    for is_retained in (False, True):
        engine = holding(group, eviction=eviction, align=ALIGNED)
        if is_retained:
            assert retain(engine)[0] == 12
        flood(engine)
        assert kept(engine) == (12 if is_retained else 0)


def test_what_a_hit_needs_of_windows_and_states_is_retained():
    engine = holding(full(), window(6), state(), num_blocks=41, align=ALIGNED)
    assert retain(engine)[:2] == (12, 3 + 2 + 1)
    flood(engine)
    assert serve(engine, TEXT) == 12


def test_an_allocation_takes_what_is_retained_when_nothing_else_is_free():
    engine = holding(num_blocks=21)
    retain(engine, priority=100)
    asked = engine.admit(1, "z" * 78)  # all 20 blocks
    assert asked.granted == 78
    assert kept(engine) == 0
    assert not engine.pool.retained.each
    engine.end(1)
    flood(engine, 3)


def test_lower_priorities_are_evicted_first_and_ends_of_prefixes_before_beginnings():
    engine = holding(num_blocks=21)
    serve(engine, "ddddeeeeffff")
    retain(engine, priority=7)
    retain(engine, "ddddeeeeffff", priority=70)
    engine.admit(1, "z" * 60)  # 15 of 20 blocks: one retained block
    assert (kept(engine), kept(engine, "ddddeeeeffff")) == (8, 12)
    engine.extend(1, "z" * 8)
    assert (kept(engine), kept(engine, "ddddeeeeffff")) == (0, 12)
    engine.extend(1, "z" * 4)
    assert kept(engine, "ddddeeeeffff") == 8


def test_a_use_makes_it_the_last_one_of_its_priority():
    engine = holding(num_blocks=21)
    serve(engine, "ddddeeeeffff")
    retain(engine, "ddddeeeeffff", priority=7)
    retain(engine, priority=7)
    assert serve(engine, "ddddeeeeffff", slot=2) == 12
    engine.admit(1, "z" * 68)
    assert (kept(engine), kept(engine, "ddddeeeeffff")) == (0, 12)


def test_it_ends_with_its_time_and_by_a_release():
    for how in ("time", "release", "time alone"):
        engine = holding()
        retain(engine, until=100)
        assert engine.step(Part(retain=Retain(now_ns=[99])))[0].retained.next_end_ns == [100]
        flood(engine)
        assert kept(engine) == 12
        if how == "release":
            assert retain(engine, until=0, now=99) == (0, 0, 21, RELEASED)
        else:
            (result,) = engine.step(Part(retain=Retain(now_ns=[100])))
            assert result.retained.next_end_ns == []
        flood(engine)
        assert kept(engine) == 0
        assert "retained" not in [name for name, _ in read_entries(export_state(engine.replica))]


def test_a_key_is_retained_while_any_retention_has_it():
    engine = holding()
    retain(engine, "aaaabbbb", priority=90, until=50)
    retain(engine, TEXT, priority=10, until=100)
    assert used_of(engine.pool.retained) == {"": [3]}
    assert retain(engine, "aaaabbbb", until=0)[3] is RELEASED
    flood(engine)
    assert kept(engine) == 12


def test_a_renewal_replaces_the_end_and_the_priority():
    engine = holding()
    retain(engine, until=50, priority=1)
    retain(engine, until=500, priority=2)
    engine.step(Part(retain=Retain(now_ns=[60])))
    flood(engine)
    assert kept(engine) == 12
    assert [one.priority for one in engine.pool.retained.each.values()] == [2]


def test_a_share_is_for_each_owner_and_more_is_refused_with_what_is_left():
    engine = holding(num_blocks=41)
    serve(engine, "ddddeeeeffff")
    assert retain(engine, owner="a", percent=10) == (12, 3, 1, RETAINED)  # 4 of 41
    assert retain(engine, "ddddeeeeffff", owner="a", percent=10) == (12, 3, 1, OVER_BUDGET)
    assert len(engine.pool.retained.each) == 1
    assert retain(engine, "ddddeeeeffff", owner="b", percent=10)[3] is RETAINED
    assert retain(engine, owner="a", percent=7)[3] is OVER_BUDGET  # a renewal with a smaller share
    assert retain(engine, owner="a", until=0)[3] is RELEASED
    assert retain(engine, "ddddeeeeffff", owner="a", percent=10) == (12, 3, 1, RETAINED)


def test_what_was_lost_counts_no_more():
    engine = holding(num_blocks=21)
    retain(engine, owner="a", percent=15)
    engine.admit(1, "z" * 78)
    engine.end(1)
    serve(engine, "ddddeeeeffff")
    assert retain(engine, "ddddeeeeffff", owner="a", percent=15) == (12, 3, 0, RETAINED)


def test_a_release_of_what_others_retain_is_refused():
    engine = holding()
    retain(engine, owner="a")
    assert retain(engine, owner="b", until=0)[3] is OTHER_OWNER
    assert retain(engine, "aaaabbbb", owner="b", until=0)[3] is RELEASED  # no owner retains exactly this
    flood(engine)
    assert kept(engine) == 12


def test_the_number_of_prefixes_is_limited():
    engine = holding(num_blocks=MAX_RETAINED // MAX_RETAINED_PER_BLOCK)
    row = rows_for(engine, "aaaa")
    names = ("num_hashes", "domain", "priority", "until_ns", "percent")
    many = {name: getattr(row, name) * MAX_RETAINED for name in names}
    owners = [str(number) for number in range(MAX_RETAINED)]
    (result,) = engine.step(Part(retain=Retain(hashes=row.hashes * MAX_RETAINED, owner=owners, **many)))
    assert set(result.retained.outcome) == {RETAINED}
    assert retain(engine, "aaaa")[3] is TOO_MANY
    assert retain(engine, "aaaa", owner="7", priority=3)[3] is RETAINED


def test_what_all_prefixes_need_is_limited_though_they_share_it():
    engine = holding()  # 21 blocks, and prefixes of three
    most = MAX_RETAINED_PER_BLOCK * 21 // 3
    assert {retain(engine, owner=str(number))[3] for number in range(most)} == {RETAINED}
    assert retain(engine, owner="one more") == (12, 3, 21, TOO_MANY)
    assert retain(engine, owner="0", priority=3)[3] is RETAINED
    assert retain(engine, owner="1", until=0)[3] is RELEASED
    assert retain(engine, owner="one more")[3] is RETAINED


def test_prefixes_of_other_domains_and_unknown_ones_retain_nothing():
    engine = holding()
    assert retain(engine, domain="other") == (0, 0, 21, RETAINED)
    assert retain(engine, "zzzz") == (0, 0, 21, RETAINED)
    assert not engine.pool.retained.each


def test_a_part_of_a_prefix_that_is_cached_is_retained():
    engine = holding()
    assert retain(engine, TEXT + "eeee")[:2] == (12, 3)
    flood(engine)
    assert kept(engine) == 12


def test_running_requests_keep_the_mark_of_their_blocks():
    engine = holding()
    engine.admit(5, TEXT + "yy")
    retain(engine)
    flood(engine, 5)
    engine.end(5)
    flood(engine)
    assert kept(engine) == 12


def test_a_reset_and_an_eviction_by_the_engine_end_it():
    engine = holding()
    retain(engine)
    engine.cache(evicted=[engine.pool.blocks_of(next(iter(engine.pool.retained.of_key)))[0]])
    assert sum(map(len, engine.pool.retained.of_key.values())) == 2
    assert engine.cache(reset=True).reset_done
    assert not engine.pool.retained.each
    assert not list(engine.pool.retained)


def test_a_new_engine_life_keeps_what_the_memory_still_has():
    engine = holding()
    retain(engine, priority=5)
    stamps = list(engine.pool.stamp)
    lost = engine.pool.blocks_of(next(iter(engine.pool.retained.of_key)))[0]
    stamps[lost] = 0
    engine.replica.begin_epoch(1, stamps)
    inspect.check(engine.replica)
    assert sum(map(len, engine.pool.retained.of_key.values())) == 2
    engine.seq = 0
    flood(engine)
    assert kept(engine) == 8


def test_the_state_has_it_only_while_something_is_retained():
    engine = holding()
    before = export_state(engine.replica)
    retain(engine, owner="a", priority=3)
    engine.admit(5, "aaaabb")
    engine.idle()
    raw = export_state(engine.replica)
    other = load_state(engine.spec, raw)
    inspect.check(other)
    assert export_state(other) == raw
    assert b"retained" not in before
    release = Part(retain=rows_for(engine, until=0, owner="a"))
    other.apply(Step(0, engine.seq + 1, [release], executed_through=engine.seq))
    assert not other.coordinator.pool.retained.each


WRONG: dict[str, dict[str, Any]] = {
    "retain.num_hashes[0]": {"num_hashes": [0], "hashes": b""},
    "retain.hashes": {"hashes": b"x"},
    "retain.domain": {"domain": ["a", "b"]},
    "retain.owner": {"owner": ["a" * 257]},
    "retain.priority": {"priority": [101]},
    "retain.percent": {"percent": [101]},
    "retain.until_ns[0]": {"until_ns": [MAX_RETAINED_NS + 1]},
    "retain.until_ns": {"until_ns": [1 << 63]},
    "retain.now_ns": {"now_ns": [1, 2]},
}


@pytest.mark.parametrize("field", WRONG)
def test_a_wrong_row_is_named_and_changes_nothing(field):
    engine = holding()
    before = engine.digest
    with pytest.raises(InvalidArgument) as refused:
        engine.replica.apply(Step(0, engine.seq + 1, [Part(retain=replace(rows_for(engine), **WRONG[field]))]))
    assert refused.value.field == f"parts[0].{field}"
    assert engine.digest == before


def test_split_pages_are_refused_by_name():
    replica = new_replica(split_spec())
    with pytest.raises(InvalidArgument, match="split pages") as refused:
        replica.apply(Step(0, 1, [Part(retain=rows_for(holding()))]))
    assert refused.value.field == "parts[0].retain"


def test_a_decision_says_what_is_retained():
    engine = holding()
    rows = rows_for(engine, owner="a")
    step = Step(0, engine.seq + 1, [Part(retain=rows)], executed_through=engine.seq)
    result = engine.replica.apply(step)
    lines = list(operation_lines(step, result))
    assert any("retain 3 hashes for 'a': hit 12, 3 blocks" in line for line in lines), lines
    assert wire.decode_result(wire.encode_result(result)).parts[0].retained.hit[0] == 12
