"""Sources with `prefix_match_unit`: hits that end inside the large blocks of models with recurrent states."""

from __future__ import annotations

import pytest

from kvplane import connect, wire
from kvplane.base.errors import InvalidArgument
from kvplane.base.sources import LayerSource, ModelSource
from kvplane.base.step import End
from kvplane.session.rows import AdmitRow, FactRow, NewsRow, RunRow, part_of
from kvplane.v1 import allocation_pb2 as pb
from kvplane_plan.models.catalogue import model_named
from kvplane_plan.models.shapes import ModelOptions
from kvplane_plan.planner import KERNEL_BLOCK
from kvplane_service.registry import Registration
from kvplane_service.rpc.sources import plan_source
from kvplane_service.store.registration import namespace_of
from tests.service.rig import running

QWEN = "qwen3-next-80b"
PROMPT = list(range(1000))


def planned(source):
    return plan_source(pb.RegisterReplicaRequest(replica="r", **wire.encode_source(source)))


def both_sources(**fields):
    layers = model_named(QWEN).layers(ModelOptions())
    return ModelSource(model=QWEN, num_blocks=100, **fields), LayerSource(layers=layers, num_blocks=100, **fields)


def test_both_sources_take_a_match_unit():
    for source in both_sources(prefix_match_unit=KERNEL_BLOCK):
        plan = planned(source)
        assert (plan.spec.hash_block_size, plan.spec.partial_hits, plan.warnings) == (KERNEL_BLOCK, True, ())
        assert plan.spec.align.stop_at_tail
    for source in both_sources():
        plan = planned(source)
        assert (plan.spec.hash_block_size, plan.spec.partial_hits) == (544, False)
        (warning,) = plan.warnings
        assert warning.startswith("prefix hits are multiples of 544 tokens")
        assert f"prefix_match_unit {KERNEL_BLOCK} " in warning


@pytest.mark.parametrize("unit", [64, 543, 1088])
def test_a_match_unit_that_no_block_is_a_multiple_of_is_refused(unit):
    for kind, source in zip(("model", "layers"), both_sources(prefix_match_unit=unit), strict=True):
        with pytest.raises(InvalidArgument, match=r"it must divide the block sizes \[544\]") as refused:
            planned(source)
        assert refused.value.field == f"{kind}.prefix_match_unit"


def test_replicas_with_different_match_units_share_no_stored_entries():
    coarse, fine = (planned(both_sources(prefix_match_unit=unit)[0]).spec for unit in (0, KERNEL_BLOCK))
    assert namespace_of(Registration(coarse, 1, b"")) != namespace_of(Registration(fine, 1, b""))


@pytest.mark.parametrize(("unit", "hit"), [(0, 544), (KERNEL_BLOCK, 992)])
def test_the_next_turn_hits_up_to_the_unit(unit, hit):
    """The engine computes a prompt of 1,000 tokens; the same prompt with more text then hits."""
    with running() as service, connect(service.address) as client:
        client.register_replica("r", ModelSource(model=QWEN, num_blocks=100, prefix_match_unit=unit))
        with client.session("r") as session:
            (first,) = session.apply(part_of(NewsRow(0, tokens=PROMPT), AdmitRow(0))).parts
            computed = first.admit_granted[0]
            while computed < len(PROMPT):
                computed += session.apply(part_of(RunRow(0))).parts[0].granted[0]
            session.apply(part_of(FactRow(0, tokens=[7]), RunRow(0)))
            session.apply(part_of(FactRow(0, end=End.FREE)))
            again = session.apply(part_of(NewsRow(0, tokens=[*PROMPT, *range(500)]), AdmitRow(0)))
            assert again.parts[0].admit_hit[0] == hit
            assert bool(again.parts[0].orders.copy_dst) == bool(unit)
