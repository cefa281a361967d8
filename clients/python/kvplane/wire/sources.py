"""Conversion of ModelSource and LayerSource to protobuf. The service's planner checks the values."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from kvplane.base.groups import Drafter
from kvplane.base.sources import LayerSource, ModelSource, PoolSettings
from kvplane.v1 import replica_pb2 as pb
from kvplane.wire.columns import build
from kvplane.wire.layers import encode_layer
from kvplane.wire.spec import encode_enum, encode_tiers

_ENUMS = {
    "commit": (pb.CommitRule, "COMMIT_RULE"),
    "hash_algorithm": (pb.HashAlgorithm, "HASH_ALGORITHM"),
    "planner": (pb.Planner, "PLANNER"),
}
_DRAFTERS = {Drafter.NONE: pb.DRAFTER_UNSPECIFIED, Drafter.EAGLE: pb.DRAFTER_EAGLE, Drafter.MTP: pb.DRAFTER_MTP}


def encode_model_source(source: ModelSource) -> pb.ModelSource:
    """Return the message of a ModelSource."""
    return build(pb.ModelSource, "model", _plain_fields(source, ModelSource))


def encode_layer_source(source: LayerSource) -> pb.LayerSource:
    """Return the message of a LayerSource."""
    message = _plain_fields(source, PoolSettings)
    message["layers"] = [encode_layer(layer, f"layers[{at}]") for at, layer in enumerate(source.layers)]
    message["block_outermost"] = source.block_outermost
    message["decode_context_parallel"] = source.decode_context_parallel
    message["stages"] = [pb.PipelineStage(layer_names=names) for names in source.stages]
    return build(pb.LayerSource, "layers", message)


def _plain_fields(source: PoolSettings, of: type[PoolSettings]) -> dict[str, Any]:
    message = {column.name: getattr(source, column.name) for column in fields(of)}
    message["tiers"] = encode_tiers(source.tiers)
    message["drafter"] = _DRAFTERS[source.drafter]
    message["eviction"] = encode_enum(pb.EvictionPolicy, "EVICTION_POLICY", source.eviction) if source.eviction else 0
    for name, (enum_type, prefix) in _ENUMS.items():
        message[name] = encode_enum(enum_type, prefix, message[name])
    return message
