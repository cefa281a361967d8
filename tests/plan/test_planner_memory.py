"""The planner's use of memory: bytes per block, number of blocks, and positions of pages."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import MambaMode
from kvplane.base.layer_spec import DType
from kvplane.base.layers import CrossAttentionSpec, Layer, RingSpec
from kvplane_plan.models.catalogue import model_named
from kvplane_plan.models.shapes import ModelOptions
from kvplane_plan.planner import Layout, PlanOptions, Worker, plan_cache
from tests.plan.layers import (
    PAGE,
    SMALL,
    chunked,
    full,
    latent,
    named,
    plan,
    repeated,
    state,
    window,
)

GIB = 1 << 30
BOTH_LAYOUTS = pytest.mark.parametrize("layout", list(Layout))


def model_plan(name, options=ModelOptions(), memory_bytes=40 * GIB, **plan_options):  # noqa: B008  frozen
    return plan_cache([Worker(model_named(name).layers(options), memory_bytes)], PlanOptions(**plan_options))


# Published figures


@pytest.mark.parametrize(("cache_dtype", "bytes_per_token"), [("bfloat16", 327_680), ("fp8", 163_840)])
def test_llama_70b_bytes_per_token(cache_dtype, bytes_per_token):
    cache_plan = model_plan("llama-3.1-70b", ModelOptions(cache_dtype=cache_dtype))
    assert cache_plan.bytes_per_block == 16 * bytes_per_token


def test_gemma_3_has_six_window_groups_a_full_one_and_blocks_of_1_31_megabytes():
    cache_plan = model_plan("gemma-3-27b")
    assert [len(group.layer_names) for group in cache_plan.groups] == [9, 9, 9, 9, 8, 8, 10]
    assert cache_plan.bytes_per_block == 1_310_720


# How many blocks, and whether a request fits


def test_num_blocks_is_the_number_that_fits_the_memory():
    cache_plan = plan_cache([Worker(repeated(2, full()), 100 * 2 * PAGE + 511)], PlanOptions(max_model_len=64))
    assert (cache_plan.num_blocks, cache_plan.workers[0].size_bytes) == (100, 100 * 2 * PAGE)


def test_num_blocks_includes_the_null_block():
    """1024 tokens are 64 blocks: with exactly 64 in the pool a request of that length could never finish."""
    fits = plan(repeated(1, full()), num_blocks=65, max_model_len=1024)
    assert fits.blocks_per_request == 64
    with pytest.raises(InvalidArgument, match=r"needs 65 blocks with the null block, there are 64"):
        plan(repeated(1, full()), num_blocks=64, max_model_len=1024)


def test_too_little_memory_is_refused_with_the_longest_request_that_fits():
    with pytest.raises(InvalidArgument) as refused:
        plan(repeated(1, full()), num_blocks=64, max_model_len=1024)
    assert refused.value.remedy == "shorten max_model_len to 1008 or give more"
    assert plan(repeated(1, full()), num_blocks=64, max_model_len=1008).blocks_per_request == 63


def test_fit_lowers_max_model_len_to_the_memory():
    cache_plan = plan(repeated(1, full()), num_blocks=64, max_model_len=1024, fit_max_model_len=True)
    assert cache_plan.options.max_model_len == 1008
    assert cache_plan.max_concurrency == 64 / 63


def test_fit_keeps_a_max_model_len_that_fits():
    cache_plan = plan(repeated(1, full()), max_model_len=1024, fit_max_model_len=True)
    assert cache_plan.options.max_model_len == 1024


def test_fit_refuses_memory_for_less_than_one_token():
    with pytest.raises(InvalidArgument, match=r"memory_bytes: .* \(give more\)"):
        plan_cache([Worker(repeated(1, full()), PAGE)], PlanOptions(fit_max_model_len=True))


def test_a_given_num_blocks_takes_precedence_over_the_memory():
    cache_plan = plan_cache([Worker(repeated(1, full()), 10 * PAGE)], PlanOptions(num_blocks=3000))
    assert (cache_plan.num_blocks, cache_plan.workers[0].size_bytes) == (3000, 3000 * PAGE)


def test_a_request_needs_the_sum_of_the_blocks_of_all_groups():
    """Full: 1024 / 16 = 64. Window: 63 + 32 in flight = 95 tokens, 6 blocks, and one more at the edge: 7."""
    layers = named(f=(1, full()), w=(2, window(64)))
    cache_plan = plan(layers, num_blocks=780, max_batched_tokens=16, max_concurrent_batches=2)
    assert cache_plan.blocks_per_request == 64 + 7 + 7
    assert (cache_plan.max_concurrency, cache_plan.capacity_tokens) == (10.0, 10_240)


@pytest.mark.parametrize(
    ("spec", "blocks"),
    [
        (full(), 64),
        (latent(), 64),
        (window(64), 8),  # 63 + 48 = 111 tokens: 7 blocks and the edge
        (window(64, extra_retained_tokens=2), 9),
        (window(5000), 65),  # never more than the longest request, and the edge
        (chunked(64), 7),  # 64 + 48 = 112 tokens
        (chunked(5000), 64),
        (RingSpec(**SMALL), 1),
        (state(), 2),
        (state(speculative_blocks=3), 5),
        (state(mode=MambaMode.NONE), 1),
        (state(mode=MambaMode.NONE, speculative_blocks=3), 4),
        (CrossAttentionSpec(**SMALL), 94),  # 1500 encoder tokens
    ],
)
def test_number_of_blocks_of_one_request(spec, blocks):
    cache_plan = plan((Layer("a", spec),), max_batched_tokens=48, max_encoder_tokens=1500)
    assert cache_plan.blocks_per_request == blocks


def test_context_parallel_ranks_share_the_tokens_of_a_request():
    assert plan(repeated(1, full()), dcp_size=4).blocks_per_request == 16
    assert plan(repeated(1, full(dcp_sharded=False)), dcp_size=4).blocks_per_request == 64


# Pipeline stages


def test_pipeline_stages_have_global_groups_and_their_own_layers():
    layers = repeated(4, window(), full())  # 0 2 4 6 windows, 1 3 5 7 full
    stages = [Worker(layers[:4]), Worker(layers[4:])]
    cache_plan = plan_cache(stages, PlanOptions(num_blocks=3000))
    assert [group.layer_names for group in cache_plan.groups] == [("0", "2", "4", "6"), ("1", "3", "5", "7")]
    assert [[t.layer_names for t in worker.tensors] for worker in cache_plan.workers] == [
        [("0", "2"), ("1", "3")],
        [("4", "6"), ("5", "7")],
    ]
    assert cache_plan.bytes_per_block == 4 * PAGE
    assert [worker.bytes_per_block for worker in cache_plan.workers] == [2 * PAGE, 2 * PAGE]


@BOTH_LAYOUTS
def test_every_stage_has_the_num_blocks_of_the_smallest(layout):
    layers = repeated(3, full())
    stages = [Worker(layers[:1], 900 * PAGE), Worker(layers[1:], 1000 * PAGE)]
    cache_plan = plan_cache(stages, PlanOptions(layout=layout, max_model_len=1024))
    assert cache_plan.num_blocks == 500
    assert [worker.size_bytes for worker in cache_plan.workers] == [500 * PAGE, 1000 * PAGE]
    strides = [worker.tensors[0].layer_stride_bytes for worker in cache_plan.workers]
    assert strides == [500 * PAGE] * 2 if layout is Layout.LAYER_OUTERMOST else [PAGE] * 2


def test_a_stage_without_layers_of_a_group_has_no_memory_for_it():
    layers = named(f=(2, full()), w=(2, window()))
    cache_plan = plan_cache([Worker(layers[:2]), Worker(layers[2:])], PlanOptions(num_blocks=3000))
    assert [[t.group for t in worker.tensors] for worker in cache_plan.workers] == [[0], [1]]


def test_a_stage_without_any_cache_is_refused():
    with pytest.raises(InvalidArgument, match=r"workers\[1\]\.layers: the worker has no layer with a cache"):
        plan_cache([Worker(repeated(1, full())), Worker(())], PlanOptions(num_blocks=100))


def test_tensor_parallel_ranks_have_equal_plans():
    ranks = [Worker(repeated(2, full()), 5000 * PAGE)] * 4
    cache_plan = plan_cache(ranks, PlanOptions(max_model_len=1024, tp_size=4))
    assert len(set(cache_plan.workers)) == 1


# Places


def test_layer_outermost_places_all_blocks_of_a_layer_together():
    cache_plan = plan(named(a=(2, full()), b=(1, full(head_size=8))), num_blocks=100)
    small, large = cache_plan.workers[0].tensors
    assert (small.offset_bytes, small.layer_stride_bytes, small.block_stride_bytes) == (0, 100 * PAGE, PAGE)
    assert (large.offset_bytes, large.layer_stride_bytes, large.block_stride_bytes) == (
        200 * PAGE,
        200 * PAGE,
        2 * PAGE,
    )


def test_block_outermost_places_all_layers_of_a_block_together():
    layers = named(a=(2, full()), b=(1, full(head_size=8)))
    cache_plan = plan(layers, num_blocks=100, layout=Layout.BLOCK_OUTERMOST)
    small, large = cache_plan.workers[0].tensors
    assert (small.offset_bytes, small.layer_stride_bytes, small.block_stride_bytes) == (0, PAGE, 4 * PAGE)
    assert (large.offset_bytes, large.layer_stride_bytes, large.block_stride_bytes) == (
        2 * PAGE,
        2 * PAGE,
        4 * PAGE,
    )


def test_block_alignment_follows_the_layers():
    layers = named(a=(2, full(block_stride_alignment=96)), b=(1, full(head_size=8)))
    by_layer = plan(layers)
    assert by_layer.bytes_per_block == 2 * 288 + 512
    assert by_layer.workers[0].tensors[0].block_stride_bytes == 288
    by_block = plan(layers, layout=Layout.BLOCK_OUTERMOST)
    assert by_block.bytes_per_block == 1056, "1024 bytes, rounded up to a multiple of 96"
    assert [tensor.block_stride_bytes for tensor in by_block.workers[0].tensors] == [1056, 1056]


MIXES = {
    "one format": repeated(3, full()),
    "two pages": named(a=(2, full()), b=(3, full(head_size=6))),
    "window and full": repeated(3, window(), window(), full()),
    "grown": named(f=(2, full(head_size=8)), w=(5, window())),
    "padded": named(f=(2, full(head_size=6)), w=(5, window())),
    "states": named(f=(2, full(head_size=8)), m=(9, state())),
    "aligned": named(a=(2, full(block_stride_alignment=96)), b=(1, full(head_size=8))),
}


@BOTH_LAYOUTS
@pytest.mark.parametrize("mix", MIXES)
def test_pages_of_a_group_do_not_overlap_and_are_within_the_allocation(mix, layout):
    cache_plan = plan(MIXES[mix], num_blocks=20, max_model_len=16, max_batched_tokens=1, layout=layout)
    (worker,) = cache_plan.workers
    assert worker.size_bytes == 20 * cache_plan.bytes_per_block
    for index, group in enumerate(cache_plan.groups):
        page_bytes = dict(zip(group.layer_names, group.specs, strict=True))
        pages = sorted(
            (start, start + page_bytes[name].page_bytes)
            for tensor in worker.tensors
            if tensor.group == index
            for name, start in page_starts(tensor, num_blocks=20)
        )
        assert len(pages) == 20 * len(group.layer_names)
        assert all(end <= next_start for (_, end), (next_start, _) in pairwise(pages))
        assert pages[0][0] >= 0
        assert pages[-1][1] <= worker.size_bytes


def page_starts(tensor, num_blocks):
    for i, name in enumerate(tensor.layer_names):
        for block in range(num_blocks):
            start = tensor.offset_bytes + i * tensor.layer_stride_bytes + block * tensor.block_stride_bytes
            yield name, start


# Flags


@pytest.mark.parametrize(
    ("layers", "zeroing"),
    [
        (named(f=(1, full()), w=(1, window())), False),
        (named(f=(1, full()), m=(1, state())), True),
        (named(f=(1, full()), w=(1, window(dtype=DType.FLOAT16))), True),
        (named(f=(1, full()), r=(1, RingSpec(**{**SMALL, "dtype": DType.FLOAT32}))), True),
        # Pages of one group keep their places, so their types never meet.
        (named(a=(1, full()), b=(1, full(dtype=DType.UINT8))), False),
    ],
)
def test_new_blocks_are_zeroed_for_states_and_mixed_types(layers, zeroing):
    assert plan(layers).needs_zeroing is zeroing


def test_layers_with_fewer_shards_than_ranks_are_replicated():
    assert plan(named(a=(2, latent(max_tp_shards=1))), tp_size=8).tp_replicas == 8
    assert plan(named(a=(1, latent(max_tp_shards=1)), b=(1, full(max_tp_shards=2))), tp_size=8).tp_replicas == 4
    assert plan(named(a=(2, full())), tp_size=8).tp_replicas == 1, "unknown is not replicated"
    assert plan(named(a=(2, latent(max_tp_shards=1))), tp_size=8, dcp_size=8).tp_replicas == 1


# Bad options


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_model_len", 0),
        ("max_batched_tokens", -1),
        ("max_concurrent_batches", 0),
        ("tp_size", 0),
        ("dcp_size", 0),
        ("num_blocks", -1),
        ("num_blocks", 1 << 40),
        ("retention_interval", -2),
        ("prefix_match_unit", -16),
        ("max_encoder_tokens", -1),
        ("prefill_lookahead", -1),
    ],
)
def test_an_option_out_of_range_is_named(name, value):
    with pytest.raises(InvalidArgument) as refused:
        replace(PlanOptions(), **{name: value})
    assert refused.value.field == name
