"""The worker process from start to end: plan, memory, service, lease, and a graceful leave."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kvplane.access import PLAIN, Access
from kvplane.base.errors import KvplaneError, NoPlan, NotFound, Unavailable, WorkerExists, WrongPlan
from kvplane.base.worker import Assignment, WorkerInfo, WorkerState
from kvplane.channel import open_channel
from kvplane.owners import Owners
from kvplane.workers import WorkersClient
from kvplane_worker.holdings import Holdings
from kvplane_worker.memory import check_device
from kvplane_worker.ops.select import AUTO, choose
from kvplane_worker.rundir import RunDir, default_run_dir
from kvplane_worker.server import Post, WorkerServer, WorkerServicer

RENEWALS_PER_LEASE = 3
LOOK_S = 0.05  # how often a leaving worker looks whether the engine has exited
WAIT_S = 1.0  # how often a worker that waits for its replica asks
LAST_CALLS_S = 1.0
FINAL = (WorkerExists, WrongPlan, NoPlan)  # whatever else a service says or not, the pages wait for it

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How a worker is started.

    Attributes:
        service: address of the kvplane service, or several with commas between them.
        replica, rank: whose pages it holds.
        device: "cpu" or "cuda:N".
        run_dir: its directory; None = the default one of the rank.
        staging_bytes: of the staging buffer, at least one block.
        grace_s: after SIGTERM, an attached engine has so long to exit.
        backend: of the operations on pages, by name; "auto" = the best that fits the device.
        access: TLS and token for the service.
        wait: until the service is there and knows the replica; else that is an error.
    """

    service: str
    replica: str
    rank: int
    device: str = "cpu"
    run_dir: Path | None = None
    staging_bytes: int = 16 << 20
    grace_s: float = 20.0
    backend: str = AUTO
    access: Access = PLAIN
    wait: bool = False


class WorkerProcess:
    """One worker. `start` makes it ready, `serve` keeps it so until it is told to leave."""

    def __init__(self, options: WorkerOptions) -> None:
        """Take the directory of the rank.

        Raises:
            InvalidArgument: the device is not there, no backend has this name.
            FailedPrecondition: the backend asked for cannot work on the device.
            WorkerExists: a worker of this rank lives on this host.
            PermissionDenied: the directory is another user's.
        """
        check_device(options.device)
        self._backend = choose(options.device, options.backend)
        self._options = options
        self._place = RunDir(options.run_dir or default_run_dir(options.replica, options.rank))
        reach = partial(open_channel, access=options.access)
        self._service = WorkersClient(Owners.at(options.service, reach))
        self._leave = threading.Event()
        self._now = threading.Event()
        self._info = WorkerInfo(
            options.rank, secrets.randbits(64) or 1, self._place.address, os.getpid(), options.device
        )
        self._post: Post | None = None
        self._servicer: WorkerServicer | None = None
        self._server: WorkerServer | None = None

    def start(self) -> str:
        """Take the plan, allocate the pages, serve, and register; returns the address.

        Raises:
            WorkerExists: another worker holds the rank.
            OutOfMemory: the plan does not fit on the device.
            NoPlan, NotFound, InvalidArgument, Unavailable: of the service; the second and the last also when it was
                told to leave while it waited.
        """
        options, place = self._options, self._place
        if place.last is not None:
            # Its lease goes on, but it is dead: the lock of its directory was free.
            self._forget(place.last.worker_id)
        place.write_state(self._info.worker_id)
        assignment = self._first_assignment()
        holdings = Holdings.allocate(assignment.plan, options.device, place, options.staging_bytes)
        self._post = Post(options.replica, self._info, place.token, holdings, self._backend)
        self._tell(state=WorkerState.READY, incarnation=holdings.stamps.incarnation, digest=assignment.plan.digest())
        self._servicer = WorkerServicer(self._post)
        self._server = WorkerServer(self._servicer, place.address)
        self._server.start()
        self._renew()
        return place.address

    def _first_assignment(self) -> Assignment:
        """The rank's plan: now, or when the engine has registered the replica."""
        said = ""
        while True:
            try:
                return self._service.register_worker(self._options.replica, self._info)
            except (NotFound, Unavailable) as error:
                if not self._options.wait or self._leave.wait(WAIT_S):
                    raise
                if str(error) != said:
                    _log.info("waiting: %s", error)
                said = str(error)

    def serve(self) -> None:
        """Keep the lease until `leave`, then let an attached engine finish and go.

        Raises:
            WorkerExists: another worker took the rank, after this one was silent.
            WrongPlan, NoPlan: the replica was registered anew with another plan.
        """
        lease_s = 1.0
        try:
            while not self._leave.wait(lease_s / RENEWALS_PER_LEASE):
                lease_s = self._renew() or lease_s
        finally:
            self._see_engine_off()

    def leave(self) -> None:
        """Begin to go; a second call does not wait for the engine. For signal handlers."""
        if self._leave.is_set():
            self._now.set()
        self._leave.set()

    def close(self) -> None:
        """Give everything back, whatever `start` got to."""
        self._forget(self._info.worker_id)
        if self._server is not None:
            self._server.stop(LAST_CALLS_S)
        if self._servicer is not None:
            self._servicer.close()
        if self._post is not None:
            self._post.holdings.close()
        self._place.leave()
        self._service.close()

    def _see_engine_off(self) -> None:
        """Lend the pages to nobody else, and wait for the engine that has them."""
        assert self._servicer is not None
        assert self._server is not None
        self._servicer.refuse_new()
        self._server.leaving()
        self._tell(state=WorkerState.LEAVING)
        try:
            self._renew()
        except KvplaneError as error:
            _log.warning("%s", error)
        deadline_s = time.monotonic() + self._options.grace_s
        while self._servicer.attached_pid and time.monotonic() < deadline_s:
            if self._now.wait(LOOK_S):
                return

    def _renew(self) -> float:
        """Keep the lease; returns it in seconds, 0 when the service does not answer: pages outlive it."""
        assert self._post is not None
        self._tell()
        try:
            return self._service.renew_worker(self._options.replica, self._post.info) / 1000
        except FINAL:
            raise
        except NotFound:
            return self._register_again() / 1000
        except KvplaneError as error:
            _log.warning("%s", error)
            return 0.0

    def _register_again(self) -> int:
        """The service forgot the worker, or began anew: the pages stay good as long as their plan does."""
        assert self._post is not None
        try:
            assignment = self._service.register_worker(self._options.replica, self._post.info)
        except FINAL:
            raise
        except KvplaneError as error:
            _log.warning("%s", error)  # such as: the replica is not registered yet, or no more
            return 0
        self._check_plan(assignment)
        return assignment.lease_ms

    def _check_plan(self, assignment: Assignment) -> None:
        digest = assignment.plan.digest()
        if digest != self._info.plan_digest:
            raise WrongPlan(
                f"the pages have plan {self._info.plan_digest}, {self._options.replica} has {digest} now",
                field="replica",
                remedy="start the worker again, to allocate the new plan",
            )

    def _tell(self, state: WorkerState | None = None, incarnation: int = 0, digest: str = "") -> None:
        """Bring what the worker says of itself up to date."""
        assert self._post is not None
        self._info = self._post.info = replace(
            self._info,
            state=state or self._info.state,
            incarnation=incarnation or self._info.incarnation,
            plan_digest=digest or self._info.plan_digest,
            owner_epoch=self._post.holdings.stamps.owner_epoch,
        )

    def _forget(self, worker_id: int) -> None:
        """Let the service forget a worker at once: a courtesy, without which its lease ends."""
        try:
            self._service.deregister_worker(self._options.replica, worker_id)
        except KvplaneError as error:
            _log.warning("%s", error)


def run(options: WorkerOptions, ready: Callable[[str], None]) -> None:
    """Be a worker until SIGTERM or SIGINT; a second signal does not wait for the engine.

    Args:
        options: of the worker.
        ready: called with the address once the pages can be attached.

    Raises:
        KvplaneError: as WorkerProcess.
    """
    process = WorkerProcess(options)
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: process.leave())
        ready(process.start())
        process.serve()
    finally:
        process.close()
