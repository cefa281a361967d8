"""WorkerInfo and Assignment <-> protobuf."""

from __future__ import annotations

from kvplane.base.errors import InvalidArgument
from kvplane.base.worker import Assignment, WorkerInfo, WorkerState
from kvplane.v1 import plan_pb2 as pb
from kvplane.wire.columns import build
from kvplane.wire.plan import decode_plan, encode_plan
from kvplane.wire.spec import decode_enum, encode_enum

_SAME = ("rank", "worker_id", "address", "pid", "device", "incarnation", "owner_epoch", "plan_digest")


def encode_worker(worker: WorkerInfo) -> pb.WorkerInfo:
    """The message of a worker."""
    fields = {name: getattr(worker, name) for name in _SAME}
    fields["state"] = encode_enum(pb.WorkerState, "WORKER_STATE", worker.state)
    return build(pb.WorkerInfo, "worker", fields)


def decode_worker(message: pb.WorkerInfo) -> WorkerInfo:
    """The worker of a message; raises InvalidArgument naming the field for one that cannot be."""
    state = decode_enum(pb.WorkerState, "WORKER_STATE", message.state, "worker.state", WorkerState.STARTING)
    worker = WorkerInfo(state=state, **{name: getattr(message, name) for name in _SAME})
    worker.validate()
    return worker


def encode_assignment(assignment: Assignment) -> pb.RegisterWorkerResponse:
    """The answer that gives a worker its plan."""
    return pb.RegisterWorkerResponse(
        plan=encode_plan(assignment.plan),
        plan_digest=assignment.plan.digest(),
        num_ranks=assignment.num_ranks,
        lease_ms=assignment.lease_ms,
    )


def decode_assignment(message: pb.RegisterWorkerResponse) -> Assignment:
    """The plan that the answer gives; raises InvalidArgument when it did not arrive as it was sent."""
    plan = decode_plan(message.plan)
    if plan.digest() != message.plan_digest:
        raise InvalidArgument("the plan is not the service's", field="plan_digest", remedy="use one version of both")
    return Assignment(plan, message.num_ranks, message.lease_ms)
