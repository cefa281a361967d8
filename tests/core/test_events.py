"""Cache events report stored and removed keys in the order of the changes. Indexers and routers read them."""

from __future__ import annotations

import pytest

from kvplane.base.groups import AlignSpec, CommitRule
from kvplane.base.step import CacheEvent, EventKind, RemoveReason
from tests.core.builders import REFERENCE, SAFE, Engine, digests, full, state, stored, window

STORED, REMOVED, CLEARED = EventKind.STORED, EventKind.REMOVED, EventKind.CLEARED
PROMPT = "aaaabbbbccccd"


def test_blocks_that_fill_in_one_step_have_one_stored_event():
    engine = Engine(full())
    made = tuple(digests(engine.spec, PROMPT))
    (event,) = engine.admit(3, PROMPT, news={"domain": "blue"}).result.events
    assert event == CacheEvent(
        STORED,
        group=0,
        hashes=made,
        blocks=(1, 2, 3),
        domain="blue",
        parent=b"",
        block_size=4,
        slot=3,
        start=0,
        end=12,
        block_starts=(0, 4, 8),
    )


def test_stored_event_parent_is_the_hash_before_the_range():
    engine = Engine(full())
    first, second, third = digests(engine.spec, PROMPT)
    engine.admit(0, PROMPT, cap=5)
    (event,) = engine.run(0, cap=3).result.events
    assert (event.parent, event.hashes, event.start, event.end) == (first, (second,), 4, 8)
    (event,) = engine.run(0).result.events
    assert (event.parent, event.hashes) == (second, (third,))


def test_stored_event_has_a_parent_behind_a_null_block():
    """The window's block 1 has left the table; the hash chain still has what came before."""
    engine = Engine(window(4), full())
    made = digests(engine.spec, "a" * 16)
    engine.admit(0, "a" * 12)
    for _ in range(3):
        engine.run(0, text="a")
    events = engine.run(0, text="a").result.events
    assert engine.table(0)[:2] == [0, 0]
    assert [(event.group, event.parent) for event in events] == [(0, made[2]), (1, made[2])]


def test_stored_events_omit_partial_and_adopted_blocks():
    engine = Engine(full())
    assert stored(engine.admit(0, PROMPT).result.events) == [(1, 2, 3)]
    assert engine.admit(1, PROMPT).result.events == []
    assert stored(engine.run(1, text="e").result.events) == []


def test_stored_event_range_includes_blocks_without_a_key():
    """Retention 0 keeps two blocks of five; the event still says which tokens were passed."""
    engine = Engine(window(8), full(), retention_interval=0)
    made = digests(engine.spec, "a" * 20)
    sparse, whole = engine.admit(0, "a" * 20).result.events
    assert (sparse.group, sparse.start, sparse.end, sparse.block_starts) == (0, 0, 20, (8, 12))
    assert sparse.hashes == tuple(made[2:4])
    assert (whole.group, len(whole.hashes)) == (1, 5)


@pytest.mark.parametrize(("rule", "groups"), [(SAFE, [1]), (REFERENCE, [0, 1])])
def test_stored_event_of_a_range_without_keys_only_under_the_reference_rule(rule, groups):
    engine = Engine(window(4), full(), retention_interval=0, commit=rule)
    engine.admit(0, "a" * 21, cap=8)
    events = engine.run(0, cap=4).result.events
    assert [event.group for event in events] == groups
    assert [event.group for event in events if event.hashes] == [1]


def test_stored_events_are_per_group_in_group_order():
    engine = Engine(full(4), full(8, lookup_class=1))
    events = engine.admit(0, "a" * 9).result.events
    assert [(event.group, event.block_size, event.start, event.end) for event in events] == [(0, 4, 0, 8), (1, 8, 0, 8)]


def test_removed_event_of_an_eviction_precedes_the_stored_event():
    engine = Engine(full(), num_blocks=4)
    first, second, third = digests(engine.spec, "aaaabbbbcccc")
    engine.serve(0, "aaaabbbbcccc", news={"domain": "blue"})
    events = engine.admit(1, "zzzzyyyyx").result.events
    gone = [(event.kind, event.hashes, event.blocks, event.domain, event.reason) for event in events[:3]]
    assert gone == [
        (REMOVED, (third,), (3,), "blue", RemoveReason.EVICTED),
        (REMOVED, (second,), (2,), "blue", RemoveReason.EVICTED),
        (REMOVED, (first,), (1,), "blue", RemoveReason.EVICTED),
    ]
    assert [event.kind for event in events[3:]] == [STORED]


def test_removed_event_names_one_of_two_equal_blocks():
    engine = Engine(full())
    engine.admit(0, "aaaab", news={"skip_reading": 1})
    engine.admit(1, "aaaab", news={"skip_reading": 1})
    (event,) = engine.cache(evicted=[1]).events
    assert (event.kind, event.blocks, event.group) == (REMOVED, (1,), 0)
    assert engine.would_hit("aaaab").blocks == ([3],)


@pytest.mark.parametrize("commit", CommitRule)
def test_a_moved_state_has_a_removed_and_a_stored_event(commit):
    """The request continues in the page that has the key of its prompt's last boundary. The reference has no event."""
    aligned = AlignSpec(8, 4096, stop_at_tail=True)
    partial = {"partial_hits": True, "hash_block_size": 4, "scheduler_block_size": 8, "align": aligned}
    engine = Engine(full(8), state(8), **partial, commit=commit)
    engine.admit(0, "aaaaaaaabbbbcde")
    while engine.computed(0) < 12:
        engine.run(0)
    made = digests(engine.spec, "aaaaaaaabbbbcde")
    (source,) = engine.pool.blocks_of(("", 1, made[2]))
    events = engine.run(0).result.events
    (target,) = engine.pool.blocks_of(("", 1, made[2]))
    moved = [
        CacheEvent(REMOVED, 1, (made[2],), (source,), reason=RemoveReason.MOVED),
        CacheEvent(STORED, 1, (made[2],), (target,), parent=made[1], block_size=4, start=8, end=12, block_starts=(8,)),
    ]
    assert source != target
    assert [event for event in events if made[2] in event.hashes] == (moved if commit is CommitRule.SAFE else [])


def test_a_reset_emits_one_cleared_event():
    engine = Engine(full())
    engine.serve(0, PROMPT)
    assert engine.cache(reset=True).events == [CacheEvent(CLEARED)]


def test_a_new_epoch_emits_removed_events_of_unproven_keys():
    engine = Engine(full())
    engine.serve(0, PROMPT)
    memory = list(engine.pool.stamp)
    memory[2] = 0
    engine.replica.begin_epoch(1, tuple(memory))
    (event,) = engine.replica.take_events()
    assert (event.kind, event.blocks, event.reason) == (REMOVED, (2,), RemoveReason.UNVERIFIED)
    assert engine.replica.take_events() == [], "once"


def test_events_can_be_off():
    engine = Engine(full(), events=False, num_blocks=4)
    assert engine.serve(0, PROMPT[:9]).result.events == []
    assert engine.admit(1, "zzzzyyyyx").result.events == []
    assert engine.replica.group_counters()[0].evicted_blocks == 2, "evictions are counted without events too"
