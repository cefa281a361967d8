"""Unary calls as values: the method, the request message, and whether the call may be repeated. For both clients.

Each function builds the `Call` of one RPC and sends nothing. Both clients have a method of its name that sends the call
and returns the answer: `python scripts/gen_blocking.py` after a change makes these methods of the functions here, whose
docstrings say what the call does.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, isfinite
from typing import Generic, TypeVar

from google.protobuf.message import Message

from kvplane import wire
from kvplane.base.errors import FailedPrecondition, InvalidArgument
from kvplane.base.groups import ReplicaSpec
from kvplane.base.requests import HERE, Allocate, At, Commit, Content, Ending
from kvplane.base.sources import LayerSource, ModelSource
from kvplane.base.typed import checked
from kvplane.v1 import admin_pb2, allocation_pb2, events_pb2
from kvplane.wire.columns import build

Answer = TypeVar("Answer", bound=Message)

ALLOCATION, ADMIN = "kvplane.v1.Allocation", "kvplane.v1.Admin"
REGISTER_TIMEOUT_S = 120.0  # includes the construction of the pool
EXPLAIN_TIMEOUT_S = 60.0  # it may read a whole decision log, and gives way to engines


@dataclass(frozen=True, slots=True)
class Call(Generic[Answer]):
    """One unary call: what is sent to which gRPC method.

    Attributes:
        path: path of the gRPC method.
        request: the message to send.
        answer_type: message type of the answer.
        repeatable: whether sending the call a second time is harmless, so that it can be retried after a failure.
        timeout_s: deadline of this call in seconds; None = the deadline of the client.
        check: raises the error of an answer that is none.
    """

    path: str
    request: Message
    answer_type: type[Answer]
    repeatable: bool = True
    timeout_s: float | None = None
    check: Callable[[Answer], None] | None = None


@checked
def register_replica(
    replica: str,
    source: ReplicaSpec | ModelSource | LayerSource,
    *,
    num_ranks: int = 1,
    namespace_digest: bytes = b"",
    model_name: str = "",
) -> Call[allocation_pb2.RegisterReplicaResponse]:
    """Create a replica. A repeated call with equal arguments returns the existing replica.

    Args:
        replica: name, 1 to 128 characters of [a-zA-Z0-9._/-].
        source: the KV cache groups, or a model or layers from which the service computes them.
        num_ranks: ranks of the engine; all have the same memory layout.
        namespace_digest: digest of everything else that cached bytes depend on, such as the weights.
        model_name: name of the model, for operators; "" = that of a ModelSource.

    Raises:
        AlreadyExists: a replica of this name has other arguments.
        FailedPrecondition: the service does not know the eviction policy.
    """
    fields = {"replica": replica, "num_ranks": num_ranks, "namespace_digest": namespace_digest}
    fields["model_name"] = model_name
    request = build(allocation_pb2.RegisterReplicaRequest, "request", {**fields, **wire.encode_source(source)})
    answer, check = allocation_pb2.RegisterReplicaResponse, partial(check_policy, source)
    return Call(f"/{ALLOCATION}/RegisterReplica", request, answer, timeout_s=REGISTER_TIMEOUT_S, check=check)


def check_policy(
    source: ReplicaSpec | ModelSource | LayerSource, answer: allocation_pb2.RegisterReplicaResponse
) -> None:
    """Raise FailedPrecondition if the service did not take a policy, or the number of blocks of a state, which an
    earlier version does not know.

    The replica exists then, with the eviction policy LRU, tiers that save behind and keep no checkpoints, or one block
    per state.
    """
    register = "or deregister the replica and register it with"
    given = source.blocks_per_state if isinstance(source, ReplicaSpec) else 1
    if given > max(1, answer.spec.blocks_per_state):
        raise _not_taken(f"does not know states of {given} blocks", "blocks_per_state", "and deregister the replica")
    if source.eviction not in (None, wire.decode_policy(answer.spec)):
        what = f"does not know the policy {source.eviction.value!r}"
        raise _not_taken(what, "eviction", f"{register} 'lru'")
    for index, (asked, taken) in enumerate(zip(source.tiers, wire.decode_tiers(answer.spec.tiers), strict=False)):
        if asked.save is not taken.save:
            what = f"does not know the policy {asked.save.value!r}"
            raise _not_taken(what, f"tiers[{index}].save", f"{register} 'behind'")
        if asked.checkpoint_percent != taken.checkpoint_percent:
            raise _not_taken("does not know checkpoints", f"tiers[{index}].checkpoint_percent", f"{register} 0")
        if asked.retained_percent != taken.retained_percent:
            raise _not_taken("retains nothing in tiers", f"tiers[{index}].retained_percent", f"{register} 0")


def _not_taken(what: str, field: str, otherwise: str) -> FailedPrecondition:
    remedy = f"use a service of this version, {otherwise}"
    return FailedPrecondition(f"the service {what}", field=field, remedy=remedy)


@checked
def deregister_replica(replica: str, epoch: int | None = None) -> Call[allocation_pb2.DeregisterReplicaResponse]:
    """Remove a replica. If `epoch` is given and differs from the replica's current epoch, the service refuses."""
    request = build(allocation_pb2.DeregisterReplicaRequest, "request", {"replica": replica, "epoch": epoch})
    answer = allocation_pb2.DeregisterReplicaResponse
    # Another client may have registered the name again.
    return Call(f"/{ALLOCATION}/DeregisterReplica", request, answer, repeatable=False)


@checked
def describe_replica(replica: str) -> Call[allocation_pb2.DescribeReplicaResponse]:
    """Return the state and the counters of a replica."""
    request = build(allocation_pb2.DescribeReplicaRequest, "request", {"replica": replica})
    return Call(f"/{ALLOCATION}/DescribeReplica", request, allocation_pb2.DescribeReplicaResponse)


@checked
def list_replicas(page_size: int, page_token: str) -> Call[allocation_pb2.ListReplicasResponse]:
    """Build the call for one page of the list of replicas."""
    fields = {"page_size": page_size, "page_token": page_token}
    request = build(allocation_pb2.ListReplicasRequest, "request", fields)
    return Call(f"/{ALLOCATION}/ListReplicas", request, allocation_pb2.ListReplicasResponse)


@checked
def find_cache_hit(
    replica: str, what: Content | str, *, with_blocks: bool = False
) -> Call[allocation_pb2.FindCacheHitResponse]:
    """Return how many leading tokens of a prompt, or of a request that the service knows, are cached. Changes no
    state, not even LRU order.
    """
    content = {"request_id": what} if isinstance(what, str) else {"content": wire.encode_content(what)}
    fields = {"replica": replica, "with_blocks": with_blocks, **content}
    request = build(allocation_pb2.FindCacheHitRequest, "request", fields)
    return Call(f"/{ALLOCATION}/FindCacheHit", request, allocation_pb2.FindCacheHitResponse)


@checked
def allocate_slots(replica: str, request: Allocate, at: At = HERE) -> Call[allocation_pb2.AllocateSlotsResponse]:
    """Allocate KV cache blocks for the next tokens of a request."""
    message = wire.encode_allocate(_header(replica, at), request)
    return Call(f"/{ALLOCATION}/AllocateSlots", message, allocation_pb2.AllocateSlotsResponse)


@checked
def commit_blocks(replica: str, commit: Commit, at: At = HERE) -> Call[allocation_pb2.CommitBlocksResponse]:
    """Append tokens to a request and register full blocks in the prefix cache."""
    request = wire.encode_commit(_header(replica, at), commit)
    return Call(f"/{ALLOCATION}/CommitBlocks", request, allocation_pb2.CommitBlocksResponse)


@checked
def free(
    replica: str, request_id: str, ending: Ending = Ending.FREE, *, fence_seq: int = 0, at: At = HERE
) -> Call[allocation_pb2.FreeResponse]:
    """End or preempt a request. Its blocks return to the pool once the step with number `fence_seq` is executed; 0
    = immediately.
    """
    fields = {"request_id": request_id, "end": wire.encode_ending(ending), "fence_seq": fence_seq}
    request = build(allocation_pb2.FreeRequest, "request", {"header": _header(replica, at), **fields})
    return Call(f"/{ALLOCATION}/Free", request, allocation_pb2.FreeResponse)


@checked
def evict_blocks(replica: str, block_ids: Sequence[int], at: At = HERE) -> Call[allocation_pb2.EvictBlocksResponse]:
    """Remove the prefix cache keys of the given blocks, in this order, so that no later request has a cache hit on
    these blocks.
    """
    fields = {"header": _header(replica, at), "block_ids": block_ids}
    request = build(allocation_pb2.EvictBlocksRequest, "request", fields)
    return Call(f"/{ALLOCATION}/EvictBlocks", request, allocation_pb2.EvictBlocksResponse)


@checked
def reset_prefix_cache(replica: str, at: At = HERE) -> Call[allocation_pb2.ResetPrefixCacheResponse]:
    """Remove every key of the prefix cache. Does nothing while a request holds a block; the answer states whether
    the keys were removed.
    """
    request = allocation_pb2.ResetPrefixCacheRequest(header=_header(replica, at))
    return Call(f"/{ALLOCATION}/ResetPrefixCache", request, allocation_pb2.ResetPrefixCacheResponse)


@checked
def prefetch(
    replica: str, content: Content, *, within_s: float = 0.0, at: At = HERE
) -> Call[allocation_pb2.PrefetchResponse]:
    """Copy what only the disk has of a prompt's longest hit to the host tier, for a request that will come. It is
    left out if it would take longer than `within_s` seconds; 0 = at any time.
    """
    fields = {"content": wire.encode_content(content), "within_ms": _milliseconds(within_s, "within_s")}
    fields["header"] = _header(replica, at)
    request = build(allocation_pb2.PrefetchRequest, "request", fields)
    return Call(f"/{ALLOCATION}/Prefetch", request, allocation_pb2.PrefetchResponse)


@checked
def retain(
    replica: str, content: Content, *, ttl_s: float, priority: int = 0, at: At = HERE
) -> Call[allocation_pb2.RetainResponse]:
    """Let the blocks of a cached prefix be evicted after all that are not retained, for `ttl_s` seconds, 7 days at
    most; those of lower `priority` (0 to 100) first. Nothing is held. 0 seconds release the prefix.
    """
    fields = {"content": wire.encode_content(content), "ttl_ms": _milliseconds(ttl_s, "ttl_s"), "priority": priority}
    fields["header"] = _header(replica, at)
    request = build(allocation_pb2.RetainRequest, "request", fields)
    return Call(f"/{ALLOCATION}/Retain", request, allocation_pb2.RetainResponse)


def _milliseconds(seconds: float, field: str) -> int:
    """Return a time in milliseconds, rounded up: 0 has a meaning of its own."""
    if not isfinite(seconds) or seconds < 0:
        raise InvalidArgument(f"{seconds} is no time", field=field, remedy="give seconds, 0 or more")
    return ceil(seconds * 1000)


@checked
def snapshot(replica: str, *, summary: bool = False) -> Call[admin_pb2.SnapshotResponse]:
    """Check the invariants of the replica's allocator and return its state; with `summary`, only the state's digest
    and counts.
    """
    request = build(admin_pb2.SnapshotRequest, "request", {"replica": replica, "summary": summary})
    return Call(f"/{ADMIN}/Snapshot", request, admin_pb2.SnapshotResponse)


@checked
def list_requests(replica: str, limit: int = 0) -> Call[admin_pb2.ListRequestsResponse]:
    """Return the requests of a replica that hold the most blocks, at most `limit` (0 = 100)."""
    request = build(admin_pb2.ListRequestsRequest, "request", {"replica": replica, "limit": limit})
    return Call(f"/{ADMIN}/ListRequests", request, admin_pb2.ListRequestsResponse)


@checked
def status() -> Call[admin_pb2.StatusResponse]:
    """Return the version of the service, its replicas and the state of its telemetry."""
    return Call(f"/{ADMIN}/Status", admin_pb2.StatusRequest(), admin_pb2.StatusResponse)


@checked
def drain() -> Call[admin_pb2.DrainResponse]:
    """Ask the service to drain: it finishes the running calls and exits, as after SIGTERM. This call returns before
    the service has exited.
    """
    return Call(f"/{ADMIN}/Drain", admin_pb2.DrainRequest(), admin_pb2.DrainResponse)


@checked
def explain(replica: str, what: Content | str | int) -> Call[admin_pb2.ExplainResponse]:
    """Explain how many leading tokens of a prompt would be a cache hit now, or how many were a hit when the given
    request was admitted.
    """
    if isinstance(what, Content):
        content: dict[str, object] = {"content": wire.encode_content(what)}
    else:
        content = {"request_id" if isinstance(what, str) else "block": what}
    request = build(admin_pb2.ExplainRequest, "request", {"replica": replica, **content})
    return Call(f"/{ADMIN}/Explain", request, admin_pb2.ExplainResponse, timeout_s=EXPLAIN_TIMEOUT_S)


@checked
def subscription(
    replica: str, after_seq: int | None, entries: bool = False, digest_period_s: int = 0
) -> events_pb2.SubscribeRequest:
    """Build the message that subscribes to cache events after batch `after_seq`."""
    fields = {"replica": replica, "after_seq": after_seq, "entries": entries, "digest_period_s": digest_period_s}
    return build(events_pb2.SubscribeRequest, "request", fields)


def _header(replica: str, at: At) -> allocation_pb2.MutationHeader:
    """Return the header of a call, with an op_id, so that the service detects a repetition."""
    return wire.encode_header(replica, at if at.op_id else replace(at, op_id=uuid.uuid4().hex))
