"""A service that follows an allocator in the engine's process: the engine sends each step, and never waits."""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING, cast

import grpc

from kvplane.base.errors import KvplaneError
from kvplane.base.session import MirrorTerms, OpenRequest
from kvplane.blocking.mirror import MirrorSender
from kvplane.blocking.registering import EngineInfo
from kvplane.rpc.channel import open_channel
from kvplane.rpc.status import RpcOutcome, error_of_rpc
from kvplane.v1.allocation_pb2 import DescribeReplicaRequest
from kvplane.v1.allocation_pb2_grpc import AllocationStub
from kvplane_core.face import state

if TYPE_CHECKING:
    from kvplane_core.face.native import NativeReplica
    from kvplane_vllm.target import Target

EPOCH_TIMEOUT_S = 2.0

logger = logging.getLogger("vllm.kvplane")  # with the handlers of vLLM


def last_epoch(target: Target) -> int:
    """Return the newest epoch of the replica at the service; 0 if it has none, or cannot be reached."""
    try:
        with open_channel(target.address, target.access) as channel:
            request = DescribeReplicaRequest(replica=target.replica)
            return int(AllocationStub(channel).DescribeReplica(request, timeout=EPOCH_TIMEOUT_S).epoch)
    except grpc.RpcError as error:
        problem: KvplaneError = error_of_rpc(cast(RpcOutcome, error))
        logger.info("the epoch of %s is not known: %s", target.replica, problem)
        return 0


def sender_of(
    target: Target,
    replica: NativeReplica,
    incarnation: int = 0,
    takes_rows: bool = False,
    namespace: bytes = b"",
    num_ranks: int = 1,
) -> MirrorSender:
    """Return the sender of the steps of a replica, which is between two steps, and begin to connect.

    `incarnation`: of the memory of its blocks; 0 = they end with this process. `takes_rows`: as in `MirrorTerms`.
    `namespace`, `num_ranks`: as in `EngineInfo`.
    """
    life = secrets.randbits(64) or 1
    request = OpenRequest(
        target.replica,
        nonce=0,
        epoch=replica.coordinator.pool.epoch,
        client="vllm",
        incarnation=incarnation or life,
        life_nonce=life,
        mirror=MirrorTerms(replica.spec.commit, takes_rows=takes_rows),
    )
    export = lambda: (replica.seq, state.slices(replica))  # noqa: E731
    info = EngineInfo(target.model_name, namespace, num_ranks)
    return MirrorSender(target.address, request, replica.spec, export, target.access, info)
