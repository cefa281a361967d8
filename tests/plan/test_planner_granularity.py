"""The planner's sizes in tokens: the scheduler block, the hash block and the alignment of hits."""

from __future__ import annotations

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import DENSE_RETENTION, MambaMode
from kvplane.base.layers import RingSpec
from kvplane_plan.planner import WarningCode
from tests.plan.layers import SMALL, chunked, full, latent, named, plan, state, window

# Pages are equal, so block sizes stay as given.
FINE_AND_COARSE = named(f=(1, full(block_size=48)), w=(1, window(block_size=32, head_size=6)))
STATE_AND_FULL = named(f=(1, full(block_size=16)), m=(1, state(block_size=64)))


def sizes(cache_plan):
    return cache_plan.scheduler_block_size, cache_plan.hash_block_size, cache_plan.hit_alignment


def test_one_group_has_equal_scheduler_and_hash_block_sizes():
    assert sizes(plan(named(f=(2, full())))) == (16, 16, 16)


def test_scheduler_block_is_the_least_common_multiple_and_hash_block_the_greatest_divisor():
    assert sizes(plan(FINE_AND_COARSE)) == (96, 16, 96)


def test_without_caching_and_connector_nothing_is_hashed_finer_than_the_scheduler_block():
    assert sizes(plan(FINE_AND_COARSE, prefix_caching=False)) == (96, 96, 96)
    assert sizes(plan(FINE_AND_COARSE, prefix_caching=False, external_cache=True)) == (96, 16, 96)


def test_uncached_states_disable_finer_hashes():
    layers = named(f=(1, full()), m=(1, state(block_size=1024, mode=MambaMode.NONE)))
    assert sizes(plan(layers)) == (1024, 1024, 1024)


def test_cached_states_with_finer_hashes_let_hits_end_inside_a_block():
    cache_plan = plan(STATE_AND_FULL)
    assert cache_plan.partial_hits
    assert sizes(cache_plan) == (64, 16, 16)


def test_a_match_unit_lets_hits_end_inside_large_blocks_of_all_groups():
    layers = named(f=(1, full(block_size=64)), m=(1, state(block_size=64)))
    coarse, fine = plan(layers), plan(layers, prefix_match_unit=16)
    assert (sizes(coarse), coarse.partial_hits) == ((64, 64, 64), False)
    assert (sizes(fine), fine.partial_hits) == ((64, 16, 16), True)
    (warning,) = coarse.warnings
    assert (warning.code, warning.figures) == (WarningCode.COARSE_HITS, (64, 16))
    assert not fine.warnings


@pytest.mark.parametrize(
    ("layers", "options", "suggested"),
    [
        (named(l=(1, latent(block_size=128)), m=(1, state(block_size=128))), {}, [64]),
        (named(l=(1, latent(block_size=48)), m=(1, state(block_size=48))), {}, [16]),
        (named(f=(1, full(block_size=40)), m=(1, state(block_size=40))), {}, []),
        (named(f=(1, full(block_size=64)), m=(1, state(block_size=64))), {"prefix_caching": False}, []),
        (named(f=(1, full(block_size=64)), m=(1, state(block_size=64, mode=MambaMode.NONE))), {}, []),
        (named(f=(1, full(block_size=64)), m=(1, state(block_size=64)), w=(1, window(block_size=64))), {}, []),
        (named(f=(1, full(block_size=16)), m=(1, state(block_size=64))), {}, []),
        (FINE_AND_COARSE, {}, []),
    ],
)
def test_a_match_unit_is_suggested_where_it_makes_hits_finer(layers, options, suggested):
    warnings = plan(layers, **options).warnings
    assert [one.figures[1] for one in warnings if one.code is WarningCode.COARSE_HITS] == suggested


def test_state_blocks_of_one_hash_allow_no_partial_hits():
    assert not plan(named(f=(1, full()), m=(1, state(block_size=16)))).partial_hits


def test_a_window_with_blocks_larger_than_a_hash_allows_no_partial_hits():
    layers = (*STATE_AND_FULL, *named(w=(1, window(block_size=32, head_size=2))))
    assert not plan(layers).partial_hits
    fine = (*STATE_AND_FULL, *named(w=(1, window(block_size=16))))
    assert plan(fine).partial_hits, "a window whose block is the hash block can take part"


def test_a_ring_is_never_cached_so_its_block_size_does_not_count():
    ring = RingSpec(**{**SMALL, "block_size": 4, "head_size": 16})
    assert sizes(plan(named(f=(1, full(block_size=16)), r=(1, ring)))) == (16, 16, 16)


def test_context_parallelism_multiplies_the_blocks_of_split_layers_only():
    assert sizes(plan(named(f=(2, full())), dcp_size=4)) == (64, 64, 64)
    assert sizes(plan(named(f=(2, full(dcp_sharded=False))), dcp_size=4)) == (16, 16, 16)


def test_context_parallelism_allows_partial_hits_with_coarse_hashes():
    layers = named(f=(1, full(block_size=16)), m=(1, state(block_size=16)))
    cache_plan = plan(layers, dcp_size=2)
    assert (sizes(cache_plan), cache_plan.partial_hits) == ((32, 16, 16), True)


def test_hash_block_size_can_be_set():
    assert sizes(plan(FINE_AND_COARSE, prefix_match_unit=8)) == (96, 8, 96)
    assert sizes(plan(named(f=(1, full())), prefix_match_unit=16)) == (16, 16, 16)


@pytest.mark.parametrize(
    ("layers", "unit"),
    [
        (FINE_AND_COARSE, 32),  # does not divide 48
        (named(f=(1, full())), 8),  # one group: the block size or nothing
    ],
)
def test_an_invalid_hash_block_size_is_refused(layers, unit):
    with pytest.raises(InvalidArgument, match="prefix_match_unit"):
        plan(layers, prefix_match_unit=unit)


def test_a_prefix_match_unit_inside_a_compressed_entry_is_refused():
    compressed = latent(block_size=64, tokens_per_state=32, head_size=64)
    layers = (*STATE_AND_FULL, *named(c=(1, compressed)))
    with pytest.raises(InvalidArgument, match="hits must be multiples of 32 tokens"):
        plan(layers, prefix_match_unit=16)
    assert plan(layers, prefix_match_unit=16, prefix_caching=False).hit_alignment == 64


# Options that do not suit the groups


@pytest.mark.parametrize("interval", [0, DENSE_RETENTION, 96, 960])
def test_retention_interval_of_whole_scheduler_blocks_is_accepted(interval):
    assert plan(FINE_AND_COARSE, retention_interval=interval).options.retention_interval == interval


def test_retention_interval_of_partial_scheduler_blocks_is_refused():
    with pytest.raises(InvalidArgument, match="retention_interval: 100 tokens are not whole blocks"):
        plan(FINE_AND_COARSE, retention_interval=100)


def test_retention_interval_without_window_or_state_is_refused_unless_0():
    plan(named(f=(1, full())), retention_interval=0)
    with pytest.raises(InvalidArgument, match="no effect on this model"):
        plan(named(f=(1, full())), retention_interval=64)


def test_more_drafts_than_a_dropped_block_holds_are_refused():
    layers = named(f=(1, full()))
    plan(layers, drops_last_block=True, prefill_lookahead=16)
    plan(layers, prefill_lookahead=17)
    with pytest.raises(InvalidArgument, match="prefill_lookahead: 17 drafts exceed a block of 16"):
        plan(layers, drops_last_block=True, prefill_lookahead=17)


@pytest.mark.parametrize("spec", [window(), chunked()])
def test_local_layers_cannot_be_split_over_context_parallel_ranks(spec):
    with pytest.raises(InvalidArgument, match=r"dcp_size: .* 'a\.0' cannot be split by tokens"):
        plan(named(a=(1, spec)), dcp_size=2)
