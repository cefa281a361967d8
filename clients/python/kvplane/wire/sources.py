"""Sources of a replica's groups -> protobuf. The service reads them by its planner's own rules."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import GroupKind, MambaMode
from kvplane.base.layer_json import spec_to_dict
from kvplane.base.layer_spec import LayerSpec
from kvplane.base.layers import KVSharingLayer, Layer
from kvplane.sources import LayerSource, ModelSource, PoolSettings
from kvplane.v1 import replica_pb2 as pb
from kvplane.wire.columns import build
from kvplane.wire.spec import encode_enum

_ENUMS = {"commit": (pb.CommitRule, "COMMIT_RULE"), "hash_algorithm": (pb.HashAlgorithm, "HASH_ALGORITHM")}
_KINDS = {kind.value for kind in GroupKind}
_SAME = {
    "block_size",
    "num_kv_heads",
    "head_size",
    "head_size_v",
    "dtype",
    "window",
    "chunk",
    "speculative_blocks",
    "sink_tokens",
}


def encode_model_source(source: ModelSource) -> pb.ModelSource:
    """The message of a model by name."""
    return build(pb.ModelSource, "model", _plain_fields(source, ModelSource))


def encode_layer_source(source: LayerSource) -> pb.LayerSource:
    """The message of a model by its layers; raises InvalidArgument for a format that the contract cannot say."""
    message = _plain_fields(source, PoolSettings)
    message["layers"] = [encode_layer(layer, f"layers[{at}]") for at, layer in enumerate(source.layers)]
    message["block_outermost"] = source.block_outermost
    message["decode_context_parallel"] = source.decode_context_parallel
    message["stages"] = [pb.PipelineStage(layer_names=names) for names in source.stages]
    return build(pb.LayerSource, "layers", message)


def encode_layer(layer: Layer | KVSharingLayer, where: str) -> pb.Layer:
    """The message of one layer."""
    if isinstance(layer, KVSharingLayer):
        return pb.Layer(name=layer.name, shares_with=layer.shares_with)
    layer_format = _encode_format(layer.spec, f"{where}.format")
    layer_format.is_draft = layer.is_draft
    return pb.Layer(name=layer.name, format=layer_format)


def _plain_fields(source: PoolSettings, of: type[PoolSettings]) -> dict[str, Any]:
    message = {column.name: getattr(source, column.name) for column in fields(of)}
    for name, (enum_type, prefix) in _ENUMS.items():
        message[name] = encode_enum(enum_type, prefix, message[name])
    return message


def _encode_format(spec: LayerSpec, where: str) -> pb.LayerFormat:
    message: dict[str, Any] = {}
    for name, value in spec_to_dict(spec).items():
        if name in _SAME:
            message[name] = value
        elif name == "type" and value in _KINDS:
            message["kind"] = encode_enum(pb.GroupKind, "GROUP_KIND", GroupKind(value))
        elif name == "padded_page_bytes":
            message["page_size_padded"] = value
        elif name == "mode":
            message["mamba_mode"] = encode_enum(pb.MambaMode, "MAMBA_MODE", MambaMode(value))
        elif name == "shapes":
            message["states"] = _states(value, spec_to_dict(spec)["dtypes"])
        elif name != "dtypes":
            raise InvalidArgument(
                f"{value!r} cannot be said in a registration by layers",
                field=f"{where}.{name}",
                remedy="plan the groups beside the engine, and register them as a ReplicaSpec",
            )
    return build(pb.LayerFormat, where, message)


def _states(shapes: list[list[int]], dtypes: list[str]) -> list[pb.StateTensor]:
    return [pb.StateTensor(shape=shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
