"""Tokens that the scheduler aligns to, that a hash covers, and that a hit is a multiple of."""

from __future__ import annotations

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import DENSE_RETENTION, MambaMode
from kvplane.base.layers import RingSpec
from tests.core.planner_layers import SMALL, chunked, full, latent, named, plan, state, window

# Pages are equal, so block sizes stay as given.
FINE_AND_COARSE = named(f=(1, full(block_size=48)), w=(1, window(block_size=32, head_size=6)))
STATE_AND_FULL = named(f=(1, full(block_size=16)), m=(1, state(block_size=64)))


def sizes(cache_plan):
    return cache_plan.scheduler_block_size, cache_plan.hash_block_size, cache_plan.hit_alignment


def test_one_group_has_one_block_size():
    assert sizes(plan(named(f=(2, full())))) == (16, 16, 16)


def test_several_groups_schedule_by_the_least_common_multiple_and_hash_by_the_greatest_divisor():
    assert sizes(plan(FINE_AND_COARSE)) == (96, 16, 96)


def test_without_caching_and_connector_nothing_is_hashed_finer_than_the_scheduler_block():
    assert sizes(plan(FINE_AND_COARSE, prefix_caching=False)) == (96, 96, 96)
    assert sizes(plan(FINE_AND_COARSE, prefix_caching=False, external_cache=True)) == (96, 16, 96)


def test_states_that_are_not_cached_turn_finer_hashing_off():
    layers = named(f=(1, full()), m=(1, state(block_size=1024, mode=MambaMode.NONE)))
    assert sizes(plan(layers)) == (1024, 1024, 1024)


def test_cached_states_with_finer_hashes_let_hits_end_inside_a_block():
    cache_plan = plan(STATE_AND_FULL)
    assert cache_plan.partial_hits
    assert sizes(cache_plan) == (64, 16, 16)


def test_a_state_block_as_fine_as_the_hash_has_no_inside():
    assert not plan(named(f=(1, full()), m=(1, state(block_size=16)))).partial_hits


def test_a_window_of_coarser_blocks_ends_hits_at_whole_blocks():
    layers = (*STATE_AND_FULL, *named(w=(1, window(block_size=32, head_size=2))))
    assert not plan(layers).partial_hits
    fine = (*STATE_AND_FULL, *named(w=(1, window(block_size=16))))
    assert plan(fine).partial_hits, "a window whose block is the hash block can take part"


def test_a_ring_is_never_cached_so_its_block_size_does_not_count():
    ring = RingSpec(**{**SMALL, "block_size": 4, "head_size": 16})
    assert sizes(plan(named(f=(1, full(block_size=16)), r=(1, ring)))) == (16, 16, 16)


def test_context_parallelism_stretches_the_blocks_of_split_layers_only():
    assert sizes(plan(named(f=(2, full())), dcp_size=4)) == (64, 64, 64)
    assert sizes(plan(named(f=(2, full(dcp_sharded=False))), dcp_size=4)) == (16, 16, 16)


def test_with_context_parallelism_hits_end_inside_states_even_when_hashes_are_as_coarse():
    layers = named(f=(1, full(block_size=16)), m=(1, state(block_size=16)))
    cache_plan = plan(layers, dcp_size=2)
    assert (sizes(cache_plan), cache_plan.partial_hits) == ((32, 16, 16), True)


def test_the_hash_block_can_be_chosen():
    assert sizes(plan(FINE_AND_COARSE, prefix_match_unit=8)) == (96, 8, 96)
    assert sizes(plan(named(f=(1, full())), prefix_match_unit=16)) == (16, 16, 16)


@pytest.mark.parametrize(
    ("layers", "unit"),
    [
        (FINE_AND_COARSE, 32),  # does not divide 48
        (named(f=(1, full())), 8),  # one group: the block size or nothing
    ],
)
def test_a_hash_block_that_does_not_suit_is_refused(layers, unit):
    with pytest.raises(InvalidArgument, match="prefix_match_unit"):
        plan(layers, prefix_match_unit=unit)


def test_hits_must_not_end_inside_a_compressed_entry():
    compressed = latent(block_size=64, tokens_per_state=32, head_size=64)
    layers = (*STATE_AND_FULL, *named(c=(1, compressed)))
    with pytest.raises(InvalidArgument, match="hits must be multiples of 32 tokens"):
        plan(layers, prefix_match_unit=16)
    assert plan(layers, prefix_match_unit=16, prefix_caching=False).hit_alignment == 64


# Options that do not suit the groups


@pytest.mark.parametrize("interval", [0, DENSE_RETENTION, 96, 960])
def test_retention_in_whole_scheduler_blocks_is_taken(interval):
    assert plan(FINE_AND_COARSE, retention_interval=interval).options.retention_interval == interval


def test_retention_in_broken_blocks_is_refused():
    with pytest.raises(InvalidArgument, match="retention_interval: 100 tokens are not whole blocks"):
        plan(FINE_AND_COARSE, retention_interval=100)


def test_retention_without_window_or_state_is_refused_and_zero_is_ignored():
    plan(named(f=(1, full())), retention_interval=0)
    with pytest.raises(InvalidArgument, match="no effect on this model"):
        plan(named(f=(1, full())), retention_interval=64)


def test_the_block_that_drafts_drop_must_hold_all_drafts_of_a_step():
    layers = named(f=(1, full()))
    plan(layers, drops_last_block=True, prefill_lookahead=16)
    plan(layers, prefill_lookahead=17)
    with pytest.raises(InvalidArgument, match="prefill_lookahead: 17 drafts exceed a block of 16"):
        plan(layers, drops_last_block=True, prefill_lookahead=17)


@pytest.mark.parametrize("spec", [window(), chunked()])
def test_local_layers_cannot_be_split_over_context_parallel_ranks(spec):
    with pytest.raises(InvalidArgument, match=r"dcp_size: .* 'a\.0' cannot be split by tokens"):
        plan(named(a=(1, spec)), dcp_size=2)
