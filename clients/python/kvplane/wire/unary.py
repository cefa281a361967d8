"""Conversion of the arguments of unary calls, and of model and layer sources in them, to protobuf.

The answers are not converted: the clients return the protobuf messages, since unary calls are not time-critical. The
service's planner checks the values of sources.
"""

from __future__ import annotations

from typing import Any

from kvplane.base.groups import Drafter, ReplicaSpec
from kvplane.base.requests import Allocate, At, Commit, Content, Ending
from kvplane.base.sources import LayerSource, ModelSource, PoolSettings
from kvplane.base.step import NO_EXTRA_KEYS
from kvplane.v1 import allocation_pb2 as pb
from kvplane.v1 import replica_pb2
from kvplane.wire.extra_keys import encode_extra_keys
from kvplane.wire.layers import encode_layer
from kvplane.wire.same import encode_enum, encode_same
from kvplane.wire.spec import encode_spec, encode_tiers


def encode_model_source(source: ModelSource) -> replica_pb2.ModelSource:
    """Return the message of a ModelSource."""
    return encode_same(source, replica_pb2.ModelSource, "model", **_settings(source))


def encode_layer_source(source: LayerSource) -> replica_pb2.LayerSource:
    """Return the message of a LayerSource."""
    layers = [encode_layer(layer, f"layers[{at}]") for at, layer in enumerate(source.layers)]
    stages = [replica_pb2.PipelineStage(layer_names=names) for names in source.stages]
    return encode_same(source, replica_pb2.LayerSource, "layers", layers=layers, stages=stages, **_settings(source))


def _settings(source: PoolSettings) -> dict[str, Any]:
    drafter = 0 if source.drafter is Drafter.NONE else encode_enum(replica_pb2.Drafter, source.drafter)
    return {"tiers": encode_tiers(source.tiers), "drafter": drafter}


def encode_source(source: ReplicaSpec | ModelSource | LayerSource) -> dict[str, Any]:
    """Return the field of RegisterReplicaRequest that describes the groups, as a dict."""
    if isinstance(source, ReplicaSpec):
        return {"spec": encode_spec(source)}
    if isinstance(source, ModelSource):
        return {"model": encode_model_source(source)}
    return {"layers": encode_layer_source(source)}


def encode_content(content: Content) -> pb.RequestContent:
    """Return the message of a request's content."""
    keys = None if content.extra_keys == NO_EXTRA_KEYS else encode_extra_keys(content.extra_keys)
    return encode_same(content, pb.RequestContent, "content", extra_keys=keys)


def encode_header(replica: str, at: At) -> pb.MutationHeader:
    """Return the header of a call that changes a replica."""
    return encode_same(at, pb.MutationHeader, "header", replica=replica)


def encode_allocate(header: pb.MutationHeader, request: Allocate) -> pb.AllocateSlotsRequest:
    """Return the message that asks for blocks."""
    content = None if request.content is None else encode_content(request.content)
    return encode_same(request, pb.AllocateSlotsRequest, "request", header=header, content=content)


def encode_commit(header: pb.MutationHeader, commit: Commit) -> pb.CommitBlocksRequest:
    """Return the message that reports the progress of a request."""
    return encode_same(commit, pb.CommitBlocksRequest, "request", header=header)


def encode_ending(ending: Ending) -> int:
    """Return the proto number of an ending."""
    return encode_enum(pb.EndKind, ending)
