"""The worker process: it gets its rank's memory layout, allocates and lends the pages, keeps its lease, and
shuts down.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from kvplane.base.errors import KvplaneError, NoPlan, NotFound, Unavailable, WorkerExists, WrongPlan
from kvplane.base.groups import TierKind
from kvplane.base.worker import Assignment, WorkerInfo, WorkerState
from kvplane.blocking.workers import WorkersClient
from kvplane.rpc.access import PLAIN, Access
from kvplane.rpc.channel import open_channel
from kvplane.sansio.owners import Owners
from kvplane_kernels.interface import PAGE_OPERATIONS
from kvplane_kernels.proof import prove_in_subprocess
from kvplane_kernels.select import AUTO, Choice, choose
from kvplane_worker.lending.holdings import Holdings
from kvplane_worker.lending.rundir import RunDir, default_run_dir, shared_prefix
from kvplane_worker.memory import check_device, use_device
from kvplane_worker.nixl.transport import PeerTransport
from kvplane_worker.rpc.arenas import PeersOfWorker
from kvplane_worker.rpc.server import WorkerServer
from kvplane_worker.rpc.servicer import ServedRank, WorkerServicer
from kvplane_worker.tiers import TierOptions, start_movers, use_of

RENEWALS_PER_LEASE = 3
POLL_S = 0.05  # poll interval of a leaving worker: has the engine exited?
LOG_INTERVAL_S = 20.0  # between log lines of a worker that waits for its engine
RETRY_S = 1.0  # between attempts to register, with --wait
GRACE_S = 1.0  # for calls under way when the server stops
ALONE_S = 60.0  # instead of a lease, for a worker without a service
FINAL = (WorkerExists, WrongPlan, NoPlan)  # end the worker; after any other error it retries, and keeps the pages

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The options of a worker process.

    Attributes:
        service: addresses of the kvplane service, separated by commas; "" = none: the engine gives an opaque plan when
            it attaches.
        replica: name of the replica.
        rank: the rank whose pages the worker holds.
        device: "cpu" or "cuda:N".
        run_dir: the worker's private directory; None = the default of this replica and rank.
        staging_bytes: size of the staging buffer in bytes; raised to the size of one block if it is smaller.
        backend: name of the backend of page operations; "auto" = the first that works on the device.
        disk: folder for the files of disk tiers; None = the worker has no disk.
        most_bytes: most memory of a host tier, and most room of a disk tier; without a kind, what is free.
        access: TLS and token for the service.
        wait: whether to retry until the service is reachable and the replica is registered, instead of raising an
            error.
        peer_transport: how host tiers of peers are read, and this one is lent.
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
    disk: Path | None = None
    most_bytes: Mapping[TierKind, int] = field(default_factory=dict)
    peer_transport: PeerTransport = PeerTransport.SHARED_MEMORY


class Stop:
    """The stop requests, from signals or from a caller.

    The first request starts a graceful shutdown, the second ends the wait for the attached engine's exit.
    """

    def __init__(self) -> None:
        self.requested = threading.Event()
        self.forced = threading.Event()

    def request(self) -> None:
        """Record a request. From the second one on, `forced` is set."""
        if self.requested.is_set():
            self.forced.set()
        self.requested.set()

    def handle(self, *numbers: int) -> None:
        """Record a request at each of these signals. Only the main thread may call this method.

        A handler runs between two statements of the main thread, which may hold the lock of an event that it waits
        for. So the handler only puts the signal into a SimpleQueue, which has no such lock; a thread records it.
        """
        arrived: SimpleQueue[int] = SimpleQueue()
        threading.Thread(target=self._record, args=(arrived,), name="kvplane-signals", daemon=True).start()
        for number in numbers:
            signal.signal(number, lambda number, _: arrived.put(number))

    def _record(self, arrived: SimpleQueue[int]) -> None:
        while True:
            arrived.get()
            self.request()


class WorkerProcess:
    """One worker process. Call `start`, then `serve`, which returns after a stop request, then `close`."""

    def __init__(self, options: WorkerOptions, stop: Stop | None = None) -> None:
        """Lock the directory of the rank, and choose the backend of page operations.

        Raises:
            InvalidArgument: the device does not exist, or no backend has this name.
            FailedPrecondition: the requested backend does not work on the device.
            Unavailable: a stop was requested while a backend was tested.
            WorkerExists: a worker of this rank runs on this host.
            PermissionDenied: the directory belongs to another user.
        """
        self._stop = stop or Stop()
        check_device(options.device)
        use_device(options.device)
        self._options = options
        # First, since it removes the socket that a killed worker has left: tests of backends may take minutes.
        self._run_dir = RunDir(options.run_dir or default_run_dir(options.replica, options.rank))
        with ExitStack() as undo:
            undo.callback(self._run_dir.give_up)
            self._backend = self._tested_backend()
            undo.pop_all()
        reach = partial(open_channel, access=options.access)
        self._service = WorkersClient(Owners.at(options.service, reach)) if options.service else None
        self._info = WorkerInfo(
            options.rank, secrets.randbits(64) or 1, self._run_dir.address, os.getpid(), options.device
        )
        self._served: ServedRank | None = None
        self._servicer: WorkerServicer | None = None
        self._server: WorkerServer | None = None
        self._peers: PeersOfWorker | None = None

    def _tested_backend(self) -> Choice:
        test = partial(prove_in_subprocess, stop=self._stop.requested)
        backend = choose(self._options.device, self._options.backend, PAGE_OPERATIONS, test)
        if self._stop.requested.is_set():
            raise Unavailable("a stop was requested while backends were tested", remedy="start the worker again")
        return backend

    def start(self) -> str:
        """Get the memory layout, allocate the pages, serve them, and register. Returns the worker's address.

        Without a service, the worker only begins to serve: an engine gives its plan when it attaches.

        Raises:
            WorkerExists: another worker holds the pages of the rank.
            OutOfMemory: the pages do not fit on the device.
            NoPlan, NotFound, InvalidArgument, Unavailable: from the service. With `wait`, NotFound and Unavailable are
                raised only if a stop is requested during the wait.
        """
        options, run_dir = self._options, self._run_dir
        if run_dir.last is not None:
            # Safe: its lease may still run, but its process has exited, since the lock of the directory was free.
            self._deregister(run_dir.last.worker_id)
        run_dir.write_state(self._info.worker_id)
        self._served = ServedRank(options.replica, self._info, run_dir.token, None, self._backend)
        if self._service is None:
            self._served.allocate = partial(Holdings.allocate, device=options.device, place=run_dir, staging_bytes=0)
        else:
            assignment = self._first_assignment(self._service)
            plan, tiers = assignment.plan, assignment.tiers
            assert plan is not None, "the service has a plan for a worker that has no memory"
            num_slots = sum(tier.num_blocks for tier in tiers)
            holdings = Holdings.allocate(plan, options.device, run_dir, options.staging_bytes, num_slots)
            self._warm_up(holdings)
            self._served.memory = holdings
            if tiers:
                content = assignment.content_id, options.rank
                name = shared_prefix(run_dir.path).rstrip("-")
                left = run_dir.left, run_dir.forget_left
                where = TierOptions(
                    tiers, options.disk, name, *content, *left, options.most_bytes, assignment.namespace
                )
                assert holdings.jobs is not None, "the memory was allocated with slots of tiers"
                memory = holdings.buffers, holdings.stamps, holdings.jobs
                self._served.movers = start_movers(*memory, where, self._backend.ops)
                self._peers = PeersOfWorker.of(self._served.movers.tiers, run_dir.path, options.peer_transport)
            self._update_info(state=WorkerState.READY, incarnation=holdings.stamps.incarnation, digest=plan.digest())
        run_dir.forget_left()
        self._servicer = WorkerServicer(self._served)
        self._server = WorkerServer(self._servicer, run_dir.path)
        self._server.start()
        self._renew()
        return run_dir.address

    def _warm_up(self, holdings: Holdings) -> None:
        """Compile the kernels that move these pages, so that no transfer waits for a compiler."""
        buffers, ops = holdings.buffers, self._backend.ops
        groups = [buffers.group(group) for group in range(buffers.num_groups)]
        done = ops.warm_up([group for group in groups if group.layers], PAGE_OPERATIONS)
        _log.info("%s: %d kernels compiled in %.1f s of CPU time", ops.name, len(done.kernels), done.cpu_s)

    def _first_assignment(self, service: WorkersClient) -> Assignment:
        """Register, and return the rank's memory layout. With `wait`, retry until the engine has registered the
        replica.
        """
        last_error = ""
        while True:
            try:
                return service.register_worker(self._options.replica, self._info)
            except (NotFound, Unavailable) as error:
                if not self._options.wait or self._stop.requested.wait(RETRY_S):
                    raise
                if str(error) != last_error:
                    _log.info("waiting: %s", error)
                last_error = str(error)

    def serve(self) -> None:
        """Renew the lease until a stop is requested, then wait for the attached engine to exit.

        Raises:
            WorkerExists: the lease expired, and another worker registered for the rank.
            WrongPlan, NoPlan: the replica was registered again, with another memory layout or other tiers.
        """
        lease_s = 1.0
        try:
            while not self._stop.requested.wait(lease_s / RENEWALS_PER_LEASE):
                lease_s = self._renew() or lease_s
        except KvplaneError as error:
            _log.error("the worker of rank %d leaves: %s", self._info.rank, error)
            raise
        finally:
            self._wait_for_engine()

    def leave(self) -> None:
        """Request a stop. A second call ends the wait for the attached engine's exit."""
        self._stop.request()

    def close(self) -> None:
        """Release everything that `start` acquired, also if `start` failed. Pages that a running engine maps are not
        freed. The files of disk tiers are kept for the next worker, and erased if the replica was deregistered.
        """
        is_gone = self._deregister(self._info.worker_id)
        if self._server is not None:
            self._server.stop(GRACE_S)
        lent = self._servicer is not None and self._servicer.attached_pid != 0
        if self._servicer is not None:
            self._servicer.close()
        if self._peers is not None:
            self._peers.close()
        if self._served is not None and self._served.movers is not None:
            self._served.movers.close(keep=not lent, erase=is_gone)
        if self._served is not None and self._served.memory is not None:
            self._served.memory.close(lent)
        self._run_dir.leave()
        if self._service is not None:
            self._service.close()

    def _wait_for_engine(self) -> None:
        """Refuse new engines, and wait until the attached engine has exited.

        The wait has no time limit: on CUDA, freeing memory that another process maps is undefined behaviour. A second
        stop request ends the wait without freeing; the driver frees the memory once both processes have exited.
        """
        assert self._servicer is not None
        assert self._server is not None
        self._servicer.refuse_new()
        self._server.leaving()
        self._update_info(state=WorkerState.LEAVING)
        try:
            self._renew()
        except KvplaneError as error:
            _log.warning("%s", error)
        next_log_s = time.monotonic()
        while pid := self._servicer.attached_pid:
            if time.monotonic() >= next_log_s:
                _log.info(
                    "waiting for engine %d, which maps the pages, to exit; send a second signal to exit now",
                    pid,
                )
                next_log_s += LOG_INTERVAL_S
            if self._stop.forced.wait(POLL_S):
                _log.warning("exiting while engine %d maps the pages; its pages are not freed", pid)
                return

    def _renew(self) -> float:
        """Renew the lease and return its length in seconds; 0 if the service does not answer.

        If the service does not answer, the worker keeps the pages, also after the lease has expired.
        """
        assert self._served is not None
        if self._service is None:
            return ALONE_S
        self._update_info()
        try:
            renewal = self._service.renew_worker(self._options.replica, self._served.info)
            if self._peers is not None and self._peers.follow(renewal.peers):
                self._update_info()  # the engine learns of a peer once its workers can read it
                renewal = self._service.renew_worker(self._options.replica, self._served.info)
            return renewal.lease_ms / 1000
        except FINAL:
            raise
        except NotFound:
            return self._register_again(self._service) / 1000
        except KvplaneError as error:
            _log.warning("%s", error)
            return 0.0

    def _register_again(self, service: WorkersClient) -> int:
        """Register again with a service that does not know the worker, such as a restarted service. Returns the length
        of the lease in milliseconds.

        Pages stay valid if the memory layout and the tiers are the same. Returns 0 if the service refuses, for instance
        because it does not know the replica.
        """
        assert self._served is not None
        try:
            assignment = service.register_worker(self._options.replica, self._served.info)
        except FINAL:
            raise
        except KvplaneError as error:
            _log.warning("%s", error)  # for example: the replica is not registered
            return 0
        self._check_plan(assignment)
        return assignment.lease_ms

    def _check_plan(self, assignment: Assignment) -> None:
        digest = assignment.plan.digest() if assignment.plan is not None else ""
        if digest != self._info.plan_digest:
            raise WrongPlan(
                f"the pages have layout {self._info.plan_digest}, the replica now has layout {digest}",
                field="replica",
                remedy="start the worker again, so that it allocates the new layout",
            )
        assert self._served is not None
        movers = self._served.movers
        held = [(tier.spec.kind, tier.spec.num_blocks) for tier in movers.tiers] if movers is not None else []
        if held != [(tier.kind, tier.num_blocks) for tier in assignment.tiers]:
            raise WrongPlan(
                "the replica now has other tiers than those of this worker",
                field="replica",
                remedy="start the worker again, so that it allocates the new tiers",
            )

    def _update_info(self, state: WorkerState | None = None, incarnation: int = 0, digest: str = "") -> None:
        """Update what the worker registers: its state, and the epoch that owns its pages according
        to its stamp table.
        """
        assert self._served is not None
        info, memory, movers = self._served.info, self._served.memory, self._served.movers
        self._info = self._served.info = replace(
            info,
            state=state or info.state,
            incarnation=incarnation or info.incarnation,
            plan_digest=digest or info.plan_digest,
            owner_epoch=memory.stamps.owner_epoch if memory is not None else 0,
            tiers=tuple(use_of(tier) for tier in movers.tiers) if movers is not None else (),
            host_incarnation=self._peers.incarnation if self._peers is not None else b"",
            mapped=self._peers.mapped if self._peers is not None else (),
            nixl_arena=self._peers.nixl_arena if self._peers is not None else b"",
            nixl_peers=self._peers.nixl_peers if self._peers is not None else 0,
        )

    def _deregister(self, worker_id: int) -> bool:
        """Remove a worker's registration. If this fails, the service removes it when the lease expires. Returns whether
        no replica of this name is registered: a later registration has no use for what this one stored.
        """
        if self._service is None:
            return False
        try:
            self._service.deregister_worker(self._options.replica, worker_id)
        except KvplaneError as error:
            _log.warning("%s", error)
            return isinstance(error, NotFound)
        return False


def run(options: WorkerOptions, ready: Callable[[str], None]) -> None:
    """Run a worker until SIGTERM or SIGINT. A second signal ends the wait for the attached engine.

    The signal handlers are installed first, because a start may take minutes if kernels must be compiled.

    Args:
        options: options of the worker.
        ready: called with the address once engines can attach.

    Raises:
        KvplaneError: see WorkerProcess.
    """
    stop = Stop()
    stop.handle(signal.SIGTERM, signal.SIGINT)
    process = WorkerProcess(options, stop)
    try:
        ready(process.start())
        process.serve()
    finally:
        process.close()
