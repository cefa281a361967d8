"""The block pool: references, keys and the order in which free blocks are allocated."""

from __future__ import annotations

import pytest

from kvplane.base.step import EventKind, RemoveReason
from kvplane_core.face.inspect import take_snapshot
from kvplane_core.spec.pool import BlockPool
from tests.core.builders import Engine, fake_digest, full

pytestmark = pytest.mark.specification  # its pool


def pool_of(num_blocks=6, num_groups=1):
    return BlockPool(num_blocks, num_groups, enable_caching=True)


def key(number, group=0, domain=""):
    return domain, group, fake_digest(number)


def cached(pool, *numbers):
    """One block per number, registered under it and freed."""
    blocks = pool.take(len(numbers))
    for block, number in zip(blocks, numbers, strict=True):
        pool.register(block, key(number), 4)
    pool.release(blocks)
    return blocks


def find(pool, number, groups=(0,), domain=""):
    return pool.find(domain, groups, fake_digest(number))


def reasons(pool):
    return [(event.kind, event.blocks, event.reason) for event in pool.events]


# -- blocks and references ---------------------------------------------------------------------------------------------


def test_blocks_are_allocated_in_id_order_and_never_the_null_block():
    pool = pool_of(6)
    assert pool.num_free == 5
    assert pool.take(5) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0


def test_a_block_has_one_reference_per_holder_and_is_free_without():
    pool = pool_of()
    (block,) = pool.take(1)
    pool.touch([block])
    assert pool.references[block] == 2
    pool.release([block])
    assert block not in list(pool.free)
    pool.release([block])
    assert next(iter(pool.free)) == block


def test_the_null_block_counts_no_references():
    pool = pool_of()
    pool.touch([0, 0])
    pool.release([0])
    assert pool.references[0] == 0
    assert pool.count_evictable([0]) == 0


def test_release_of_a_free_block_is_an_assertion():
    pool = pool_of()
    with pytest.raises(AssertionError, match="block 3 released without a reference"):
        pool.release([3])


def test_touching_a_free_block_takes_it_off_the_free_list():
    pool = pool_of()
    (block,) = cached(pool, 7)
    assert pool.count_evictable([block]) == 1
    pool.touch([block])
    assert block not in list(pool.free)
    assert pool.count_evictable([block]) == 0
    assert find(pool, 7) == [block], "its key is none the worse"


def test_a_block_is_private_with_one_reference_and_no_key():
    pool = pool_of()
    (block,) = pool.take(1)
    assert pool.is_private(block)
    pool.touch([block])
    assert not pool.is_private(block)
    pool.release([block])
    pool.register(block, key(1), 4)
    assert not pool.is_private(block)
    assert not pool.is_private(0)


# -- the order of eviction ---------------------------------------------------------------------------------------------


def test_freed_blocks_without_a_key_go_to_the_front_and_keyed_ones_to_the_back():
    pool = pool_of(8)
    a, b, c, d = pool.take(4)
    pool.register(b, key(1), 4)
    pool.register(d, key(2), 4)
    pool.release([d, c, b, a])
    assert list(pool.free) == [c, a, 5, 6, 7, d, b]


def test_blocks_of_a_request_are_freed_tail_first():
    engine = Engine(full(), num_blocks=6)
    table = engine.serve(0, "aaaabbbbcc").table[0]
    assert table == [1, 2, 3]
    assert engine.free_order == [3, 4, 5, 2, 1]
    engine.serve(1, "zzzzyyyyxxxxwwww")
    assert engine.would_hit("aaaabbbbcc").num_tokens == 4, "the tail went, the root is still there"


def test_uncached_blocks_are_reused_before_any_cached_one():
    """Blocks that left unfilled, or a window, can never hit again; they must not push cached ones out."""
    engine = Engine(full(), num_blocks=10)
    engine.serve(0, "aaaabbbb")
    for slot in range(1, 30):
        engine.serve(slot, "zzz")
    assert engine.would_hit("aaaabbbbc").num_tokens == 8


# -- keys --------------------------------------------------------------------------------------------------------------


def test_a_key_finds_its_block_until_the_block_is_allocated():
    pool = pool_of(3)
    first, second = cached(pool, 1, 2)
    assert (find(pool, 1), find(pool, 2), find(pool, 3)) == ([first], [second], None)
    assert pool.take(1) == [first]
    assert find(pool, 1) is None
    assert find(pool, 2) == [second]
    assert pool.evicted_keys == [1]
    assert reasons(pool) == [(EventKind.REMOVED, (first,), RemoveReason.EVICTED)]


def test_a_reused_block_carries_no_old_key():
    pool = pool_of(2)
    (block,) = cached(pool, 1)
    pool.take(1)
    assert pool.key[block] is None
    pool.register(block, key(2), 4)
    assert find(pool, 1) is None
    assert find(pool, 2) == [block]


def test_keys_are_separate_per_group_and_domain():
    pool = pool_of(num_groups=2)
    a, b = pool.take(2)
    pool.register(a, key(1, group=0), 4)
    assert find(pool, 1, groups=(1,)) is None
    assert find(pool, 1, groups=(0, 1)) is None
    pool.register(b, key(1, group=1), 4)
    assert find(pool, 1, groups=(0, 1)) == [a, b]
    assert find(pool, 1, domain="tenant") is None
    assert pool.count_keys() == 2


def test_equal_content_in_two_blocks_stays_in_both_and_the_first_is_found():
    """Tables are append-only, so a block that turns out to be a duplicate is not exchanged."""
    pool = pool_of()
    first, second, third = pool.take(3)
    for block in (first, second, third):
        pool.register(block, key(1), 4)
    assert find(pool, 1) == [first]
    assert pool.count_keys() == 1
    pool.drop_keys(first, RemoveReason.DROPPED)
    assert find(pool, 1) == [second]
    pool.drop_keys(third, RemoveReason.DROPPED)
    assert find(pool, 1) == [second]
    pool.drop_keys(second, RemoveReason.DROPPED)
    assert find(pool, 1) is None
    assert pool.index == {}, "nothing is left behind"


def test_a_horizon_hides_keys_of_later_steps():
    pool = pool_of()
    first, second = pool.take(2)
    pool.step = 9
    pool.register(first, key(1), 4)
    pool.step = 5
    pool.register(second, key(1), 4)
    digest = fake_digest(1)
    assert pool.find("", (0,), digest, horizon=9) == [first]
    assert pool.find("", (0,), digest, horizon=8) == [second], "a duplicate that was there before serves"
    assert pool.find("", (0,), digest, horizon=4) is None


def test_a_block_can_have_several_keys_and_loses_them_together():
    """Prefixes that end inside the block; see partial hits."""
    pool = pool_of()
    (block,) = pool.take(1)
    pool.register(block, key(8), 8)
    pool.register(block, key(6), 6)
    pool.register(block, key(6), 6)
    assert find(pool, 8) == find(pool, 6) == [block]
    assert pool.count_keys() == 2
    pool.release([block])
    pool.take(5)
    assert find(pool, 8) is None
    assert find(pool, 6) is None
    assert [event.hashes for event in pool.events] == [(fake_digest(8),), (fake_digest(6),)]


def test_moving_keys_emits_no_event_and_leaves_the_source_unkeyed():
    pool = pool_of()
    source, target = pool.take(2)
    pool.register(source, key(1), 4)
    pool.move_keys(source, target)
    assert find(pool, 1) == [target]
    assert pool.key[source] is None
    assert pool.events == []


def test_content_without_keys_can_be_moved():
    pool = pool_of()
    source, target = pool.take(2)
    pool.register(source, key(1), 4)
    pool.drop_keys(source, RemoveReason.DROPPED)
    before = [pool.stamp[source], pool.stamp[target]]
    pool.move_keys(source, target)
    assert [pool.key[source], pool.key[target]] == [None, None]
    after = [pool.stamp[source], pool.stamp[target]]
    assert min(after) > max(before), "both pages will hold something else"


# -- dropping and reset ------------------------------------------------------------------------------------------------


def test_dropping_the_keys_of_a_block_in_use_frees_nothing():
    engine = Engine(full())
    table = engine.admit(0, "aaaabbbbc").table[0]
    result = engine.cache(evicted=[table[0]])
    assert [event.reason for event in result.events] == [RemoveReason.DROPPED]
    assert engine.table(0) == table
    assert engine.would_hit("aaaabbbbc").num_tokens == 0, "without its first block the second cannot be reached"
    assert engine.keyed() == [table[1]]


def test_dropping_no_keys_emits_no_event():
    engine = Engine(full())
    assert engine.cache(evicted=[5]).events == []


def test_reset_works_only_when_no_block_is_in_use():
    engine = Engine(full(), num_blocks=6)
    engine.serve(0, "aaaabbbbc")
    engine.admit(1, "zz")
    refused = engine.cache(reset=True)
    assert not refused.reset_done
    assert refused.events == []
    assert engine.would_hit("aaaabbbbc").num_tokens == 8
    engine.end(1)
    before = engine.free_order
    done = engine.cache(reset=True)
    assert done.reset_done
    assert [event.kind for event in done.events] == [EventKind.CLEARED]
    assert engine.free_order == before, "the order of the free list stays"
    assert engine.would_hit("aaaabbbbc").num_tokens == 0


def test_reset_drops_full_and_partial_keys():
    pool = pool_of()
    (block,) = cached(pool, 8)
    pool.register(block, key(6), 6)
    assert pool.reset()
    assert pool.count_keys() == 0
    assert pool.more_keys == {}


# -- counts ------------------------------------------------------------------------------------------------------------


def test_usage_excludes_the_null_block():
    engine = Engine(full(), num_blocks=9)
    engine.admit(0, "aaaabb")
    assert take_snapshot(engine.replica).usage == 2 / 8


def test_reserved_blocks_are_held_for_the_life_of_the_pool():
    pool = pool_of(6)
    assert pool.reserve(2) == [1, 2]
    assert pool.num_free == 3
    assert pool.reset(), "they do not count as in use"


def test_eviction_ages_are_counted_in_steps_by_powers_of_two():
    pool = pool_of(2)
    pool.step = 1
    cached(pool, 1)
    pool.step = 4
    pool.touch([1])
    pool.release([1])
    pool.step = 12
    pool.take(1)
    assert pool.residency.reuse_gap[2] == 1, "3 steps from its first use to the second: bit length 2"
    assert pool.residency.idle_before_evict[4] == 1, "8 steps unused when it was evicted"
    assert pool.residency.lifetime[4] == 1, "11 steps since it was handed out the first time"
