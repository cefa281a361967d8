"""The engine's side of a worker: the engine maps the pages that a worker on the same host holds."""

from __future__ import annotations

import time
from pathlib import Path

from google.protobuf.message import Message

from kvplane.base.errors import Unavailable
from kvplane.base.rank_plan import RankPlan
from kvplane.base.stamp_table import StampTable, table_bytes
from kvplane.blocking.client import Client
from kvplane.rpc.channel import open_channel
from kvplane.rpc.peers import check_listener
from kvplane.unary.calls import Answer, Call
from kvplane.v1 import worker_pb2 as pb
from kvplane.wire import decode_plan, encode_plan
from kvplane_worker.lending.holdings import Holdings
from kvplane_worker.lending.rundir import SOCKET, read_token, run_dir_of
from kvplane_worker.memory import SharedMemory
from kvplane_worker.rpc import wire

WORKER = "kvplane.v1.Worker"
MAX_MESSAGE_BYTES = 1 << 30  # 2^27 blocks with 8 bytes of stamp each
RETRY_S = 0.02  # between looks for a process that listens


class WorkerClient(Client):
    """A client of the worker that uses a given directory. It connects to the Unix socket in that directory and raises
    the errors of `kvplane.Client`.
    """

    def __init__(self, run_dir: Path, timeout_s: float = 10.0) -> None:
        """Wait until a process listens at the socket.

        Raises:
            PermissionDenied: a process of another user listens there.
            Unavailable: no process listens there within `timeout_s` seconds.
        """
        _wait_for_listener(str(run_dir / SOCKET), timeout_s)
        channel = open_channel(f"unix:{run_dir / SOCKET}", max_message_bytes=MAX_MESSAGE_BYTES)
        super().__init__(channel, timeout_s=timeout_s, max_message_bytes=MAX_MESSAGE_BYTES)

    def call(self, method: str, request: Message, answer_type: type[Answer]) -> Answer:
        """Call a method and return its answer. Retries while the worker cannot be reached."""
        return self._do(Call(f"/{WORKER}/{method}", request, answer_type))


def _wait_for_listener(path: str, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return check_listener(path, path)
        except Unavailable:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(RETRY_S)


def attach(where: str | Path, plan_digest: str = "", opaque_plan: RankPlan | None = None) -> Holdings:
    """Map the pages of a worker. This process becomes their only writer until it exits; `close` only unmaps them. The
    worker and this process see each other's writes.

    Args:
        where: the path of the worker's directory, or the worker's address as `DescribeReplica` returns it.
        plan_digest: digest of the memory layout that the pages must have; "" = any.
        opaque_plan: the memory layout (`RankPlan.opaque`), for a worker without a service. The worker keeps its memory
            if it has this layout, and allocates zeroed memory, a new incarnation, otherwise.

    Raises:
        OtherWriter: the pages are lent to another process, whose id is `metadata["pid"]`.
        PermissionDenied: the worker runs as another user.
        NotFound, Unavailable: no worker answers at this address.
        WrongPlan: the pages have another memory layout, or an opaque plan is given to a worker that has a service.
        NoPlan: the worker has neither a service nor a plan.
        OutOfMemory: the memory for the opaque plan cannot be allocated.
        FailedPrecondition: stamp table and pages belong to different allocations (incarnations), so the memory is
            damaged.
    """
    request = pb.AttachRequest(plan_digest=plan_digest)
    if opaque_plan is not None:
        request.opaque_plan.CopyFrom(encode_plan(opaque_plan))
    answer = _ask(where, request)
    return Holdings.map(*wire.decode_attached(answer))


def map_stamps(where: str | Path) -> tuple[StampTable, memoryview]:
    """Map the stamp table and the key records of a worker with an opaque plan, writable, for the scheduler of the
    engine whose rank has attached its pages. Returns also the memory of the records (`KeyRecords`).

    Raises NotFound, Unavailable, PermissionDenied and NoPlan as `attach` does.
    """
    answer = _ask(where, pb.AttachRequest(stamps_only=True))
    view = SharedMemory.open(wire.decode_handle(answer.stamps)).view
    return StampTable(view), view[table_bytes(decode_plan(answer.plan).num_blocks) :]


def attached_pid(where: str | Path) -> int:
    """Return the id of the process to which a worker's pages are lent; 0 = none. Raises the errors of `map_stamps`."""
    return describe(where).attached_pid


def read_stamps(where: str | Path) -> StampTable:
    """Map the stamp table of a worker read-only, for a scheduler whose ranks run in other processes.

    A write to the table raises TypeError. Raises NotFound, Unavailable and PermissionDenied as `attach` does.
    """
    answer = _ask(where, pb.AttachRequest(stamps_only=True))
    return StampTable(SharedMemory.open(wire.decode_handle(answer.stamps), writable=False).view)


def pages_under_transfer(where: str | Path) -> tuple[int, ...]:
    """Return the blocks that transfers of the worker are writing. Raises the errors of `read_stamps`.

    An engine needs this function if the service could not claim its workers, that is, make the new engine life (epoch)
    the only one that may write their pages. The engine then claims the workers itself and calls this function until the
    result is empty. This is safe because after a claim a worker starts no transfer of an earlier engine life.
    """
    return wire.decode_blocks(describe(where).busy)


def describe(where: str | Path) -> pb.DescribeResponse:
    """Return what a worker says of itself and its pages. Raises the errors of `map_stamps`."""
    run_dir = run_dir_of(where)
    with WorkerClient(run_dir) as worker:
        return worker.call("Describe", pb.DescribeRequest(token=read_token(run_dir)), pb.DescribeResponse)


def _ask(where: str | Path, request: pb.AttachRequest) -> pb.AttachResponse:
    run_dir = run_dir_of(where)
    request.token = read_token(run_dir)
    with WorkerClient(run_dir) as worker:
        return worker.call("Attach", request, pb.AttachResponse)
