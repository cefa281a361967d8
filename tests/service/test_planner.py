"""Sources with `planner`: the best plan instead of vLLM's."""

from __future__ import annotations

import pytest

from kvplane import Planner, wire
from kvplane.base.errors import InvalidArgument
from kvplane.base.layer_spec import DType
from kvplane.base.layers import FullAttentionSpec, Layer, SlidingWindowSpec
from kvplane.base.sources import LayerSource
from kvplane.v1 import allocation_pb2 as pb
from kvplane_service.registry import Registration
from kvplane_service.rpc.sources import plan_source
from kvplane_service.store.registration import namespace_of

FULL = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=DType.BFLOAT16)
WINDOW = SlidingWindowSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=DType.BFLOAT16, window=1024)
LAYERS = tuple(Layer(str(index), FULL if index < 20 else WINDOW) for index in range(49))


def planned(**fields):
    source = LayerSource(layers=LAYERS, **{"memory_bytes": 40 << 30, **fields})
    return plan_source(pb.RegisterReplicaRequest(replica="r", **wire.encode_source(source)))


def test_a_source_takes_the_best_plan_and_its_placement():
    reference, best = planned(), planned(planner=Planner.BEST)
    assert planned(planner=Planner.REFERENCE) == reference
    assert (len(reference.spec.groups), len(best.spec.groups)) == (2, 5)
    assert best.max_concurrency > 1.2 * reference.max_concurrency
    placed = [name for tensor in best.plans[0].tensors for name in tensor.layer_names]
    assert sorted(placed, key=int) == [layer.name for layer in LAYERS]


def test_replicas_of_different_plans_share_no_stored_keys():
    specs = [planned().spec, planned(planner=Planner.BEST).spec]
    assert len({namespace_of(Registration(spec, 1, b"")) for spec in specs}) == 2


def test_an_unknown_planner_and_a_number_of_blocks_are_refused():
    with pytest.raises(InvalidArgument, match="num_blocks") as refused:
        planned(memory_bytes=0, num_blocks=10_000, planner=Planner.BEST)
    assert refused.value.field == "layers.num_blocks"
    source = LayerSource(layers=LAYERS, memory_bytes=1 << 30)
    request = pb.RegisterReplicaRequest(replica="r", **wire.encode_source(source))
    request.layers.MergeFromString(bytes([160, 1, 77]))  # field 20, of a later version
    with pytest.raises(InvalidArgument, match="PLANNER_BEST") as refused:
        plan_source(request)
    assert refused.value.field == "layers.planner"
