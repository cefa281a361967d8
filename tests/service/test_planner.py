"""Sources with `planner`: the best plan instead of vLLM's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplane import Planner, connect, wire
from kvplane.base.errors import FailedPrecondition, InvalidArgument
from kvplane.base.groups import EvictionPolicy, MambaMode, TierKind, TierSpec
from kvplane.base.layer_spec import DType
from kvplane.base.layers import FullAttentionSpec, Layer, MambaSpec, SlidingWindowSpec
from kvplane.base.sources import LayerSource
from kvplane.session.rows import AdmitRow, NewsRow, part_of
from kvplane.unary.calls import check_policy
from kvplane.v1 import allocation_pb2 as pb
from kvplane_service.registry import Registration
from kvplane_service.rpc.sources import plan_source
from kvplane_service.store.registration import namespace_of
from tests.service.rig import running

FULL = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=DType.BFLOAT16)
WINDOW = SlidingWindowSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=DType.BFLOAT16, window=1024)
LAYERS = tuple(Layer(str(index), FULL if index < 20 else WINDOW) for index in range(49))


def planned(**fields):
    source = LayerSource(**{"layers": LAYERS, "memory_bytes": 40 << 30, **fields})
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


STATE = MambaSpec(
    block_size=64,
    shapes=((3, 64), (4, 32, 32)),
    dtypes=(DType.BFLOAT16, DType.FLOAT32),
    mode=MambaMode.ALIGN,
    padded_page_bytes=32_768,
)
WIDE = replace(FULL, block_size=64, num_kv_heads=2, head_size=64)
HYBRID = LayerSource(
    layers=tuple(Layer(str(index), WIDE if index % 4 == 3 else STATE) for index in range(8)),
    memory_bytes=64 << 20,
    max_model_len=4096,
    planner=Planner.SPLIT,
)


def test_a_replica_with_split_pages_is_registered_and_described():
    with running() as service, connect(service.address) as client:
        answer = client.register_replica("r", HYBRID)
        assert answer.spec.blocks_per_state == 4
        assert {group.block_size for group in answer.spec.groups} == {16, 64}
        assert (answer.spec.hash_block_size, answer.spec.partial_hits) == (16, True)
        with client.session("r") as session:
            assert session.spec.blocks_per_state == 4
            (part,) = session.apply(part_of(NewsRow(0, list(range(100))), AdmitRow(0))).parts
            tables = part.tables.by_row()[0]
            states, attention = tables[0], tables[len(tables) - 1]
            assert len(attention) == 4  # 64 tokens: the chunk ends where its state can be cached
            assert all(block % 4 == 0 for block in states)
            assert not {block // 4 for block in states if block} & {block // 4 for block in attention}
        assert client.describe_replica("r").slack_blocks == 0  # the prompt fills its superblock


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"eviction": EvictionPolicy.HAZARD}, "eviction"),
        ({"tiers": (TierSpec(TierKind.HOST, 100),)}, "tiers"),
        ({"layers": LAYERS}, "planner"),
        ({"block_outermost": True}, "planner"),
        ({"memory_bytes": 0, "num_blocks": 1001}, "num_blocks"),
    ],
)
def test_what_split_pages_do_not_have_is_refused_by_name(changes, field):
    with running() as service, connect(service.address) as client:
        with pytest.raises(InvalidArgument) as refused:
            client.register_replica("r", replace(HYBRID, **changes), namespace_digest=b"model")
        assert refused.value.field.endswith(field)


def test_a_service_that_does_not_know_split_pages_is_refused():
    spec = planned(layers=HYBRID.layers, memory_bytes=64 << 20, planner=Planner.SPLIT).spec
    answer = pb.RegisterReplicaResponse(spec=wire.encode_spec(replace(spec, blocks_per_state=1)))
    with pytest.raises(FailedPrecondition, match="states of 4 blocks"):
        check_policy(spec, answer)
    check_policy(spec, pb.RegisterReplicaResponse(spec=wire.encode_spec(spec)))
