from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.base.errors import InvalidArgument
from kvplane.base.layers import KVSharingLayer, Layer
from kvplane.base.rank_plan import GroupLayers, RankPlan, TensorPlacement
from kvplane.wire import decode_plan, encode_plan
from kvplane_plan.planner import Layout, PlanOptions, Worker, plan_cache, to_rank_plan
from tests.plan.layers import PAGE, full, latent, named, plan, state, window

LAYOUTS = pytest.mark.parametrize("layout", list(Layout))


def mixed(layout: Layout) -> RankPlan:
    layers = named(f=(2, full()), w=(4, window()), s=(2, state()))
    return to_rank_plan(plan(layers, num_blocks=100, max_model_len=256, layout=layout))


@LAYOUTS
def test_every_layer_is_placed_once_within_the_allocation(layout):
    rank = mixed(layout)
    rank.validate()
    assert sorted(place.name for place in rank.places()) == ["f.0", "f.1", "s.0", "s.1", "w.0", "w.1", "w.2", "w.3"]
    assert max(place.end_bytes(100) for place in rank.places()) == rank.size_bytes == 100 * rank.bytes_per_block


@LAYOUTS
def test_every_group_begins_at_byte_0(layout):
    for group in range(4):
        assert min(place.offset_bytes for place in mixed(layout).places() if place.group == group) == 0


def test_layouts_store_pages_or_layers_contiguously():
    by_layer = {place.name: place for place in mixed(Layout.LAYER_OUTERMOST).places()}
    assert (by_layer["f.1"].offset_bytes, by_layer["f.1"].block_stride_bytes) == (100 * PAGE, PAGE)
    by_block = {place.name: place for place in mixed(Layout.BLOCK_OUTERMOST).places()}
    assert (by_block["f.1"].offset_bytes, by_block["f.1"].block_stride_bytes) == (PAGE, 2 * PAGE)


def test_a_stage_has_its_own_layers_and_every_group():
    first, second = named(f=(1, full()), w=(1, window())), (Layer("w.1", window()), KVSharingLayer("x", "w.1"))
    whole = plan_cache([Worker(first), Worker(second)], PlanOptions(num_blocks=100, max_model_len=256))
    rank = to_rank_plan(whole, 1)
    rank.validate()
    assert [name for group in rank.groups for name in group.layer_names] == ["w.1"]
    assert len(rank.groups) == len(whole.groups) > 1
    assert rank.shared_layers == (KVSharingLayer("x", "w.1"),)
    assert to_rank_plan(whole, 0).shared_layers == ()


def test_plan_digests_are_equal_only_for_equal_plans():
    assert mixed(Layout.LAYER_OUTERMOST).digest() == mixed(Layout.LAYER_OUTERMOST).digest()
    assert mixed(Layout.LAYER_OUTERMOST).digest() != mixed(Layout.BLOCK_OUTERMOST).digest()
    rank = mixed(Layout.LAYER_OUTERMOST)
    assert replace(rank, shared_layers=(KVSharingLayer("x", "f.0"),)).digest() != rank.digest()


def small(**changes) -> RankPlan:
    groups = (GroupLayers(("a", "b"), (full(), full())),)
    tensors = (TensorPlacement(0, ("a", "b"), 0, 4 * PAGE, PAGE),)
    given = {"num_blocks": 4, "size_bytes": 8 * PAGE, "bytes_per_block": 2 * PAGE, "groups": groups, "tensors": tensors}
    return RankPlan(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_blocks": 0}, "num_blocks"),
        ({"size_bytes": 0}, "size_bytes"),
        ({"size_bytes": 8 * PAGE - 1}, "tensors"),
        ({"groups": ()}, "groups"),
        ({"groups": (GroupLayers(("a", "b"), (full(),)),)}, r"groups\[0\].specs"),
        ({"tensors": ()}, "tensors"),
        ({"tensors": (TensorPlacement(0, ("a", "b"), 0, 4 * PAGE - 1, PAGE),)}, "tensors"),
        ({"tensors": (TensorPlacement(0, ("a", "b"), 0, 4 * PAGE, PAGE - 1),)}, "tensors"),
        ({"tensors": (TensorPlacement(0, ("a", "b"), 0, PAGE - 1, 2 * PAGE),)}, "tensors"),
        ({"shared_layers": (KVSharingLayer("x", "none"),)}, "shared_layers"),
        ({"shared_layers": (KVSharingLayer("a", "b"),)}, "shared_layers"),
    ],
)
def test_an_invalid_rank_plan_is_refused_by_field(changes, field):
    small().validate()
    with pytest.raises(InvalidArgument, match=f"^{field}"):
        small(**changes).validate()


def test_layers_of_a_group_may_interleave_with_one_stride():
    small(tensors=(TensorPlacement(0, ("a", "b"), 0, PAGE, 2 * PAGE),)).validate()


def two_groups(*tensors: TensorPlacement, pages: int = 8) -> RankPlan:
    groups = (GroupLayers(("a", "b"), (full(), full())), GroupLayers(("c",), (window(),)))
    return small(groups=groups, tensors=tensors, size_bytes=pages * PAGE)


def test_blocks_of_different_groups_must_have_equal_positions():
    """Block 1 of one group over block 2 of another would be read as what it is not."""
    first = TensorPlacement(0, ("a", "b"), 0, 4 * PAGE, PAGE)
    two_groups(first, TensorPlacement(1, ("c",), 0, 4 * PAGE, PAGE)).validate()
    two_groups(first, TensorPlacement(1, ("c",), 4 * PAGE, 4 * PAGE, PAGE)).validate()
    for wrong in (
        TensorPlacement(1, ("c",), PAGE, 4 * PAGE, PAGE),
        TensorPlacement(1, ("c",), 3 * PAGE, 4 * PAGE, PAGE),
        TensorPlacement(1, ("c",), 2, 4 * PAGE, PAGE),
        TensorPlacement(1, ("c",), 0, 4 * PAGE, 2 * PAGE),
    ):
        with pytest.raises(InvalidArgument, match=r"^tensors: pages of"):
            two_groups(first, wrong).validate()


def test_a_page_that_crosses_a_block_boundary_is_refused():
    groups = (GroupLayers(("a", "b", "c"), (full(), full(), full())),)
    tensors = (TensorPlacement(0, ("a", "b", "c"), 0, PAGE, 3 * PAGE),)
    small(groups=groups, tensors=tensors, size_bytes=12 * PAGE).validate()
    tensors = (TensorPlacement(0, ("a", "b", "c"), 0, PAGE, 3 * PAGE - 2),)
    with pytest.raises(InvalidArgument, match="cross a block boundary"):
        small(groups=groups, tensors=tensors, size_bytes=12 * PAGE).validate()


@LAYOUTS
def test_groups_with_different_alignments_share_one_stride(layout):
    """Equal pages and different strides would place block 2 of one group on block 3 of the other."""
    layers = named(f=(1, full(padded_page_bytes=384)), w=(1, window(padded_page_bytes=384, block_stride_alignment=256)))
    rank = to_rank_plan(plan(layers, layout=layout))
    rank.validate()
    assert {place.block_stride_bytes for place in rank.places()} == {512}


SPECS = st.one_of(
    st.builds(full, block_size=st.sampled_from([16, 32]), num_kv_heads=st.sampled_from([1, 2])),
    st.builds(window, padded_page_bytes=st.sampled_from([0, 2 * PAGE + 2]), num_kv_heads=st.sampled_from([1, 2])),
    st.builds(window, block_stride_alignment=st.sampled_from([1, 64, 384])),
    st.builds(latent, block_stride_alignment=st.sampled_from([1, 128])),
    st.builds(state, st.sampled_from([64, PAGE, 3 * PAGE]), block_stride_alignment=st.sampled_from([1, 48])),
)


@given(st.lists(SPECS, min_size=1, max_size=6), st.sampled_from(list(Layout)), st.integers(1, 2))
def test_planned_pages_do_not_overlap(specs, layout, stages):
    """Pair by pair: pages share a byte only when they are one block's, in different groups."""
    layers = [Layer(str(index), spec) for index, spec in enumerate(specs * 2)]
    workers = [Worker(tuple(layers[stage::stages])) for stage in range(stages)]
    try:
        whole = plan_cache(workers, PlanOptions(num_blocks=60, max_model_len=32, max_batched_tokens=16, layout=layout))
    except InvalidArgument:
        return
    for stage in range(stages):
        rank = to_rank_plan(whole, stage)
        rank.validate()
        pages = [(place, block) for place in rank.places() for block in (0, 1, 2, 58, 59)]
        for (one, block), (other, other_block) in combinations(pages, 2):
            start = one.offset_bytes + block * one.block_stride_bytes
            other_start = other.offset_bytes + other_block * other.block_stride_bytes
            if start < other_start + other.spec.page_bytes and other_start < start + one.spec.page_bytes:
                assert block == other_block
                assert one.group != other.group


def test_an_opaque_plan_is_named_by_its_layout_and_has_no_layers():
    plan = RankPlan.opaque(8, 800, "layout-1")
    assert decode_plan(encode_plan(plan)) == plan
    assert (
        len({plan.digest(), RankPlan.opaque(8, 800, "2").digest(), RankPlan.opaque(8, 801, "layout-1").digest()}) == 3
    )
    with pytest.raises(InvalidArgument, match="1 groups and layers"):
        replace(plan, groups=(GroupLayers((), ()),)).validate()
    with pytest.raises(InvalidArgument, match="at most 64"):
        RankPlan.opaque(8, 800, "x" * 65)
