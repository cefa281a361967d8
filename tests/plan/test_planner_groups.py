"""The planner's rules for which layers share a block table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import GroupKind, MambaMode
from kvplane.base.layers import KVSharingLayer, Layer, RingSpec, RSWASpec, SlidingWindowMLASpec
from kvplane_plan.planner import Layout, PlanOptions, WarningCode, Worker, plan_cache
from tests.plan.layers import (
    PAGE,
    SMALL,
    chunked,
    full,
    hidden,
    latent,
    named,
    names,
    plan,
    repeated,
    state,
    widths,
    window,
)

BLOCK_OUTERMOST = Layout.BLOCK_OUTERMOST


def codes(cache_plan):
    return [warning.code for warning in cache_plan.warnings]


# One group


def test_equal_layers_share_one_group():
    assert names(plan(repeated(4, full()))) == ["0 1 2 3"]


def test_layers_of_one_type_with_different_pages_share_one_group_and_keep_their_formats():
    cache_plan = plan(named(a=(2, full()), b=(1, full(head_size=8))))
    (group,) = cache_plan.groups
    assert group.layer_names == ("a.0", "a.1", "b.0")
    assert [spec.page_bytes for spec in group.specs] == [PAGE, PAGE, 2 * PAGE]
    assert cache_plan.bytes_per_block == 4 * PAGE


def test_windows_of_different_length_are_of_different_types():
    assert len(plan(named(near=(1, window(32)), far=(1, window(64)))).groups) == 2


def test_latent_windows_of_different_rows_keep_their_own_pages():
    rows = [SlidingWindowMLASpec(**{**SMALL, "head_size": size}, window=64) for size in (8, 16)]
    (group,) = plan(repeated(1, *rows)).groups
    assert [spec.page_bytes for spec in group.specs] == [PAGE, 2 * PAGE]


def test_full_layers_that_compute_with_different_windows_share_a_group():
    (group,) = plan(named(a=(1, full(computes_window=32)), b=(1, full(computes_window=64)))).groups
    assert not group.one_format


def test_layers_that_keep_every_token_share_a_group():
    layers = named(wide=(2, full()), narrow=(2, full(computes_window=32)))
    (group,) = plan(layers).groups
    assert group.one_format
    assert group.spec == full(computes_window=32)


def test_a_plan_without_layers_has_only_the_null_block():
    cache_plan = plan_cache([Worker(())], PlanOptions())
    assert (cache_plan.groups, cache_plan.num_blocks, cache_plan.capacity_tokens) == ((), 1, 0)
    assert cache_plan.max_concurrency == float("inf")


# Pages of one size


def test_group_width_is_the_count_of_the_rarest_layer_type():
    cache_plan = plan(named(f=(2, full()), w=(5, window())))
    assert names(cache_plan) == ["f.0 f.1", "w.0 w.3", "w.1 w.4", "w.2"]


def test_group_ids_follow_the_first_layer_of_each_kind():
    cache_plan = plan(repeated(2, window(), full()))
    assert [group.kind for group in cache_plan.groups] == [GroupKind.SLIDING_WINDOW, GroupKind.FULL_ATTENTION]
    assert names(cache_plan) == ["0 2", "1 3"]


@pytest.mark.parametrize(
    ("num_full", "num_window", "expected"),
    [
        (4, 5, [4, 5]),  # nearly as many: one place stays empty
        (4, 6, [4, 3, 3]),  # exactly one and a half times as many is not "nearly"
        (6, 4, [3, 3, 4]),
        (1, 3, [1, 1, 1, 1]),
    ],
)
def test_layer_types_of_similar_count_are_not_split(num_full, num_window, expected):
    assert widths(plan(named(f=(num_full, full()), w=(num_window, window())))) == expected


def test_padding_layers_are_a_warning_with_their_figures():
    (warning,) = plan(named(f=(4, full()), w=(5, window()))).warnings
    assert (warning.code, warning.figures) == (WarningCode.PADDING_LAYERS, (1, 4))
    assert warning.message == "1 of 5 layer places stay empty: up to 25.0% of the memory"


def test_the_narrower_group_leaves_padding_in_each_block():
    cache_plan = plan(named(f=(4, full()), w=(5, window())))
    assert cache_plan.bytes_per_block == 5 * PAGE
    assert cache_plan.padding_bytes == (PAGE, 0)


# Pages of different sizes, layer outermost


def test_a_smaller_page_has_more_tokens_when_the_ratio_is_whole():
    cache_plan = plan(named(f=(1, full(head_size=8)), w=(1, window())))
    assert [group.block_size for group in cache_plan.groups] == [16, 32]
    assert {group.bytes_per_block for group in cache_plan.groups} == {2 * PAGE}


def test_a_smaller_page_is_padded_when_the_ratio_is_not_whole():
    cache_plan = plan(named(f=(1, full(head_size=6)), w=(1, window())))
    assert [group.block_size for group in cache_plan.groups] == [16, 16]
    assert cache_plan.groups[1].spec.padded_page_bytes == 384


def test_a_state_is_padded_even_when_the_ratio_is_whole():
    cache_plan = plan(named(f=(1, full()), m=(1, state(PAGE // 2))))
    assert cache_plan.groups[1].spec.padded_page_bytes == PAGE
    assert cache_plan.groups[1].block_size == 16


def test_a_draft_window_with_latent_rows_of_another_size_keeps_every_token():
    layers = named(t=(3, latent()), d=(1, window(head_size=6)))
    cache_plan = plan(layers)
    assert names(cache_plan) == ["t.0 t.1 t.2 d.0"]
    assert cache_plan.groups[0].kind is GroupKind.FULL_ATTENTION
    assert codes(cache_plan) == [WarningCode.FULL_ALLOCATION]


def test_latent_rows_and_chunks_of_another_size_are_refused():
    with pytest.raises(InvalidArgument, match=r"the page of layer 't\.0'.*block-outermost"):
        plan(named(t=(3, latent()), d=(1, chunked(head_size=6))))


# Pages of different sizes, block outermost


def test_block_outermost_keeps_block_sizes_and_packs_pages_side_by_side():
    cache_plan = plan(named(f=(1, full(head_size=8)), w=(4, window())), layout=BLOCK_OUTERMOST)
    assert [group.block_size for group in cache_plan.groups] == [16, 16, 16]
    assert names(cache_plan) == ["f.0", "w.0 w.2", "w.1 w.3"], "two windows fit where a full one fits"
    assert cache_plan.bytes_per_block == 2 * PAGE


def test_a_pattern_of_pages_is_not_split_and_other_layers_follow_its_repeats():
    layers = named(
        t=(4, full()), i=(4, full(head_size=8)), w=(9, window(head_size=2))
    )  # two page sizes, four repeats; nine windows
    cache_plan = plan(layers, layout=BLOCK_OUTERMOST)
    assert widths(cache_plan) == [8, 5, 4]
    assert names(cache_plan)[1] == "w.0 w.2 w.4 w.6 w.8"


def test_state_groups_are_split_to_the_width_of_the_other_groups():
    layers = named(f=(2, full(head_size=8)), m=(9, state()))
    cache_plan = plan(layers, layout=BLOCK_OUTERMOST)
    assert widths(cache_plan) == [2, 3, 3, 3], "four states fit; nine are dealt evenly into three groups"
    assert cache_plan.bytes_per_block == 4 * PAGE


def test_layers_without_a_pattern_are_not_split():
    layers = named(f=(1, full()), a=(3, window()), b=(1, window(head_size=8)))
    assert names(plan(layers, layout=BLOCK_OUTERMOST)) == ["f.0", "a.0 a.1 a.2 b.0"]


def test_equal_pages_have_equal_groups_in_both_layouts():
    layers = named(f=(2, full()), w=(5, window()))
    assert names(plan(layers, layout=BLOCK_OUTERMOST)) == names(plan(layers))


def test_ring_groups_are_split_like_state_groups():
    ring = RingSpec(**{**SMALL, "block_size": 8})
    cache_plan = plan(named(f=(1, full()), r=(4, ring)), layout=BLOCK_OUTERMOST)
    assert widths(cache_plan) == [1, 2, 2]


# Hidden states


def test_a_hidden_state_layer_has_a_separate_group_with_the_common_page():
    layers = named(f=(2, full()), w=(2, window()), h=(2, hidden(head_size=20)))
    cache_plan = plan(layers)
    assert names(cache_plan) == ["f.0 f.1", "w.0 w.1", "h.0", "h.1"]
    spec = cache_plan.groups[2].spec
    assert (spec.block_size, spec.page_bytes) == (4, PAGE), "six tokens of 40 bytes fit; four divide 16"


def test_block_size_grows_until_one_hidden_state_fits():
    layers = named(f=(1, full()), m=(1, state()), h=(1, hidden(head_size=300)))
    cache_plan = plan(layers)
    assert [group.spec.page_bytes for group in cache_plan.groups] == [3 * PAGE] * 3
    assert [group.block_size for group in cache_plan.groups] == [48, 48, 1]


def test_hidden_state_layers_are_not_padded_in_block_outermost_layout():
    layers = named(f=(1, full()), w=(1, window(head_size=8)), h=(1, hidden(head_size=6)))
    cache_plan = plan(layers, layout=BLOCK_OUTERMOST)
    assert cache_plan.groups[2].specs == (hidden(head_size=6),)


def test_hidden_state_layers_alone_with_two_block_sizes_are_refused():
    with pytest.raises(InvalidArgument, match="hidden-state layers alone"):
        plan(named(a=(1, hidden()), b=(1, hidden(block_size=32))))


# Hybrid allocation off


def test_without_hybrid_every_layer_keeps_every_token():
    cache_plan = plan(named(f=(2, full()), w=(3, window(64))), hybrid=False)
    (group,) = cache_plan.groups
    assert group.spec == full(computes_window=64)
    assert codes(cache_plan) == [WarningCode.HYBRID_OFF]


def test_without_hybrid_chunks_keep_every_token_too():
    (group,) = plan(named(f=(1, full()), c=(3, chunked(64))), hybrid=False).groups
    assert group.spec == full(computes_chunk=64)


def test_without_hybrid_latent_windows_keep_every_row():
    latent_window = SlidingWindowMLASpec(**{**SMALL, "head_size": 8}, window=64)
    (group,) = plan(named(t=(1, latent()), w=(1, latent_window)), hybrid=False).groups
    assert group.spec == latent(computes_window=64)


def test_without_hybrid_windows_alone_stay_windows():
    cache_plan = plan(named(w=(3, window())), hybrid=False)
    assert cache_plan.groups[0].kind is GroupKind.SLIDING_WINDOW
    assert codes(cache_plan) == []


def test_a_state_with_attention_is_refused_without_hybrid():
    with pytest.raises(InvalidArgument, match="hybrid: the model's layers cannot be allocated alike"):
        plan(named(f=(1, full()), m=(1, state())), hybrid=False)


def test_without_hybrid_replicated_layers_are_promoted_among_themselves():
    replicated = {"dcp_sharded": False}
    layers = named(f=(1, full()), w=(1, window()), rf=(1, full(**replicated)), rw=(1, window(**replicated)))
    assert names(plan(layers, hybrid=False)) == ["f.0 w.0", "rf.0 rw.0"]


# Kinds apart, layers without a cache, drafts


def test_a_reference_window_never_shares_a_table_with_full_attention():
    reference_window = RSWASpec(**SMALL, window=64)
    cache_plan = plan(named(r=(1, reference_window), f=(1, full())))
    assert [group.kind for group in cache_plan.groups] == [GroupKind.R_SWA, GroupKind.FULL_ATTENTION]


def test_states_of_different_cache_modes_have_separate_groups():
    with_mode = named(a=(1, state()), b=(1, state(mode=MambaMode.NONE)))
    assert len(plan(with_mode).groups) == 2


def test_a_layer_that_shares_a_cache_needs_no_memory():
    owner, reader = Layer("own", full()), KVSharingLayer("read", "own")
    cache_plan = plan((owner, reader))
    assert names(cache_plan) == ["own"]
    assert cache_plan.shared_layers == (reader,)


def test_a_draft_layer_marks_its_group_only_when_drafts_drop_a_block():
    layers = (*named(f=(3, full()), w=(3, window())), Layer("draft", full(), is_draft=True))
    assert names(plan(layers)) == ["f.0 f.1 f.2 draft", "w.0 w.1 w.2"]
    assert [group.is_draft for group in plan(layers).groups] == [False, False]
    assert [group.is_draft for group in plan(layers, drops_last_block=True).groups] == [True, False]


def test_a_state_model_with_unmarked_draft_layers_is_a_warning():
    layers = named(f=(1, full()), m=(1, state()))
    assert codes(plan(layers, drops_last_block=True)) == [WarningCode.NO_DRAFT_LAYERS]
    marked = (replace(layers[0], is_draft=True), layers[1])
    assert codes(plan(marked, drops_last_block=True)) == []


# Bad layers


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((Layer("a", full()), Layer("a", full())), r"workers\[0\]\.layers: a name occurs twice"),
        ((KVSharingLayer("a", "b"),), "shares the cache of 'b', which has none here"),
        ((Layer("a", full()), KVSharingLayer("a", "a")), "a name occurs twice"),
    ],
)
def test_contradictory_layer_names_are_refused(layers, message):
    with pytest.raises(InvalidArgument, match=message):
        plan(layers)


def test_one_name_for_different_layers_of_two_workers_is_refused():
    workers = [Worker((Layer("a", full()),)), Worker((Layer("a", window()),))]
    with pytest.raises(InvalidArgument, match=r"workers\[1\]\.layers: 'a' differs between workers"):
        plan_cache(workers, PlanOptions(num_blocks=1000))


def test_a_plan_without_workers_is_refused():
    with pytest.raises(InvalidArgument, match="workers: there are no workers"):
        plan_cache([], PlanOptions())
