from __future__ import annotations

from dataclasses import replace

import pytest

from kvplane.base.errors import InvalidArgument
from kvplane.base.layers import KVSharingLayer, Layer
from kvplane.base.rank_plan import GroupLayers, RankPlan, TensorPlacement
from kvplane_service.core.planner import Layout, PlanOptions, Worker, plan_cache, to_rank_plan
from tests.core.planner_layers import PAGE, full, named, plan, state, window

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
def test_groups_begin_at_byte_0_so_that_the_null_block_is_one_place(layout):
    for group in range(4):
        assert min(place.offset_bytes for place in mixed(layout).places() if place.group == group) == 0


def test_layouts_put_pages_side_by_side_or_layers():
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


def test_equal_plans_have_equal_digests_and_others_have_not():
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
def test_a_plan_that_no_memory_can_have_is_refused_by_field(changes, field):
    small().validate()
    with pytest.raises(InvalidArgument, match=f"^{field}"):
        small(**changes).validate()


def test_layers_of_a_group_may_interleave_with_one_stride():
    small(tensors=(TensorPlacement(0, ("a", "b"), 0, PAGE, 2 * PAGE),)).validate()
