"""`kvplane replicas`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplane_service.cli.asking import (
    DEFAULT_SERVICE,
    Form,
    Grpcurl,
    Output,
    Service,
    client_of,
    columns,
    grpcurl_line,
    show,
    word,
)

if TYPE_CHECKING:
    from kvplane.v1.allocation_pb2 import ListReplicasResponse

_PAGE = 1000


def command(service: Service = DEFAULT_SERVICE, output: Output = Form.TABLE, grpcurl: Grpcurl = False) -> None:
    """List the replicas of a service: who may write, and how full each pool is."""
    from kvplane import calls
    from kvplane.v1.allocation_pb2 import ListReplicasResponse

    if grpcurl:
        print(grpcurl_line(service, calls.list_replicas(_PAGE, "")))
        return
    with client_of(service) as client:
        answer = ListReplicasResponse(replicas=client.list_replicas())
    show(answer, output, lambda: _table(answer))


def _table(answer: ListReplicasResponse) -> str:
    from kvplane.v1.allocation_pb2 import ReplicaState

    rows = [("REPLICA", "STATE", "EPOCH", "BLOCKS", "FREE", "HELD")]
    for one in answer.replicas:
        usable = max(1, one.num_blocks - 1)
        state = word(ReplicaState.Name(one.state), "REPLICA_STATE_")
        held = f"{1 - one.free_blocks / usable:.0%}"
        rows.append((one.replica, state, str(one.epoch), str(one.num_blocks), str(one.free_blocks), held))
    return columns(rows)
