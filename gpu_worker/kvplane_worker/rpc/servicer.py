"""The methods of the gRPC API kvplane.v1.Worker."""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain

from google.protobuf.message import Message

from kvplane import wire as client_wire
from kvplane.base.errors import (
    FailedPrecondition,
    KvplaneError,
    LimitExceeded,
    NoPlan,
    PermissionDenied,
    Unavailable,
    WrongPlan,
)
from kvplane.base.rank_plan import RankPlan
from kvplane.base.worker import WorkerInfo, WorkerState
from kvplane.v1 import worker_pb2 as pb
from kvplane.wire.same import decode_same, encode_same
from kvplane_kernels.select import Choice
from kvplane_worker import transfers
from kvplane_worker.lending.holdings import Holdings
from kvplane_worker.lending.writer import ProcessName, Writer
from kvplane_worker.memory import free_bytes
from kvplane_worker.rpc import wire
from kvplane_worker.rpc.callers import Caller
from kvplane_worker.tiers import Movers, use_of

MAX_THREADS = 8
THREADS_FOR_CLAIMS = 2


@dataclass(slots=True)
class ServedRank:
    """The rank whose pages a worker holds, and the objects that the worker's gRPC methods need.

    Attributes:
        replica: name of the replica.
        info: what the worker registers at the service; replaced when a value changes.
        token: token in the worker's directory, which callers send.
        memory: pages, stamp table and staging buffer; None until an engine has given its plan.
        backend: backend of page operations.
        allocate: allocates memory for the plan of an engine; None if the worker's plan comes from a service.
        movers: of the tiers of the replica; None if it has none.
    """

    replica: str
    info: WorkerInfo
    token: str
    memory: Holdings | None
    backend: Choice
    allocate: Callable[[RankPlan], Holdings] | None = None
    movers: Movers | None = None

    @property
    def holdings(self) -> Holdings:
        """Pages, stamp table and staging buffer. Raises NoPlan if there are none yet."""
        if self.memory is None:
            raise NoPlan(
                "the worker has no pages yet: it has no service, and no engine has given it a plan",
                field="opaque_plan",
                remedy="attach the engine with opaque_plan",
            )
        return self.memory

    def hold(self, plan: RankPlan, is_mapped: bool) -> None:
        """Keep the memory if it has this plan; otherwise free it and allocate new memory, a new incarnation.

        `is_mapped`: whether the calling process has the memory already.

        Raises:
            WrongPlan: the worker's plan comes from a service.
            FailedPrecondition: the calling process has mapped the memory with another plan.
            OutOfMemory: the memory cannot be allocated; the worker then has none.
        """
        if self.allocate is None or not plan.opaque_layout:
            raise WrongPlan(
                "the plan of this worker comes from its service" if plan.opaque_layout else "the plan is not opaque",
                field="opaque_plan",
                remedy="start the worker without --service, and give an opaque plan",
            )
        if self.memory is not None and self.memory.buffers.plan == plan:
            return
        if is_mapped:
            raise FailedPrecondition(
                "this process has mapped the pages with another plan",
                field="opaque_plan",
                remedy="start a new process to change the size or the layout of the pages",
            )
        if self.memory is not None:
            held, self.memory = self.memory, None
            held.close()  # safe: the process that mapped it has exited
        self.memory = self.allocate(plan)
        incarnation, digest = self.memory.stamps.incarnation, plan.digest()
        self.info = replace(self.info, state=WorkerState.READY, incarnation=incarnation, plan_digest=digest)


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

    def Describe(self, request: pb.DescribeRequest, _: Caller | None = None) -> Message:  # noqa: N802
        """Return the state of the worker; see worker.proto."""
        self._check_token(request.token)
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
            busy=wire.encode_blocks(list(dict.fromkeys(chain(*list(self._accepted), self._loaded())))),
            tiers=_tiers_of(served.movers),
        )

    def _loaded(self) -> tuple[int, ...]:
        """Return the blocks that loads from the tiers are writing."""
        return self._served.movers.written if self._served.movers is not None else ()

    def Attach(self, request: pb.AttachRequest, caller: Caller) -> Message:  # noqa: N802
        """Lend the pages to the calling process, or only the stamp table; see worker.proto."""
        self._check_token(request.token)
        if self._leaving:
            raise Unavailable("the worker is shutting down", remedy="attach to the worker that is started in its place")
        if request.HasField("opaque_plan"):
            self._lend(request, caller())
        digest = self._served.info.plan_digest
        if request.plan_digest and request.plan_digest != digest:
            raise WrongPlan(
                f"the pages have the memory layout {digest}, the caller expects {request.plan_digest}",
                field="plan_digest",
                remedy="attach to a worker of this registration of the replica, or restart the worker",
            )
        if not request.stamps_only and not request.HasField("opaque_plan"):
            self._lend(request, caller())
        return wire.encode_attached(self._served.holdings, request.stamps_only)

    def _lend(self, request: pb.AttachRequest, caller: ProcessName) -> None:
        """Lend the pages to the calling process, after a change to the plan that it gives, if it gives one."""
        served = self._served
        plan = client_wire.decode_plan(request.opaque_plan) if request.HasField("opaque_plan") else None
        with self._a_thread(), self._one_transfer, self._one_at_a_time:
            is_new = self._writer.lend(caller)
            try:
                if plan is not None:
                    served.hold(plan, is_mapped=not is_new)
                if is_new:
                    served.holdings.stamps.launches_ended()  # safe: the process that launched them has exited
            except KvplaneError:
                if is_new:
                    self._writer.close()  # nothing was lent
                raise

    def Transfer(self, request: pb.TransferRequest, _: Caller | None = None) -> Message:  # noqa: N802
        """Copy pages within the rank, or to and from the staging buffer; see worker.proto."""
        self._check_token(request.token)
        order, holdings = decode_same(transfers.Transfer, request), self._served.holdings
        with self._a_thread(), self._accepting(order), self._one_transfer, self._writing(order, request.epoch):
            outcome = transfers.transfer(holdings, self._served.backend.ops, order)
        return encode_same(outcome, pb.TransferResponse, "outcome")

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

    def Checksum(self, request: pb.ChecksumRequest, _: Caller | None = None) -> Message:  # noqa: N802
        """Return checksums of pages; see worker.proto."""
        self._check_token(request.token)
        with self._a_thread():
            served, blocks = self._served, list(request.blocks)
            outcome = transfers.checksum(served.holdings, served.backend.ops, request.group, blocks)
        return encode_same(outcome, pb.ChecksumResponse, "outcome")

    def Claim(self, request: pb.ClaimRequest, _: Caller | None = None) -> Message:  # noqa: N802
        """Make a new engine life (epoch) the owner of the pages, the only one that may write them; see worker.proto."""
        self._check_token(request.token)
        self._check_worker(request.worker_id)
        served = self._served
        with self._one_at_a_time:
            if served.movers is not None:
                loaded = served.movers.claim(request.epoch)
            else:
                loaded = ()
                served.holdings.stamps.begin_life(request.epoch)
            return wire.encode_claimed(served.holdings, tuple(dict.fromkeys((*self._written, *loaded))))

    def _check_worker(self, worker_id: int) -> None:
        if worker_id not in (0, self._served.info.worker_id):
            raise FailedPrecondition(
                f"this is worker {self._served.info.worker_id}, not {worker_id}",
                field="worker_id",
                remedy="claim the worker that is registered for the rank",
            )

    def _check_token(self, token: str) -> None:
        if not hmac.compare_digest(token.encode(), self._served.token.encode()):
            raise PermissionDenied(
                "the token of the call is not the worker's",
                field="token",
                remedy="send the content of the file 'token' in the worker's directory",
            )


def _tiers_of(movers: Movers | None) -> list[pb.WorkerTier]:
    """Return the messages of a worker's tiers. Not in `wire`, which engines import: tiers need packages of a worker."""
    tiers = enumerate(movers.tiers if movers is not None else ())
    return [
        encode_same(use_of(one), pb.WorkerTier, f"tiers[{number}]", num_blocks=one.spec.num_blocks)
        for number, one in tiers
    ]
