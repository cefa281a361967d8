"""Layers and plans round-trip through protobuf: a worker's plan must be the planner's."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from kvplane import wire
from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import MambaMode
from kvplane.base.layer_json import LAYER_TYPES, spec_from_dict
from kvplane.base.layer_spec import AttentionSpec, DType
from kvplane.base.layers import KVSharingLayer, Layer, MambaSpec
from kvplane.base.worker import MAX_NIXL_BYTES, Assignment, PeerArena, Renewal, WorkerInfo, WorkerState
from kvplane.v1 import plan_pb2, replica_pb2
from kvplane_plan.planner import Layout, to_rank_plan
from tests.base.test_layer_json import LEAST
from tests.plan.layers import full, latent, named, plan, state, window

# A value for every field that no type's least form has.
OTHER: dict[str, Any] = {
    "block_size": 32,
    "padded_page_bytes": 1 << 20,
    "block_stride_alignment": 256,
    "num_kv_heads": 3,
    "head_size": 80,
    "head_size_v": 48,
    "dtype": DType.FLOAT64,
    "state_bytes": 100,
    "tokens_per_state": 4,
    "page_alignment": 64,
    "state_format": "packed",
    "max_tp_shards": 2,
    "computes_window": 32,
    "computes_chunk": 64,
    "window": 48,
    "chunk": 96,
    "sink_tokens": 64,
    "extra_retained_tokens": 5,
    "shapes": ((7,), (2, 3)),
    "dtypes": (DType.FLOAT32, DType.FLOAT64),
    "mode": MambaMode.ALIGN,
    "speculative_blocks": 3,
    "checkpoint_alignment": 64,
}


def there_and_back(layer):
    message = replica_pb2.Layer.FromString(wire.encode_layer(layer, "layer").SerializeToString())
    return wire.decode_layer(message, "layer")


@pytest.mark.parametrize("type_name", LEAST)
def test_layer_formats_round_trip(type_name):
    least = spec_from_dict({"type": type_name, **LEAST[type_name]})
    assert there_and_back(Layer("a", least)) == Layer("a", least)
    for column in fields(LAYER_TYPES[type_name]):
        if column.name in ("dtypes", "dcp_sharded"):
            continue
        change = {column.name: OTHER[column.name]}
        if column.name == "shapes":
            change["dtypes"] = OTHER["dtypes"]
        changed = replace(least, **change)
        assert there_and_back(Layer("a", changed, is_draft=True)) == Layer("a", changed, is_draft=True)


def test_dcp_sharded_round_trips():
    for type_name in LEAST:
        spec = spec_from_dict({"type": type_name, **LEAST[type_name]})
        for split in (False,) if isinstance(spec, MambaSpec) else (False, True):
            changed = replace(spec, dcp_sharded=split)
            assert there_and_back(Layer("a", changed)) == Layer("a", changed)
            assert isinstance(spec, AttentionSpec) or not split


def test_shared_layers_round_trip():
    assert there_and_back(KVSharingLayer("b", "a")) == KVSharingLayer("b", "a")


def test_a_hidden_state_of_another_kind_is_refused():
    message = replica_pb2.Layer(
        name="a", format=replica_pb2.LayerFormat(kind="GROUP_KIND_MAMBA", hidden_state=True, block_size=1)
    )
    with pytest.raises(InvalidArgument, match=r"^layer\.format\.kind"):
        wire.decode_layer(message, "layer")


@pytest.mark.parametrize("layout", list(Layout))
def test_plans_round_trip(layout):
    owners = named(f=(2, full()), w=(3, window()), s=(2, state()))
    layers: tuple[Layer | KVSharingLayer, ...] = (*owners, KVSharingLayer("x", "f.1"))
    rank = to_rank_plan(plan(layers, num_blocks=100, max_model_len=64, layout=layout))
    message = plan_pb2.RankPlan.FromString(wire.encode_plan(rank).SerializeToString())
    assert wire.decode_plan(message) == rank
    assert wire.decode_plan(message).digest() == rank.digest()


def test_an_impossible_plan_is_refused():
    message = wire.encode_plan(to_rank_plan(plan(named(m=(2, latent())))))
    message.size_bytes -= 1
    with pytest.raises(InvalidArgument, match=r"^tensors"):
        wire.decode_plan(message)


def test_a_plan_that_differs_from_its_digest_is_refused():
    message = wire.encode_assignment(Assignment(to_rank_plan(plan(named(m=(2, latent())))), 2, 1000))
    assert wire.decode_assignment(message).num_ranks == 2
    message.plan.groups[0].layers[0].name = message.plan.tensors[0].layer_names[0] = "other"
    with pytest.raises(InvalidArgument, match=r"^plan_digest"):
        wire.decode_assignment(message)


def test_worker_info_round_trips():
    info = WorkerInfo(3, 2**64 - 1, "unix:/run/socket", 77, "cuda:1", WorkerState.READY, 2**63, 9, "abc")
    assert wire.decode_worker(wire.encode_worker(info)) == info
    lent = replace(info, host_incarnation=b"h" * 16, mapped=(b"p" * 16,), nixl_arena=b"metadata", nixl_peers=1)
    assert wire.decode_worker(wire.encode_worker(lent)) == lent
    for wrong in (replace(lent, nixl_arena=bytes(MAX_NIXL_BYTES + 1)), replace(lent, nixl_peers=2)):
        with pytest.raises(InvalidArgument, match=r"^worker.nixl_"):
            wire.decode_worker(wire.encode_worker(wrong))


def test_a_renewal_round_trips():
    renewal = Renewal(900, (PeerArena(40, 8, "unix:/run/socket", b"i" * 16, b"metadata"),))
    assert wire.decode_renewal(wire.encode_renewal(renewal)) == renewal
