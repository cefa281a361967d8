"""Conversion of WorkerInfo and Assignment to and from protobuf."""

from __future__ import annotations

from dataclasses import fields
from typing import TypeVar

from google.protobuf.message import Message

from kvplane.base.errors import InvalidArgument
from kvplane.base.worker import Assignment, PeerArena, Renewal, TierUse, WorkerInfo, WorkerState
from kvplane.v1 import plan_pb2 as pb
from kvplane.v1.replica_pb2 import TierKind as TierKindMessage
from kvplane.wire.columns import build
from kvplane.wire.plan import decode_plan, encode_plan
from kvplane.wire.spec import decode_enum, decode_tier_kind, decode_tiers, encode_enum, encode_tiers

_M = TypeVar("_M", bound=Message)
_OF_TIER = tuple(one.name for one in fields(TierUse) if one.name != "kind")
_SAME = (
    "rank",
    "worker_id",
    "address",
    "pid",
    "device",
    "incarnation",
    "owner_epoch",
    "plan_digest",
    "host_incarnation",
    "nixl_arena",
    "nixl_peers",
)


def encode_worker(worker: WorkerInfo) -> pb.WorkerInfo:
    """Return the message of a worker."""
    values = {name: getattr(worker, name) for name in _SAME}
    values["state"] = encode_enum(pb.WorkerState, "WORKER_STATE", worker.state)
    values["tiers"] = [encode_tier_use(pb.TierUse, use, f"worker.tiers[{at}]") for at, use in enumerate(worker.tiers)]
    values["mapped"] = list(worker.mapped)
    return build(pb.WorkerInfo, "worker", values)


def encode_tier_use(kind: type[_M], use: TierUse, where: str, **more: object) -> _M:
    """Return the message of one tier: a TierUse, or a WorkerTier of worker.proto with its other fields."""
    values = {name: getattr(use, name) for name in _OF_TIER}
    return build(kind, where, {"kind": encode_enum(TierKindMessage, "TIER_KIND", use.kind), **values, **more})


def _decode_tier_use(message: pb.TierUse, where: str) -> TierUse:
    return TierUse(decode_tier_kind(message.kind, where), **{name: getattr(message, name) for name in _OF_TIER})


def decode_worker(message: pb.WorkerInfo) -> WorkerInfo:
    """Return the worker of a message. Raises InvalidArgument for a value that is out of range; the error's field names
    the value.
    """
    state = decode_enum(pb.WorkerState, "WORKER_STATE", message.state, "worker.state", WorkerState.STARTING)
    tiers = tuple(_decode_tier_use(one, f"worker.tiers[{at}]") for at, one in enumerate(message.tiers))
    same = {name: getattr(message, name) for name in _SAME}
    worker = WorkerInfo(state=state, tiers=tiers, mapped=tuple(message.mapped), **same)
    worker.validate()
    return worker


def encode_assignment(assignment: Assignment) -> pb.RegisterWorkerResponse:
    """Return the message that assigns a memory layout and a lease to a worker."""
    return pb.RegisterWorkerResponse(
        plan=encode_plan(assignment.plan),
        plan_digest=assignment.plan.digest(),
        num_ranks=assignment.num_ranks,
        lease_ms=assignment.lease_ms,
        tiers=encode_tiers(assignment.tiers),
        content_id=assignment.content_id,
        namespace=assignment.namespace,
    )


def decode_assignment(message: pb.RegisterWorkerResponse) -> Assignment:
    """Return the assignment of a message. Raises InvalidArgument if the memory layout's digest is not the one in the
    message.
    """
    plan = decode_plan(message.plan)
    if plan.digest() != message.plan_digest:
        raise InvalidArgument(
            f"the received memory layout has the digest {plan.digest()}, the service sent {message.plan_digest}",
            field="plan_digest",
            remedy="use the same version of worker and service",
        )
    tiers = decode_tiers(message.tiers)
    return Assignment(plan, message.num_ranks, message.lease_ms, tiers, message.content_id, message.namespace)


def encode_renewal(renewal: Renewal) -> pb.RenewWorkerResponse:
    """Return the message that answers a renewal."""
    peers = [
        pb.PeerArena(
            first_slot=one.first,
            num_slots=one.num_slots,
            address=one.address,
            incarnation=one.incarnation,
            nixl_arena=one.nixl_arena,
        )
        for one in renewal.peers
    ]
    return pb.RenewWorkerResponse(lease_ms=renewal.lease_ms, peers=peers)


def decode_renewal(message: pb.RenewWorkerResponse) -> Renewal:
    """Return the answer to a renewal."""
    peers = (
        PeerArena(one.first_slot, one.num_slots, one.address, one.incarnation, one.nixl_arena) for one in message.peers
    )
    return Renewal(message.lease_ms, tuple(peers))
