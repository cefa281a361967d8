"""The methods of kvplane.v1.Worker."""

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
class Post:
    """What a worker serves, from where and as whom.

    Attributes:
        replica: its name.
        info: as it is registered; replaced when it changes.
        token: of its directory.
    """

    replica: str
    info: WorkerInfo
    token: str
    holdings: Holdings
    backend: Choice


class WorkerServicer:
    """See the contract. One transfer at a time, and one call at a time that changes who may write.

    The two locks are taken in this order. A claim does not wait for a transfer: it lists what that one writes, and a
    transfer that comes behind it is refused by its epoch. Pages are lent to no new process while one is under way.
    """

    def __init__(self, post: Post) -> None:
        self._post = post
        self._writer = Writer()
        self._one_transfer = threading.Lock()
        self._one_at_a_time = threading.Lock()
        self._written: tuple[int, ...] = ()  # by the transfer under way
        self._accepted: list[
            tuple[int, ...]
        ] = []  # what it and those behind it write, whether a caller still waits or not
        self._room = threading.BoundedSemaphore(MAX_THREADS - THREADS_FOR_CLAIMS)
        self._leaving = False

    @property
    def device(self) -> str:
        """Of the pages: "cpu" or "cuda:N"."""
        return self._post.info.device

    @property
    def attached_pid(self) -> int:
        """The process that has the pages, 0 = none."""
        with self._one_at_a_time:
            return self._writer.pid

    def refuse_new(self) -> None:
        """Lend the pages to nobody else."""
        self._leaving = True

    def close(self) -> None:
        """Stop watching who has the pages."""
        with self._one_at_a_time:
            self._writer.close()

    def Describe(self, _: pb.DescribeRequest) -> Message:  # noqa: N802
        """See the contract."""
        post, stamps = self._post, self._post.holdings.stamps
        seq, part = stamps.position
        groups = range(post.holdings.buffers.num_groups)
        return pb.DescribeResponse(
            replica=post.replica,
            worker=client_wire.encode_worker(replace(post.info, owner_epoch=stamps.owner_epoch)),
            carried_seq=seq,
            carried_part=part,
            executed_seq=stamps.executed,
            size_bytes=post.holdings.buffers.memory.numel(),
            free_bytes=free_bytes(post.info.device),
            backend=post.backend.ops.name,
            backend_reasons=post.backend.explained,
            attached_pid=self.attached_pid,
            staging_rows=[post.holdings.rows(group) for group in groups],
            busy=wire.encode_blocks(list(dict.fromkeys(chain.from_iterable(list(self._accepted))))),
        )

    def Attach(self, request: pb.AttachRequest) -> Message:  # noqa: N802
        """See the contract."""
        self._check_token(request.token)
        digest = self._post.info.plan_digest
        if request.plan_digest and request.plan_digest != digest:
            raise WrongPlan(
                f"the pages have plan {digest}, {request.plan_digest} is expected",
                field="plan_digest",
                remedy="attach to a worker of this registration of the replica, or restart the worker",
            )
        if self._leaving:
            raise Unavailable("the worker is going away", remedy="attach to its successor")
        if not request.stamps_only:
            with self._a_thread(), self._one_transfer, self._one_at_a_time:
                if self._writer.lend(ProcessName(request.pid, request.start_ticks)):
                    self._post.holdings.stamps.launches_ended()  # with the process that had them
        return wire.encode_attached(self._post.holdings, request.stamps_only)

    def Transfer(self, request: pb.TransferRequest) -> Message:  # noqa: N802
        """See the contract."""
        self._check_token(request.token)
        order, holdings = wire.decode_transfer(request), self._post.holdings
        with self._a_thread(), self._accepting(order), self._one_transfer, self._writing(order, request.epoch):
            outcome = transfers.transfer(holdings, self._post.backend.ops, order)
        return wire.encode_transferred(outcome)

    @contextmanager
    def _accepting(self, order: transfers.Transfer) -> Iterator[None]:
        """Describe lists what the order writes until it has ended: a call that timed out in the queue still runs."""
        self._accepted.append(order.written)
        try:
            yield
        finally:
            self._accepted.remove(order.written)

    @contextmanager
    def _writing(self, order: transfers.Transfer, epoch: int) -> Iterator[None]:
        """A claim meanwhile lists what the order writes. Raises when it may not start."""
        with self._one_at_a_time:
            transfers.check_start(self._post.holdings, order, epoch)
            self._written = order.written
        try:
            yield
        finally:
            self._written = ()

    @contextmanager
    def _a_thread(self) -> Iterator[None]:
        """For calls that may wait; some threads are left to those that must not."""
        if not self._room.acquire(blocking=False):
            raise LimitExceeded("too many calls wait for a transfer to end", remedy="try again when one was answered")
        try:
            yield
        finally:
            self._room.release()

    def Checksum(self, request: pb.ChecksumRequest) -> Message:  # noqa: N802
        """See the contract."""
        with self._a_thread():
            post, blocks = self._post, list(request.blocks)
            outcome = transfers.checksum(post.holdings, post.backend.ops, request.group, blocks)
        return wire.encode_checksums(outcome)

    def Claim(self, request: pb.ClaimRequest) -> Message:  # noqa: N802
        """See the contract."""
        self._check_token(request.token)
        with self._one_at_a_time:
            self._post.holdings.stamps.begin_life(request.epoch)
            return wire.encode_claimed(self._post.holdings, self._written)

    def _check_token(self, token: str) -> None:
        if not hmac.compare_digest(token.encode(), self._post.token.encode()):
            raise PermissionDenied(
                "this is not the worker's token", field="token", remedy="send the content of its file 'token'"
            )
