"""The methods of the gRPC API kvplane.v1.Worker."""

from __future__ import annotations

import hmac
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain

from google.protobuf.message import Message

from kvplane import wire as client_wire
from kvplane.base.errors import LimitExceeded, PermissionDenied, Unavailable, WrongPlan
from kvplane.base.worker import WorkerInfo
from kvplane.v1 import worker_pb2 as pb
from kvplane_worker import transfers
from kvplane_worker.lending.holdings import Holdings
from kvplane_worker.lending.writer import ProcessName, Writer
from kvplane_worker.memory import free_bytes
from kvplane_worker.ops.select import Choice
from kvplane_worker.rpc import wire

MAX_THREADS = 8
THREADS_FOR_CLAIMS = 2


@dataclass(slots=True)
class ServedRank:
    """The rank whose pages a worker holds, and the objects that the worker's gRPC methods need.

    Attributes:
        replica: name of the replica.
        info: what the worker registers at the service; replaced when a value changes.
        token: token in the worker's directory, which callers send.
        holdings: pages, stamp table and staging buffer.
        backend: backend of page operations.
    """

    replica: str
    info: WorkerInfo
    token: str
    holdings: Holdings
    backend: Choice


class WorkerServicer:
    """The methods of kvplane.v1.Worker. For their arguments and errors see worker.proto.

    There are two locks, acquired in this order: one transfer at a time, and one call at a time that changes the writer.
    A claim, which makes a new engine life (epoch) the only one that may write the pages, acquires only the second lock.
    So a claim does not wait for a running transfer: its answer lists the blocks that the transfer writes, and every
    later transfer with an earlier epoch is refused. `Attach` acquires both locks, so that the writer changes only while
    no transfer runs.
    """

    def __init__(self, served: ServedRank) -> None:
        self._served = served
        self._writer = Writer()
        self._one_transfer = threading.Lock()
        self._one_at_a_time = threading.Lock()
        self._written: tuple[int, ...] = ()  # blocks that the running transfer writes
        # Blocks that the running and the queued transfers write, also where the client no longer waits.
        self._accepted: list[tuple[int, ...]] = []
        self._room = threading.BoundedSemaphore(MAX_THREADS - THREADS_FOR_CLAIMS)
        self._leaving = False

    @property
    def device(self) -> str:
        """The device of the pages: "cpu" or "cuda:N"."""
        return self._served.info.device

    @property
    def attached_pid(self) -> int:
        """The pid of the process to which the pages are lent; 0 = none."""
        with self._one_at_a_time:
            return self._writer.pid

    def refuse_new(self) -> None:
        """Refuse every further `Attach`, because the worker shuts down."""
        self._leaving = True

    def close(self) -> None:
        """Stop watching the process to which the pages are lent."""
        with self._one_at_a_time:
            self._writer.close()

    def Describe(self, _: pb.DescribeRequest) -> Message:  # noqa: N802
        """Return the state of the worker; see worker.proto."""
        served, stamps = self._served, self._served.holdings.stamps
        seq, part = stamps.position
        groups = range(served.holdings.buffers.num_groups)
        return pb.DescribeResponse(
            replica=served.replica,
            worker=client_wire.encode_worker(replace(served.info, owner_epoch=stamps.owner_epoch)),
            orders_seq=seq,
            orders_part=part,
            executed_seq=stamps.executed,
            size_bytes=served.holdings.buffers.memory.numel(),
            free_bytes=free_bytes(served.info.device),
            backend=served.backend.ops.name,
            backend_reasons=served.backend.explained,
            attached_pid=self.attached_pid,
            staging_rows=[served.holdings.rows(group) for group in groups],
            busy=wire.encode_blocks(list(dict.fromkeys(chain.from_iterable(list(self._accepted))))),
        )

    def Attach(self, request: pb.AttachRequest) -> Message:  # noqa: N802
        """Lend the pages to the calling process, or only the stamp table; see worker.proto."""
        self._check_token(request.token)
        digest = self._served.info.plan_digest
        if request.plan_digest and request.plan_digest != digest:
            raise WrongPlan(
                f"the pages have the memory layout {digest}, the caller expects {request.plan_digest}",
                field="plan_digest",
                remedy="attach to a worker of this registration of the replica, or restart the worker",
            )
        if self._leaving:
            raise Unavailable("the worker is shutting down", remedy="attach to the worker that is started in its place")
        if not request.stamps_only:
            with self._a_thread(), self._one_transfer, self._one_at_a_time:
                if self._writer.lend(ProcessName(request.pid, request.start_ticks)):
                    self._served.holdings.stamps.launches_ended()  # safe: the process that launched them has exited
        return wire.encode_attached(self._served.holdings, request.stamps_only)

    def Transfer(self, request: pb.TransferRequest) -> Message:  # noqa: N802
        """Copy pages within the rank, or to and from the staging buffer; see worker.proto."""
        self._check_token(request.token)
        order, holdings = wire.decode_transfer(request), self._served.holdings
        with self._a_thread(), self._accepting(order), self._one_transfer, self._writing(order, request.epoch):
            outcome = transfers.transfer(holdings, self._served.backend.ops, order)
        return wire.encode_transferred(outcome)

    @contextmanager
    def _accepting(self, order: transfers.Transfer) -> Iterator[None]:
        """List the blocks that a transfer may write as busy until the transfer has ended, also if its client timed out:
        a queued transfer still runs.
        """
        self._accepted.append(order.written)
        try:
            yield
        finally:
            self._accepted.remove(order.written)

    @contextmanager
    def _writing(self, order: transfers.Transfer, epoch: int) -> Iterator[None]:
        """List the blocks that a transfer writes in the answers to claims while the transfer runs. Raises the errors of
        `transfers.check_start`.
        """
        with self._one_at_a_time:
            transfers.check_start(self._served.holdings, order, epoch)
            self._written = order.written
        try:
            yield
        finally:
            self._written = ()

    @contextmanager
    def _a_thread(self) -> Iterator[None]:
        """Reserve a thread for a call that may wait. THREADS_FOR_CLAIMS threads stay free for claims, which must not
        wait.
        """
        if not self._room.acquire(blocking=False):
            raise LimitExceeded(
                f"{MAX_THREADS - THREADS_FOR_CLAIMS} calls already wait for a transfer to end, the maximum",
                remedy="retry after one of them was answered",
            )
        try:
            yield
        finally:
            self._room.release()

    def Checksum(self, request: pb.ChecksumRequest) -> Message:  # noqa: N802
        """Return checksums of pages; see worker.proto."""
        with self._a_thread():
            served, blocks = self._served, list(request.blocks)
            outcome = transfers.checksum(served.holdings, served.backend.ops, request.group, blocks)
        return wire.encode_checksums(outcome)

    def Claim(self, request: pb.ClaimRequest) -> Message:  # noqa: N802
        """Make a new engine life (epoch) the owner of the pages, the only one that may write them; see worker.proto."""
        self._check_token(request.token)
        with self._one_at_a_time:
            self._served.holdings.stamps.begin_life(request.epoch)
            return wire.encode_claimed(self._served.holdings, self._written)

    def _check_token(self, token: str) -> None:
        if not hmac.compare_digest(token.encode(), self._served.token.encode()):
            raise PermissionDenied(
                "the token of the call is not the worker's",
                field="token",
                remedy="send the content of the file 'token' in the worker's directory",
            )
