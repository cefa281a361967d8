"""Plans with split pages: small blocks of attention, several of which have the memory of a state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import MambaMode, Planner
from kvplane.base.layer_spec import DType
from kvplane.base.layers import ChunkedLocalSpec, FullAttentionSpec, Layer, MambaSpec, SlidingWindowSpec
from kvplane_plan.models.catalogue import model_named
from kvplane_plan.models.shapes import ModelOptions
from kvplane_plan.planner import (
    Layout,
    PlanOptions,
    Worker,
    compare,
    plan_cache,
    to_groups,
    to_rank_plan,
)

GIB = 1 << 30
SPLIT = PlanOptions(planner=Planner.SPLIT)
FULL = FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=64, dtype=DType.BFLOAT16)
WINDOW = SlidingWindowSpec(block_size=64, num_kv_heads=2, head_size=64, dtype=DType.BFLOAT16, window=256)
STATE = MambaSpec(
    block_size=64,
    shapes=((3, 64), (4, 32, 32)),
    dtypes=(DType.BFLOAT16, DType.FLOAT32),
    mode=MambaMode.ALIGN,
    padded_page_bytes=FULL.page_bytes,
)


def worker(*specs, memory=GIB):
    return [Worker(tuple(Layer(f"layers.{number}", spec) for number, spec in enumerate(specs)), memory)]


def test_a_state_of_qwen3_next_takes_34_blocks_of_the_attention_kernel():
    layers = tuple(model_named("qwen3-next-80b").layers(ModelOptions(mamba_mode=MambaMode.ALIGN)))
    reference, split = (
        plan_cache([Worker(layers, 40 * GIB)], PlanOptions(planner=one)) for one in Planner if one is not Planner.BEST
    )
    assert split.blocks_per_state == 34
    assert sorted({group.block_size for group in split.groups}) == [16, 544]
    assert split.num_blocks == 34 * reference.num_blocks
    assert split.bytes_per_block * 34 == reference.bytes_per_block
    assert (split.hit_alignment, split.partial_hits) == (16, True)
    assert split.padding_bytes == (0,) * len(split.groups)
    assert split.blocks_per_request == sum(
        group.spec.blocks_per_request(split.options.limits) * (34 if group.spec.is_state else 1)
        for group in split.groups
    )


def test_every_block_of_attention_is_in_the_state_of_its_superblock_and_in_no_other():
    plan = to_rank_plan(plan_cache(worker(STATE, FULL, STATE, WINDOW), SPLIT))
    plan.validate()
    places = plan.places()
    state_of = {place.group: place for place in places if place.spec.is_state}
    assert {place.blocks_per_page for place in places} == {1, 4}
    for place in places:
        if place.spec.is_state:
            continue
        for state in state_of.values():
            for block in range(12):
                begin = place.offset_bytes + block * place.block_stride_bytes
                whole = state.offset_bytes + block // 4 * 4 * state.block_stride_bytes
                if place.offset_bytes == state.offset_bytes:
                    assert whole <= begin
                    assert begin + place.spec.page_bytes <= whole + state.spec.page_bytes


def test_a_layout_whose_states_do_not_fill_their_blocks_is_impossible():
    plan = to_rank_plan(plan_cache(worker(STATE, FULL), SPLIT))
    for changed in (
        replace(plan, num_blocks=plan.num_blocks - 1),
        replace(
            plan,
            tensors=tuple(replace(one, block_stride_bytes=one.block_stride_bytes // 2 * 3) for one in plan.tensors),
        ),
        replace(plan, tensors=(plan.tensors[0], replace(plan.tensors[1], block_stride_bytes=64))),
    ):
        with pytest.raises(InvalidArgument):
            changed.validate()


def test_groups_of_the_allocator_have_the_small_blocks():
    groups = to_groups(plan_cache(worker(STATE, FULL, STATE, WINDOW), SPLIT))
    assert [group.block_size for group in groups] == [64, 64, 16, 16]


def test_padded_pages_are_divided_with_their_padding():
    narrow = replace(WINDOW, num_kv_heads=1, padded_page_bytes=FULL.page_bytes)
    plan = plan_cache(worker(STATE, FULL, narrow), SPLIT)
    assert {spec.page_bytes for group in plan.groups for spec in group.specs if not spec.is_state} == {
        FULL.page_bytes // 4
    }
    to_rank_plan(plan).validate()


@pytest.mark.parametrize(
    ("specs", "options"),
    [
        ((FULL, WINDOW), {}),
        ((STATE, STATE), {}),
        ((STATE, FULL), {"layout": Layout.BLOCK_OUTERMOST}),
        ((replace(STATE, block_size=16, padded_page_bytes=0), replace(FULL, block_size=16)), {}),
        (
            (
                STATE,
                FULL,
                ChunkedLocalSpec(block_size=64, num_kv_heads=2, head_size=64, dtype=DType.BFLOAT16, chunk=256),
            ),
            {},
        ),
    ],
)
def test_models_without_blocks_to_split_are_refused_by_name(specs, options):
    with pytest.raises(InvalidArgument) as refused:
        plan_cache(worker(*specs), replace(SPLIT, **options))
    assert refused.value.field == "planner"
    assert refused.value.remedy


def test_a_number_of_blocks_is_that_of_whole_superblocks():
    assert plan_cache(worker(STATE, FULL), replace(SPLIT, num_blocks=4000)).num_blocks == 4000
    with pytest.raises(InvalidArgument, match="4001 blocks") as refused:
        plan_cache(worker(STATE, FULL), replace(SPLIT, num_blocks=4001))
    assert refused.value.field == "num_blocks"


def test_the_longest_request_is_that_which_fits_with_the_null_state():
    options = replace(SPLIT, num_blocks=32, max_model_len=10_000, fit_max_model_len=True, max_batched_tokens=64)
    longest = plan_cache(worker(STATE, FULL), options).options.max_model_len
    plan = plan_cache(worker(STATE, FULL), replace(options, max_model_len=longest, fit_max_model_len=False))
    assert plan.blocks_per_request <= 28
    with pytest.raises(InvalidArgument):
        plan_cache(worker(STATE, FULL), replace(options, max_model_len=longest + 16, fit_max_model_len=False))


def test_comparison_shows_split_pages_where_there_are_any():
    found = compare(worker(STATE, FULL, STATE, STATE), PlanOptions(max_model_len=2048))
    assert found.split is not None
    assert all(cell.reference <= (cell.split or 0) <= cell.ideal for cell in found.cells)
    found = compare(worker(FULL, WINDOW), PlanOptions(max_model_len=2048))
    assert found.split is None
    assert all(cell.split is None for cell in found.cells)
