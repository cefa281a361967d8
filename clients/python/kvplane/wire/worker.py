"""Conversion of WorkerInfo and Assignment to and from protobuf."""

from __future__ import annotations

from kvplane.base.errors import InvalidArgument
from kvplane.base.worker import Assignment, WorkerInfo, WorkerState
from kvplane.v1 import plan_pb2 as pb
from kvplane.wire.columns import build
from kvplane.wire.plan import decode_plan, encode_plan
from kvplane.wire.spec import decode_enum, decode_tiers, encode_enum, encode_tiers

_SAME = ("rank", "worker_id", "address", "pid", "device", "incarnation", "owner_epoch", "plan_digest")


def encode_worker(worker: WorkerInfo) -> pb.WorkerInfo:
    """Return the message of a worker."""
    fields = {name: getattr(worker, name) for name in _SAME}
    fields["state"] = encode_enum(pb.WorkerState, "WORKER_STATE", worker.state)
    return build(pb.WorkerInfo, "worker", fields)


def decode_worker(message: pb.WorkerInfo) -> WorkerInfo:
    """Return the worker of a message. Raises InvalidArgument for a value that is out of range; the error's field names
    the value.
    """
    state = decode_enum(pb.WorkerState, "WORKER_STATE", message.state, "worker.state", WorkerState.STARTING)
    worker = WorkerInfo(state=state, **{name: getattr(message, name) for name in _SAME})
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
    return Assignment(plan, message.num_ranks, message.lease_ms, decode_tiers(message.tiers))
