"""Conversion of the arguments of unary calls to protobuf.

The answers are not converted: the clients return the protobuf messages, since unary calls are not time-critical.
"""

from __future__ import annotations

from typing import Any

from kvplane.base.groups import ReplicaSpec
from kvplane.base.requests import Allocate, At, Commit, Content, Ending
from kvplane.base.sources import LayerSource, ModelSource
from kvplane.base.step import NO_EXTRA_KEYS
from kvplane.v1 import allocation_pb2 as pb
from kvplane.wire.extra_keys import encode_extra_keys
from kvplane.wire.same import encode_enum, encode_same
from kvplane.wire.sources import encode_layer_source, encode_model_source
from kvplane.wire.spec import encode_spec


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
