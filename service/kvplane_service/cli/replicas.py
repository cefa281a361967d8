"""`kvplane replicas`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvplane.v1.allocation_pb2 import DescribeReplicaResponse
    from kvplane.v1.plan_pb2 import WorkerInfo


def command(
    service: Annotated[str, typer.Option(help="Address of the kvplane service.")] = "127.0.0.1:7070",
) -> None:
    """List the replicas of a service, and the workers that hold their pages."""
    import kvplane

    with kvplane.connect(service) as client:
        for summary in client.list_replicas():
            sys.stdout.write("".join(f"{line}\n" for line in lines_of(client.describe_replica(summary.replica))))


def lines_of(replica: DescribeReplicaResponse) -> list[str]:
    """A replica in a line, and a line per worker below it."""
    from kvplane.v1.allocation_pb2 import ReplicaState

    state = ReplicaState.Name(replica.state).removeprefix("REPLICA_STATE_").lower()
    pool = f"{replica.free_blocks} of {replica.spec.num_blocks} blocks free"
    ranks = f"{len(replica.workers)} of {replica.num_ranks} ranks have a worker"
    head = f"{replica.replica}  {state}  epoch {replica.epoch}  {pool}  {ranks}"
    return [head, *(f"  {_line_of(worker)}" for worker in replica.workers)]


def _line_of(worker: WorkerInfo) -> str:
    from kvplane.v1.plan_pb2 import WorkerState

    state = WorkerState.Name(worker.state).removeprefix("WORKER_STATE_").lower()
    where = f"{worker.device}  process {worker.pid}  incarnation {worker.incarnation:016x}  {worker.address}"
    return f"rank {worker.rank}  {state}  {where}"
