"""`check` finds every inconsistency of a replica's state: each one is planted here, and the check names it."""

from __future__ import annotations

import pytest

from kvplane.base.step import End
from kvplane_core.face import inspect
from tests.core.builders import Engine, digests, fake_digest, full, state

pytestmark = pytest.mark.specification  # faults are planted in its structures


@pytest.fixture
def engine():
    """Slot 0 runs with blocks 1, 2, 3; slot 1 is held with 4; blocks 5 and 6 are cached and free."""
    engine = Engine(full(), num_blocks=12)
    engine.admit(0, "aaaabbbbc")
    engine.admit(1, "zzz")
    engine.end(1, how=End.HELD)
    engine.serve(2, "ccccdddd")
    assert engine.keyed() == [1, 2, 5, 6]
    return engine


def lost_reference(engine):
    engine.pool.references[1] -= 1
    return "block 1: 0 references, 1 holders"


def wrong_count(engine):
    engine.pool.references[3] += 1
    return "block 3: 2 references, 1 holders"


def reference_of_a_free_block(engine):
    engine.pool.references[6] = 1
    return "block 6: 1 references, 0 holders"


def double_free(engine):
    engine.pool.free.append([3])
    return "block 3: 1 holders, free: True"


def lost_block(engine):
    engine.pool.free.remove(8)
    return "block 8: 0 holders, free: False"


def null_block_freed(engine):
    engine.pool.free.append([0])
    return "the null block is free"


def null_block_keyed(engine):
    engine.pool.key[0] = ("", 0, fake_digest(1))
    return "the null block has a key"


def block_of_no_pool_free(engine):
    engine.pool.free.append([99])
    return "free list: block 99 twice, or none of the pool"


def key_without_map_entry(engine):
    engine.pool.key[3] = ("", 0, fake_digest(1))
    return "5 keys on blocks, 4 in the index"


def map_entry_without_key(engine):
    engine.pool.key[2] = None
    return "is not on block 2"


def map_entry_to_another_block(engine):
    first, second = digests(engine.spec, "aaaabbbb")
    engine.pool.index["", 0, first], engine.pool.index["", 0, second] = [2], [1]
    return "is not on block"


def block_twice_under_a_key(engine):
    (first, _) = digests(engine.spec, "aaaabbbb")
    engine.pool.index["", 0, first] = [1, 1]
    return r"blocks \[1, 1\]"


def empty_map_entry(engine):
    engine.pool.index["", 0, fake_digest(1)] = []
    return r"blocks \[\]"


def further_key_without_a_primary(engine):
    engine.pool.register(1, ("", 0, fake_digest(1)), 2)
    engine.pool.register(3, ("", 0, fake_digest(2)), 2)
    engine.pool.more_keys[3] = engine.pool.more_keys.pop(1)
    engine.pool.index["", 0, fake_digest(1)] = [3]
    primary = engine.pool.key[3]
    engine.pool.key[3] = None
    del engine.pool.index[primary]
    return "block 3: further keys .* without a primary one"


def tentative_key_of_no_step(engine):
    engine.pool.key_step[1] = 99
    return "block 1: its key waits for step 99, which has no record of it"


def two_blocks_with_one_stamp(engine):
    engine.pool.stamp[1] = engine.pool.stamp[2]
    return "blocks 1 and 2 have the same stamp"


def keyed_block_without_a_stamp(engine):
    engine.pool.stamp[1] = 0
    return "block 1 has a key and no stamp"


def wrong_number_running(engine):
    engine.replica.requests.num_running += 1
    return "1 run, the count says 2"


def waiting_request_with_blocks(engine):
    engine.add(3, "eeee")
    engine.replica.requests.running[0] = False
    engine.replica.requests.num_running = 0
    return "slot 0 holds blocks of group 0, not running"


def held_flag_without_blocks(engine):
    engine.replica.requests.held[0] = True
    return "slot 0: blocks of a transfer are not held, or held too long"


def held_blocks_without_a_flag(engine):
    engine.replica.requests.held[1] = False
    return "slot 1: blocks of a transfer are not held, or held too long"


def busy_block_that_is_free(engine):
    engine.pool.busy.add(8)
    return "block 8: 0 references, 1 holders"


def busy_block_with_a_holder(engine):
    engine.pool.busy.add(3)
    engine.pool.references[3] += 1
    return "block 3 is under a load of an earlier epoch and has 2 holders"


def busy_block_with_a_key(engine):
    engine.pool.hold_busy([8])
    engine.pool.register(8, ("", 0, fake_digest(1)), 4)
    return "block 8 is under a load of an earlier epoch and has a key"


def negative_in_flight(engine):
    engine.replica.requests.in_flight[0] = -1
    return "slot 0: -1 tokens in flight"


def block_outside_the_pool(engine):
    engine.replica.coordinator.managers[0].table[0].append(12)
    return "slot 0: a block outside the pool"


def caching_beyond_the_table(engine):
    engine.replica.coordinator.managers[0].num_cached[0] = 4
    return "slot 0: 4 cached blocks in a table of 3"


def partial_hit_that_moved(engine):
    engine.replica.coordinator.managers[0].partial_hit[0] = (1, 3)
    return "slot 0: shared block 3 is not at index 1 of its table"


FAULTS = [
    lost_reference, wrong_count, reference_of_a_free_block, double_free, lost_block,
    null_block_freed, null_block_keyed, block_of_no_pool_free,
    key_without_map_entry, map_entry_without_key, map_entry_to_another_block, block_twice_under_a_key, empty_map_entry,
    further_key_without_a_primary, tentative_key_of_no_step, two_blocks_with_one_stamp,
    keyed_block_without_a_stamp, wrong_number_running, waiting_request_with_blocks, held_flag_without_blocks,
    held_blocks_without_a_flag, busy_block_that_is_free, busy_block_with_a_holder, busy_block_with_a_key,
    negative_in_flight, block_outside_the_pool, caching_beyond_the_table,
    partial_hit_that_moved,
]  # fmt: skip


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_check_names_a_planted_fault(engine, plant):
    inspect.check(engine.replica)
    expected = plant(engine)
    with pytest.raises(AssertionError, match=expected):
        inspect.check(engine.replica)


def test_check_finds_keys_where_caching_is_off():
    engine = Engine(full(), enable_caching=False)
    engine.admit(0, "aaaa")
    engine.pool.register(1, ("", 0, fake_digest(1)), 4)
    with pytest.raises(AssertionError, match="the index has keys although prefix caching is off"):
        inspect.check(engine.replica)


def test_a_snapshot_checks_references(engine):
    engine.pool.references[1] += 1
    with pytest.raises(AssertionError, match="block 1"):
        inspect.take_snapshot(engine.replica)


def test_a_snapshot_shows_the_allocator():
    engine = Engine(full(), num_blocks=12)
    engine.admit(0, "aaaabbbbc")
    engine.admit(1, "zzz")
    engine.end(1, how=End.HELD)
    engine.executed = 3
    engine.serve(2, "ccccdddd")
    seen = inspect.take_snapshot(engine.replica)
    first, second = digests(engine.spec, "aaaabbbb")
    assert tuple(seen.free_blocks) == (7, 8, 9, 10, 11, 6, 5)
    assert seen.distinct_keys == 4
    keys = list(seen.keys)
    assert [(one.block, one.num_tokens, one.tentative) for one in keys] == [
        (1, 4, False), (2, 8, False), (5, 4, True), (6, 8, True)
    ]  # fmt: skip
    assert [one.key for one in keys[:2]] == [("", 0, first), ("", 0, second)]
    running, held = seen.requests
    assert (running.slot, running.num_tokens, running.computed_tokens, running.tables) == (0, 9, 9, ((1, 2, 3),))
    assert (held.slot, held.running, held.tables) == (1, False, ((),))


def change_by_one(engine):
    """Each way of differing that later decisions can depend on, and no other way sees."""
    pool, requests, tracker = engine.pool, engine.replica.requests, engine.replica.tracker
    manager = engine.replica.coordinator.managers[0]
    key = pool.key[1]
    yield lambda: pool.free.rebuild(reversed(list(pool.free)))
    yield lambda: pool.restamp(3)
    yield lambda: setattr(pool, "executed_through", 5)
    yield lambda: pool.register(3, key, 4)
    yield lambda: (pool.unregister(1), pool.register(1, key, 4))  # now behind block 3 under the same key
    yield lambda: requests.single_group_hit.__setitem__(0, 4)
    yield lambda: requests.granted_step.__setitem__(0, 7)
    yield lambda: requests.serial.__setitem__(0, 7)
    yield lambda: requests.ends_at.__setitem__(0, 70)
    yield lambda: requests.loading.add(0)
    yield lambda: manager.num_cached.__setitem__(0, 0)
    yield lambda: manager.last_state.__setitem__(0, 1)
    yield lambda: manager.num_retired.__setitem__(0, 1)
    yield lambda: manager.has_allocated.__setitem__(0, False)
    yield lambda: manager.copies.append((1, 3))
    yield lambda: tracker.adoptions.setdefault(9, {}).update({1: [(0, 1)]})
    yield lambda: tracker.waiting.append((9, []))
    yield lambda: tracker.filling.setdefault(9, []).append(3)
    yield lambda: pool.busy.add(9)
    yield lambda: requests.content[0].digests.append(b"x")


def test_the_digest_changes_with_each_part_of_the_state():
    engine = Engine(state(), full(), num_blocks=30)
    engine.admit(0, "aaaabbbb")
    seen = [engine.digest]
    assert engine.digest == seen[0], "looking changes nothing"
    for change in change_by_one(engine):
        change()
        seen.append(engine.digest)
    assert len(set(seen)) == len(seen) == 21


def test_equal_operations_give_equal_digests():
    def played():
        engine = Engine(full(), num_blocks=9)
        engine.serve(0, "aaaabbbbc")
        engine.admit(1, "aaaabbbbdd")
        engine.run(1, text="d")
        engine.preempt(1)
        return engine.digest

    assert played() == played()


def test_a_state_has_one_key():
    engine = Engine(state(), full(), num_blocks=30)
    engine.admit(0, "aaaa")
    block = engine.table(0)[0]
    assert engine.pool.key[block] is not None
    engine.pool.register(block, ("", 0, fake_digest(1)), 2)
    with pytest.raises(AssertionError, match=f"block {block} holds one state and has 2 keys"):
        inspect.check(engine.replica)


def test_a_snapshot_has_the_length_of_every_prefix():
    """The second block holds 8 tokens, and the prompt that ended after 6 of them is found in it too."""
    engine = Engine(full(4), full(2, lookup_class=1), partial_hits=True)
    engine.admit(0, "aaaabbc")
    engine.extend(0, "b")
    seen = inspect.take_snapshot(engine.replica)
    assert [one.num_tokens for one in seen.keys if one.group == 0] == [4, 8, 6]


def books(engine):
    """Faults in the records next to tables and keys, one each."""
    requests, tracker = engine.replica.requests, engine.replica.tracker
    state_manager = engine.replica.coordinator.managers[0]
    yield "tokens in flight", lambda: requests.in_flight.__setitem__(0, 3)
    yield "a later grant", lambda: requests.granted_step.__setitem__(0, engine.seq + 1)
    yield "is executed", lambda: tracker.adoptions.__setitem__(1, {})
    yield "is executed", lambda: tracker.tentative.__setitem__(1, {})
    yield "fences", lambda: tracker.waiting.append((engine.seq + 1, []))
    yield "fences", lambda: tracker.waiting.append((1, []))
    yield "group 0 recorded contradicts", lambda: state_manager._stopped_at.__setitem__(0, {9: 4})
    yield "group 0 recorded contradicts", lambda: state_manager._stopped_at.__setitem__(0, {0: 400})
    yield "group 0 recorded contradicts", lambda: state_manager.last_state.__setitem__(0, 40)


@pytest.mark.parametrize("number", range(9))
def test_check_finds_a_fault_in_the_requests(number):
    engine = Engine(state(), full(), num_blocks=30)
    engine.admit(0, "aaaab")
    engine.run(0, text="b")
    name, spoil = list(books(engine))[number]
    spoil()
    with pytest.raises(AssertionError, match=name):
        inspect.check(engine.replica)


def test_take_of_a_block_with_references_is_an_assertion():
    engine = Engine(full())
    engine.pool.references[1] = 1
    with pytest.raises(AssertionError, match="in the free list and has references"):
        engine.pool.take(1)


def test_release_later_for_a_step_that_was_not_sent_is_an_assertion():
    engine = Engine(full())
    with pytest.raises(AssertionError, match="was not sent"):
        engine.replica.tracker.release_later([1], 9)
