"""Conversion of ModelSource and LayerSource to protobuf. The service's planner checks the values."""

from __future__ import annotations

from typing import Any

from kvplane.base.groups import Drafter
from kvplane.base.sources import LayerSource, ModelSource, PoolSettings
from kvplane.v1 import replica_pb2 as pb
from kvplane.wire.layers import encode_layer
from kvplane.wire.same import encode_enum, encode_same
from kvplane.wire.spec import encode_tiers


def encode_model_source(source: ModelSource) -> pb.ModelSource:
    """Return the message of a ModelSource."""
    return encode_same(source, pb.ModelSource, "model", **_settings(source))


def encode_layer_source(source: LayerSource) -> pb.LayerSource:
    """Return the message of a LayerSource."""
    layers = [encode_layer(layer, f"layers[{at}]") for at, layer in enumerate(source.layers)]
    stages = [pb.PipelineStage(layer_names=names) for names in source.stages]
    return encode_same(source, pb.LayerSource, "layers", layers=layers, stages=stages, **_settings(source))


def _settings(source: PoolSettings) -> dict[str, Any]:
    drafter = 0 if source.drafter is Drafter.NONE else encode_enum(pb.Drafter, source.drafter)
    return {"tiers": encode_tiers(source.tiers), "drafter": drafter}
