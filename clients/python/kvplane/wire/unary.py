"""Conversion of the arguments of unary calls to protobuf.

The answers are not converted: the clients return the protobuf messages, since unary calls are not time-critical.
"""

from __future__ import annotations

from typing import Any

from kvplane.base.groups import ReplicaSpec
from kvplane.base.requests import Allocate, Appended, At, Commit, Content, Ending
from kvplane.base.sources import LayerSource, ModelSource
from kvplane.base.step import NO_EXTRA_KEYS
from kvplane.v1 import allocation_pb2 as pb
from kvplane.wire.columns import build
from kvplane.wire.extra_keys import encode_extra_keys
from kvplane.wire.sources import encode_layer_source, encode_model_source
from kvplane.wire.spec import encode_enum, encode_spec

_SAME_IN_ALLOCATE = (
    "request_id",
    "computed_tokens",
    "max_new_tokens",
    "extra_tokens",
    "lookahead_tokens",
    "external_tokens",
    "in_flight_tokens",
    "delay_caching",
    "unaligned",
    "full_fit",
    "encoder_tokens",
    "reserved_blocks",
    "watermark",
    "expected_hit_tokens",
    "victims",
)


def encode_source(source: ReplicaSpec | ModelSource | LayerSource) -> dict[str, Any]:
    """Return the field of RegisterReplicaRequest that describes the groups, as a dict."""
    if isinstance(source, ReplicaSpec):
        return {"spec": encode_spec(source)}
    if isinstance(source, ModelSource):
        return {"model": encode_model_source(source)}
    return {"layers": encode_layer_source(source)}


def encode_content(content: Content) -> pb.RequestContent:
    """Return the message of a request's content."""
    fields = {
        "token_ids": content.token_ids,
        "hashes": content.hashes,
        "num_tokens": content.num_tokens,
        "domain": content.domain,
        "skip_reading": content.skip_reading,
        "max_tokens": content.max_tokens,
    }
    if content.extra_keys != NO_EXTRA_KEYS:
        fields["extra_keys"] = encode_extra_keys(content.extra_keys)
    return build(pb.RequestContent, "content", fields)


def encode_header(replica: str, at: At) -> pb.MutationHeader:
    """Return the header of a call that changes a replica."""
    fields = {
        "replica": replica,
        "epoch": at.epoch,
        "op_id": at.op_id,
        "more": at.more,
        "executed_through": at.executed_through,
    }
    return build(pb.MutationHeader, "header", fields)


def encode_allocate(header: pb.MutationHeader, request: Allocate) -> pb.AllocateSlotsRequest:
    """Return the message that asks for blocks."""
    fields: dict[str, Any] = {name: getattr(request, name) for name in _SAME_IN_ALLOCATE}
    if request.content is not None:
        fields["content"] = encode_content(request.content)
    if request.appended is not None:
        fields["appended"] = _encode_appended(request.appended)
    return build(pb.AllocateSlotsRequest, "request", {"header": header, **fields})


def encode_commit(header: pb.MutationHeader, commit: Commit) -> pb.CommitBlocksRequest:
    """Return the message that reports the progress of a request."""
    fields: dict[str, Any] = {
        "header": header,
        "request_id": commit.request_id,
        "computed_tokens": commit.computed_tokens,
        "commit_tokens": commit.commit_tokens,
    }
    if commit.appended is not None:
        fields["appended"] = _encode_appended(commit.appended)
    return build(pb.CommitBlocksRequest, "request", fields)


def encode_ending(ending: Ending) -> int:
    """Return the proto number of an ending."""
    return encode_enum(pb.EndKind, "END_KIND", ending)


def _encode_appended(appended: Appended) -> pb.AppendedTokens:
    fields = {"token_ids": appended.token_ids, "num_tokens": appended.num_tokens, "hashes": appended.hashes}
    return build(pb.AppendedTokens, "appended", fields)
