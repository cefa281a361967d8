"""The processes of a fleet: services behind links, replicas with a worker and an engine each, and where owners are."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import kvplane
from kvplane.base.errors import KvplaneError
from kvplane.blocking.client import Client
from kvplane.rpc.channel import open_channel
from kvplane.sansio.retry import RetryPolicy
from kvplane_worker.process import WorkerOptions
from tests.engine.reference.config import MIXED
from tests.engine.world import Pool
from tests.faults import cluster
from tests.faults.cluster import LIMIT_S, Engines, Plan, run_child
from tests.fleet import engine, network
from tests.fleet.clocks import WallClock
from tests.fleet.history import Granted, Notes, read
from tests.fleet.network import start_inside
from tests.fleet.routers import NAMES as ROUTERS
from tests.fleet.routers import Routers
from tests.fleet.tables import Index, table_of
from tests.worker import children
from tests.worker.rig import FORKS, Child

POOL = Pool(model=replace(MIXED, num_ranks=1), num_blocks=150)
KNOCK_S = 2.0
FORKS.set_forkserver_preload(["tests.fleet.campaign"])  # all that a child imports


@dataclass(frozen=True)
class Shape:
    """How many processes a fleet has, and where owners are (see tables.OWNERSHIP).

    Attributes:
        twin: planted fault of every service and engine; "" = none.
        lease_ms: lease of the services; a call of the table may last a third of it.
        routers: whether two routers follow the replicas; `router_twin` is their planted fault.
        network: "namespaces", "proxies", or "" for namespaces where the machine permits them (see network.make).
    """

    ownership: str
    services: int = 3
    replicas: int = 8
    twin: str = ""
    lease_ms: int = 1500
    network: str = ""
    routers: bool = False
    router_twin: str = ""


class Service(cluster.Service):
    """A service on a host of its own.

    Attributes:
        name: of the host.
        front: where clients reach it.
        clock: its wall clock.
    """

    def __init__(self, name: str, fleet: Fleet) -> None:
        self.name, self._network, shape, table = name, fleet.network, fleet.shape, fleet.table
        self.host = self._network.host(name)
        (folder := fleet.folder / name).mkdir()
        index = self._network.link(name, network.INDEX, fleet.index.address)
        owners = self._network.link(name, network.TABLE, table.address) if table.address else index
        settings = {"owner_lease_ms": shape.lease_ms, **table.settings(owners)}
        super().__init__(folder, Plan("redis", POOL, shape.twin, tuple(settings.items())), f"redis://{index}")
        self.front = self._network.link(name, network.CLIENTS, self.address)
        self._command += ["--set", f"advertise={self.front}"]
        self.clock = WallClock(folder / "clock")
        self._variables = {**table.variables(owners), **self.clock.variables}

    def start(self) -> None:
        os.environ.update(self._variables)  # the process inherits them
        try:
            with self._network.inside(self.name):
                super().start()
        finally:
            for name in self._variables:
                del os.environ[name]

    def end_well(self, wait: Callable[[], None]) -> None:
        """SIGTERM, and `wait` until the process has ended. Raises AssertionError unless it ends without an error."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        until_s = time.monotonic() + LIMIT_S
        while self.process.poll() is None and time.monotonic() < until_s:
            wait()
        assert self.process.poll() == 0, f"a drained service ended with {self.process.poll()}"

    def stop(self, stopped: bool) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP if stopped else signal.SIGCONT)


class Replica:
    """A replica with one rank: its worker, and one engine process after another."""

    def __init__(self, name: str, fleet: Fleet) -> None:
        self.name = name
        self._fleet = fleet
        self.worker: Child | None = None
        self._address = ""
        self.engines = Engines(self._start_engine)

    def start_worker(self) -> None:
        """Start a worker with new memory."""
        folder = self._fleet.folder / self.name
        options = WorkerOptions(",".join(self._fleet.fronts), self.name, 0, "cpu", folder, 1 << 16)
        self.worker = self._start(children.worker, options)
        address = self.worker.receive()
        assert isinstance(address, str), address
        self._address = address

    def kill_worker(self) -> None:
        """Kill it and its engine: nothing has their pages then."""
        self.engines.discard()
        self.kill_worker_alone()

    def kill_worker_alone(self) -> None:
        """Kill it; its engine continues, and has to be killed before the next one starts."""
        assert self.worker is not None
        self.worker.kill()
        self.worker = None

    def _start_engine(self) -> Child:
        at = self._fleet.replicas.index(self) % len(self._fleet.fronts)
        services = (*self._fleet.fronts[at:], *self._fleet.fronts[:at])
        way = engine.Way(self.name, services, (self._address,), POOL.model, self._fleet.history)
        return self._start(engine.engine, way)

    def _start(self, target: Callable[..., None], *arguments: object) -> Child:
        ours, theirs = FORKS.Pipe()
        way = cluster.Way(str(self._fleet.logs / f"{self.name}-{target.__name__}"), self._fleet.shape.twin)
        inside = self._fleet.network.path(self.name), run_child
        process = FORKS.Process(target=start_inside, args=(*inside, theirs, way, target, *arguments), daemon=True)
        process.start()
        theirs.close()
        return Child(process, ours, LIMIT_S)  # the first one imports torch


class Fleet:
    """All processes.

    Attributes:
        history: folder of what they note (tests/fleet/history.py).
        logs: folder of what children log; services have folders of their own next to it.
        knocks: sessions that rivals asked for; `taken` of these were opened.
    """

    def __init__(self, folder: Path, shape: Shape) -> None:
        self.folder, self.shape = folder, shape
        self.history, self.logs = folder / "history", folder / "logs"
        self.history.mkdir()
        self.logs.mkdir()
        self._stack = ExitStack()
        names = [f"service-{at}" for at in range(shape.services)]
        replicas = [f"r{at}" for at in range(shape.replicas)]
        peers = {network.INDEX: "index", network.TABLE: "index" if shape.ownership == "grants" else "table"}
        clients = [*replicas, *(ROUTERS if shape.routers else ())]
        hosts = dict.fromkeys([*names, *peers.values(), *clients])
        self.network, self.network_line = network.make([*hosts], clients, peers, shape.network)
        self._stack.callback(self.network.close)
        self.index = Index(folder / "redis", self.network)
        self._stack.callback(self.index.close)
        self.table = table_of(shape.ownership, folder, self.index, self.network)
        self._stack.callback(self.table.close)
        self.services = [Service(name, self) for name in names]
        self.fronts = [service.front for service in self.services]
        self.replicas = [Replica(name, self) for name in replicas]
        self.routers = Routers(self, shape.router_twin) if shape.routers else None
        self._notes, self._rivals = Notes(self.history), itertools.count(1)
        self._counting = threading.Lock()
        self.knocks = self.taken = 0

    def start(self) -> None:
        for service in self.services:
            service.start()
        for at, replica in enumerate(self.replicas):
            self.register(replica, at)
            replica.start_worker()
            replica.engines.begin()
        if self.routers is not None:
            self.routers.start()

    def register(self, replica: Replica, at: int = 0) -> None:
        """Register a replica, at home at one service, also again after the index was lost."""
        fronts = [*self.fronts[at % len(self.fronts) :], *self.fronts[: at % len(self.fronts)]]
        with kvplane.connect(",".join(fronts), retry=RetryPolicy(attempts=40)) as client:
            client.register_replica(replica.name, POOL.source, num_ranks=1)

    def owner_of(self, replica: str) -> Service:
        """The service that granted the newest epoch of a replica."""
        grants = [one for one in read(self.history) if isinstance(one, Granted) and one.replica == replica]
        newest = max(grants, key=lambda one: one.epoch)
        return next(service for service in self.services if service.front == newest.service)

    def knock(self, service: Service, replica: str) -> str:
        """A rival asks one service for a new engine life on other memory, as an engine on another node would. Returns
        why it was refused; "" if it was not.
        """
        with self._counting:
            self.knocks += 1
        began_ns = time.monotonic_ns()
        once = RetryPolicy(attempts=1)
        with Client(open_channel(service.front)) as client:  # it follows no redirection
            try:
                session = client.session(replica, open_timeout_s=KNOCK_S, retry=once, remember=False)
            except KvplaneError as refused:
                return f"{type(refused).__name__}: {refused.message}"
            when = began_ns, time.monotonic_ns()
            self._notes.add(Granted(replica, session.epoch, f"rival {next(self._rivals)}", service.front, *when))
            session.close()
        with self._counting:
            self.taken += 1
        return ""

    def repair(self) -> None:
        """Continue what is stopped, restore links, and restart what is dead."""
        self.table.stop(False)
        self.index.stop(False)
        self.network.restore()
        for service in self.services:
            service.clock.set(0)
            if service.is_alive:
                service.stop(False)
            else:
                service.start()
        for replica in self.replicas:
            one = replica.engines.process
            if one is not None:
                cluster.resume([one.pid])
            if replica.worker is None:
                replica.start_worker()
            else:
                cluster.resume([replica.worker.pid])
        if self.routers is not None:
            self.routers.repair()

    def end(self) -> None:
        if self.routers is not None:
            self.routers.end()
        for replica in self.replicas:
            for process in (replica.engines.process, replica.worker):
                if process is not None:
                    process.kill()
        for service in self.services:
            if service.is_alive:
                service.kill()
        self._stack.close()


def pause(process: Child) -> None:
    """Stop a process until `repair`."""
    os.kill(process.pid, signal.SIGSTOP)


@contextmanager
def running(folder: Path, shape: Shape) -> Iterator[Fleet]:
    """A running fleet; all of its processes are ended."""
    fleet = Fleet(folder, shape)
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.end()
