"""Unary calls as values: which method, with what, and whether it may be tried again. Shared by both faces."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from google.protobuf.message import Message

from kvplane import wire
from kvplane.base.groups import ReplicaSpec
from kvplane.base.requests import Allocate, At, Commit, Content, Ending
from kvplane.base.sources import LayerSource, ModelSource
from kvplane.base.typed import checked
from kvplane.v1 import admin_pb2, allocation_pb2, events_pb2
from kvplane.wire.columns import build

Answer = TypeVar("Answer", bound=Message)

ALLOCATION, ADMIN = "kvplane.v1.Allocation", "kvplane.v1.Admin"
REGISTER_TIMEOUT_S = 120.0  # the pool is built in it


@dataclass(frozen=True, slots=True)
class Call(Generic[Answer]):
    """One unary call.

    Attributes:
        path: of the method.
        request: what is sent.
        answer_type: of the answer.
        repeatable: done twice is done once, so a call that may not have arrived can be sent again.
        timeout_s: its own, where the client's is not meant for it.
    """

    path: str
    request: Message
    answer_type: type[Answer]
    repeatable: bool = True
    timeout_s: float | None = None


@checked
def register_replica(
    replica: str, source: ReplicaSpec | ModelSource | LayerSource, num_ranks: int, namespace_digest: bytes
) -> Call[allocation_pb2.RegisterReplicaResponse]:
    """Create a replica."""
    fields = {"replica": replica, "num_ranks": num_ranks, "namespace_digest": namespace_digest}
    request = build(allocation_pb2.RegisterReplicaRequest, "request", {**fields, **wire.encode_source(source)})
    answer = allocation_pb2.RegisterReplicaResponse
    return Call(f"/{ALLOCATION}/RegisterReplica", request, answer, timeout_s=REGISTER_TIMEOUT_S)


@checked
def deregister_replica(replica: str, epoch: int | None) -> Call[allocation_pb2.DeregisterReplicaResponse]:
    """Remove a replica. Not repeatable: somebody may have registered the name again."""
    request = build(allocation_pb2.DeregisterReplicaRequest, "request", {"replica": replica, "epoch": epoch})
    answer = allocation_pb2.DeregisterReplicaResponse
    return Call(f"/{ALLOCATION}/DeregisterReplica", request, answer, repeatable=False)


@checked
def describe_replica(replica: str) -> Call[allocation_pb2.DescribeReplicaResponse]:
    """Tell state and counters."""
    request = build(allocation_pb2.DescribeReplicaRequest, "request", {"replica": replica})
    return Call(f"/{ALLOCATION}/DescribeReplica", request, allocation_pb2.DescribeReplicaResponse)


@checked
def list_replicas(page_size: int, page_token: str) -> Call[allocation_pb2.ListReplicasResponse]:
    """One page of the list."""
    fields = {"page_size": page_size, "page_token": page_token}
    request = build(allocation_pb2.ListReplicasRequest, "request", fields)
    return Call(f"/{ALLOCATION}/ListReplicas", request, allocation_pb2.ListReplicasResponse)


@checked
def find_cache_hit(replica: str, what: Content | str, with_blocks: bool) -> Call[allocation_pb2.FindCacheHitResponse]:
    """Look up content, or a known request by its name."""
    content = {"request_id": what} if isinstance(what, str) else {"content": wire.encode_content(what)}
    fields = {"replica": replica, "with_blocks": with_blocks, **content}
    request = build(allocation_pb2.FindCacheHitRequest, "request", fields)
    return Call(f"/{ALLOCATION}/FindCacheHit", request, allocation_pb2.FindCacheHitResponse)


@checked
def allocate_slots(replica: str, request: Allocate, at: At) -> Call[allocation_pb2.AllocateSlotsResponse]:
    """Give a request blocks."""
    message = wire.encode_allocate(_header(replica, at), request)
    return Call(f"/{ALLOCATION}/AllocateSlots", message, allocation_pb2.AllocateSlotsResponse)


@checked
def commit_blocks(replica: str, commit: Commit, at: At) -> Call[allocation_pb2.CommitBlocksResponse]:
    """Append tokens and register blocks."""
    request = wire.encode_commit(_header(replica, at), commit)
    return Call(f"/{ALLOCATION}/CommitBlocks", request, allocation_pb2.CommitBlocksResponse)


@checked
def free(replica: str, request_id: str, ending: Ending, fence_seq: int, at: At) -> Call[allocation_pb2.FreeResponse]:
    """End a request."""
    fields = {"request_id": request_id, "end": wire.encode_ending(ending), "fence_seq": fence_seq}
    request = build(allocation_pb2.FreeRequest, "request", {"header": _header(replica, at), **fields})
    return Call(f"/{ALLOCATION}/Free", request, allocation_pb2.FreeResponse)


@checked
def evict_blocks(replica: str, block_ids: Sequence[int], at: At) -> Call[allocation_pb2.EvictBlocksResponse]:
    """Drop the keys of blocks."""
    fields = {"header": _header(replica, at), "block_ids": block_ids}
    request = build(allocation_pb2.EvictBlocksRequest, "request", fields)
    return Call(f"/{ALLOCATION}/EvictBlocks", request, allocation_pb2.EvictBlocksResponse)


@checked
def reset_prefix_cache(replica: str, at: At) -> Call[allocation_pb2.ResetPrefixCacheResponse]:
    """Drop every key."""
    request = allocation_pb2.ResetPrefixCacheRequest(header=_header(replica, at))
    return Call(f"/{ALLOCATION}/ResetPrefixCache", request, allocation_pb2.ResetPrefixCacheResponse)


@checked
def snapshot(replica: str, summary: bool) -> Call[admin_pb2.SnapshotResponse]:
    """The whole state of a replica."""
    request = build(admin_pb2.SnapshotRequest, "request", {"replica": replica, "summary": summary})
    return Call(f"/{ADMIN}/Snapshot", request, admin_pb2.SnapshotResponse)


@checked
def status() -> Call[admin_pb2.StatusResponse]:
    """What runs there."""
    return Call(f"/{ADMIN}/Status", admin_pb2.StatusRequest(), admin_pb2.StatusResponse)


@checked
def drain() -> Call[admin_pb2.DrainResponse]:
    """Let the service go."""
    return Call(f"/{ADMIN}/Drain", admin_pb2.DrainRequest(), admin_pb2.DrainResponse)


@checked
def explain(replica: str, what: Content | str) -> Call[admin_pb2.ExplainResponse]:
    """Why content, or a request by its name, hits so much and not more."""
    content = {"request_id": what} if isinstance(what, str) else {"content": wire.encode_content(what)}
    request = build(admin_pb2.ExplainRequest, "request", {"replica": replica, **content})
    return Call(f"/{ADMIN}/Explain", request, admin_pb2.ExplainResponse)


@checked
def subscription(replica: str, after_seq: int | None) -> events_pb2.SubscribeRequest:
    """What is sent to subscribe to events."""
    return build(events_pb2.SubscribeRequest, "request", {"replica": replica, "after_seq": after_seq})


def _header(replica: str, at: At) -> allocation_pb2.MutationHeader:
    """With an op_id, so that the call can be sent again."""
    return wire.encode_header(replica, at if at.op_id else replace(at, op_id=uuid.uuid4().hex))
