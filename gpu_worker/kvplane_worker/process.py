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

from kvplane.base.errors import KvplaneError, NoPlan, NotFound, Unavailable, WorkerExists, WrongPlan
from kvplane.base.worker import Assignment, WorkerInfo, WorkerState
from kvplane.blocking.workers import WorkersClient
from kvplane.rpc.access import PLAIN, Access
from kvplane.rpc.channel import open_channel
from kvplane.sansio.owners import Owners
from kvplane_worker.lending.holdings import Holdings
from kvplane_worker.lending.rundir import RunDir, default_run_dir
from kvplane_worker.memory import check_device, use_device
from kvplane_worker.ops.interface import PAGE_OPERATIONS
from kvplane_worker.ops.proof import prove_apart
from kvplane_worker.ops.select import AUTO, choose
from kvplane_worker.rpc.server import WorkerServer
from kvplane_worker.rpc.servicer import Post, WorkerServicer

RENEWALS_PER_LEASE = 3
LOOK_S = 0.05  # how often a leaving worker looks whether the engine has exited
REMIND_S = 20.0  # how often it logs which engine it waits for
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
    backend: str = AUTO
    access: Access = PLAIN
    wait: bool = False


class Stop:
    """Requests to stop, from signal handlers: the first starts an orderly leave, the second does not wait."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.now = threading.Event()

    def ask(self) -> None:
        """Ask once; ask twice to leave an attached engine behind."""
        if self.asked.is_set():
            self.now.set()
        self.asked.set()


class WorkerProcess:
    """One worker. `start` makes it ready, `serve` keeps it so until it is asked to stop."""

    def __init__(self, options: WorkerOptions, stop: Stop | None = None) -> None:
        """Choose the backend of page operations, and take the directory of the rank.

        Raises:
            InvalidArgument: the device is not there, no backend has this name.
            FailedPrecondition: the backend asked for cannot work on the device.
            Unavailable: asked to stop while a backend was being tried.
            WorkerExists: a worker of this rank lives on this host.
            PermissionDenied: the directory is another user's.
        """
        self._stop = stop or Stop()
        check_device(options.device)
        use_device(options.device)
        self._backend = choose(
            options.device, options.backend, PAGE_OPERATIONS, partial(prove_apart, stop=self._stop.asked)
        )
        if self._stop.asked.is_set():
            raise Unavailable("asked to stop while backends were tried", remedy="start the worker again")
        self._options = options
        self._place = RunDir(options.run_dir or default_run_dir(options.replica, options.rank))
        reach = partial(open_channel, access=options.access)
        self._service = WorkersClient(Owners.at(options.service, reach))
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
                if not self._options.wait or self._stop.asked.wait(WAIT_S):
                    raise
                if str(error) != said:
                    _log.info("waiting: %s", error)
                said = str(error)

    def serve(self) -> None:
        """Keep the lease until asked to stop, then wait for the attached engine to exit.

        Raises:
            WorkerExists: another worker took the rank, after this one was silent.
            WrongPlan, NoPlan: the replica was registered anew with another plan.
        """
        lease_s = 1.0
        try:
            while not self._stop.asked.wait(lease_s / RENEWALS_PER_LEASE):
                lease_s = self._renew() or lease_s
        except KvplaneError as error:
            _log.error("the worker of rank %d leaves: %s", self._info.rank, error)
            raise
        finally:
            self._see_engine_off()

    def leave(self) -> None:
        """Begin to leave; a second call does not wait for the engine."""
        self._stop.ask()

    def close(self) -> None:
        """Give everything back, whatever `start` got to; pages that a living engine maps are not freed."""
        self._forget(self._info.worker_id)
        if self._server is not None:
            self._server.stop(LAST_CALLS_S)
        lent = self._servicer is not None and self._servicer.attached_pid != 0
        if self._servicer is not None:
            self._servicer.close()
        if self._post is not None:
            self._post.holdings.close(lent)
        self._place.leave()
        self._service.close()

    def _see_engine_off(self) -> None:
        """Lend the pages to no other engine, and wait until the one that maps them has exited.

        Without a time limit: to free memory that another process maps is undefined behaviour on CUDA. Who cannot wait
        asks a second time, and the pages are left to the driver, which frees them when both processes have exited.
        """
        assert self._servicer is not None
        assert self._server is not None
        self._servicer.refuse_new()
        self._server.leaving()
        self._tell(state=WorkerState.LEAVING)
        try:
            self._renew()
        except KvplaneError as error:
            _log.warning("%s", error)
        remind_s = time.monotonic()
        while pid := self._servicer.attached_pid:
            if time.monotonic() >= remind_s:
                _log.info("waiting for engine %d, which maps the pages; a second signal does not wait", pid)
                remind_s += REMIND_S
            if self._stop.now.wait(LOOK_S):
                _log.warning("engine %d still maps the pages; they are not freed", pid)
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

    Signals count from the first line on: starting may take minutes where kernels are compiled.

    Args:
        options: of the worker.
        ready: called with the address once the pages can be attached.

    Raises:
        KvplaneError: as WorkerProcess.
    """
    stop = Stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.ask())
    process = WorkerProcess(options, stop)
    try:
        ready(process.start())
        process.serve()
    finally:
        process.close()
