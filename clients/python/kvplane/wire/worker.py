"""Conversion of what workers and services say of tiers to and from protobuf."""

from __future__ import annotations

from kvplane.base.errors import InvalidArgument
from kvplane.base.worker import Assignment, PeerNews, Renewal, WorkerInfo
from kvplane.v1 import plan_pb2 as pb
from kvplane.wire.plan import decode_plan, encode_plan
from kvplane.wire.same import decode_same, encode_same
from kvplane.wire.spec import decode_tiers, encode_tiers
from kvplane.wire.step import decode_peers, encode_peers

MAX_REPLICA_CHARS = 128


def encode_worker(worker: WorkerInfo) -> pb.WorkerInfo:
    """Return the message of a worker."""
    return encode_same(worker, pb.WorkerInfo, "worker", "worker.")


def decode_worker(message: pb.WorkerInfo) -> WorkerInfo:
    """Return the worker of a message. Raises InvalidArgument for a value that is out of range; the error's field names
    the value.
    """
    worker = decode_same(WorkerInfo, message, "worker.")
    worker.validate()
    return worker


def encode_assignment(assignment: Assignment) -> pb.RegisterWorkerResponse:
    """Return the message that assigns a memory layout and a lease to a worker."""
    plan = assignment.plan
    return pb.RegisterWorkerResponse(
        plan=encode_plan(plan) if plan is not None else None,
        plan_digest=plan.digest() if plan is not None else "",
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
    plan = decode_plan(message.plan) if message.HasField("plan") else None
    if plan is not None and plan.digest() != message.plan_digest:
        raise InvalidArgument(
            f"the received memory layout has the digest {plan.digest()}, the service sent {message.plan_digest}",
            field="plan_digest",
            remedy="use the same version of worker and service",
        )
    tiers = decode_tiers(message.tiers)
    return Assignment(plan, message.num_ranks, message.lease_ms, tiers, message.content_id, message.namespace)


def encode_renewal(renewal: Renewal) -> pb.RenewWorkerResponse:
    """Return the message that answers a renewal."""
    return encode_same(renewal, pb.RenewWorkerResponse, "renewal")


def decode_renewal(message: pb.RenewWorkerResponse) -> Renewal:
    """Return the answer to a renewal."""
    return decode_same(Renewal, message)


def encode_news(news: PeerNews) -> pb.WatchPeersResponse:
    """Return the message that says what changed of a replica."""
    return encode_same(news, pb.WatchPeersResponse, "news", rows=encode_peers(news.rows, "rows"))


def decode_news(message: pb.WatchPeersResponse, digest_size: int) -> PeerNews:
    """Return what another service says of a replica. Raises InvalidArgument for what is out of range or malformed."""
    news = decode_same(PeerNews, message, rows=decode_peers(message.rows, digest_size, "rows"))
    if not (news.replica.isascii() and news.replica.isprintable() and 0 < len(news.replica) <= MAX_REPLICA_CHARS):
        remedy = f"send the name of a replica: at most {MAX_REPLICA_CHARS} characters"
        raise InvalidArgument(f"{news.replica[:140]!r} is no name", field="replica", remedy=remedy)
    for at, arena in enumerate(news.arenas):
        arena.validate(f"arenas[{at}]")
    return news
