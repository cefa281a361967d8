"""One replica on real processes: a service, a worker per rank, an engine, a store, and links."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from redis.exceptions import ResponseError

import kvplane
from kvplane.base.errors import KvplaneError
from kvplane.base.groups import TierKind, TierSpec
from kvplane.rpc.channel import open_channel
from kvplane.sansio.retry import RetryPolicy
from kvplane.v1 import admin_pb2
from kvplane.v1 import allocation_pb2 as pb
from kvplane.v1.admin_pb2_grpc import AdminStub
from kvplane_worker.lending.rundir import SOCKET, shared_prefix
from kvplane_worker.memory.shared import SHM_FOLDER
from kvplane_worker.process import WorkerOptions
from tests.cli.processes import KVPLANE
from tests.client.proxy import CuttingProxy
from tests.engine.reference.config import MIXED
from tests.engine.world import Pool
from tests.faults import child
from tests.faults.child import Work
from tests.faults.disks import Disk, small_disk
from tests.store import servers
from tests.store.servers import free_port, wait_until
from tests.twins import weakened
from tests.worker import children
from tests.worker.rig import FORKS, Child

REPLICA = "r"
ASIDE = ":aside"  # end of the name of a log that `block_log` moved away
LEASE_S = 1.0
LIMIT_S = 120.0  # seconds for an expected event; generous, for overloaded machines
SETTINGS = {
    "lease_ms": int(LEASE_S * 1000),
    "worker_lease_ms": int(LEASE_S * 1000),
    "store_flush_ms": 20,
    "store_timeout_ms": 500,
    "drain_grace_ms": 2000,
}
GRACE_S = SETTINGS["drain_grace_ms"] / 1000
FORKS.set_forkserver_preload(["tests.faults.child", "tests.worker.children"])

Ended = tuple[int, list[int], list[int]]  # number, hits, output


PLAIN = Pool(num_blocks=300)
TIERED = Pool(num_blocks=300, tiers=(TierSpec(TierKind.HOST, 300), TierSpec(TierKind.DISK, 600)))


@dataclass(frozen=True)
class Plan:
    """Configuration of a cluster.

    Attributes:
        store: "sqlite" or "redis".
        twin: planted fault of every process; "" = none.
        settings: settings of the service, in addition to SETTINGS.
        local: whether engines open their sessions on the service's session socket.
    """

    store: str = "sqlite"
    pool: Pool = PLAIN
    twin: str = ""
    settings: tuple[tuple[str, object], ...] = ()
    local: bool = False


class ServiceRefused(Exception):
    """A service exited before it served; the text is its standard error."""


class Service:
    """`kvplane serve`, restarted at one address."""

    host = "127.0.0.1"

    def __init__(self, folder: Path, plan: Plan, store: str) -> None:
        self.address, self.metrics = f"{self.host}:{free_port()}", f"{self.host}:{free_port()}"
        self.folder = folder
        self.process: subprocess.Popen[str] | None = None
        self.lives = 0
        self.session_socket = str(folder.parent / "sessions") if plan.local else ""
        settings = {**SETTINGS, **dict(plan.settings), "store": store, "session_socket": self.session_socket}
        program = [sys.executable, "-m", "tests.twins", plan.twin, "kvplane"] if plan.twin else KVPLANE
        flags = [text for key, value in settings.items() for text in ("--set", f"{key}={value}")]
        self._command = [*program, "serve", "--listen", self.address, "--metrics", self.metrics, *flags]

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start the service. Raises ServiceRefused when it exits before it serves."""
        own_log = self.folder / f"service-{self.lives}.log"
        self.lives += 1
        with own_log.open("w") as log:
            self.process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )
        assert self.process.stdout is not None
        with self.process.stdout as output:
            if not all(output.readline() for _ in range(2)):  # its address, and the address of its metrics
                self.process.wait(LIMIT_S)
                raise ServiceRefused(own_log.read_text())

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(LIMIT_S)


class Engines:
    """One engine process after another; a request that one did not answer is sent to the next.

    Attributes:
        ended: answers that were not taken yet.
        kept_keys: keys that the newest engine life kept.
    """

    def __init__(self, start: Callable[[], Child]) -> None:
        self._start = start
        self._open: dict[int, tuple[list[int], int]] = {}
        self._numbers: list[int] = []  # numbers of the requests that the process was sent last, in order
        self._last_error: KvplaneError | None = None  # error of a process that ended between two reads
        self.process: Child | None = None
        self.ended: list[Ended] = []
        self.kept_keys = 0
        self.lives = 0

    def begin(self) -> None:
        """Start an engine process with the requests that are not answered. Raises the KvplaneError that it reports."""
        process = self._start()
        self.process, received = process, process.receive()
        if isinstance(received, KvplaneError):
            process.wait()
            self.process = None
            raise received
        self.kept_keys = received
        self.lives += 1
        self._send()

    def ask(self, prompts: dict[int, tuple[list[int], int]], trap: child.Trap | None = None, act: str = "") -> None:
        """Send numbered requests. Trap and act are for the current engine process, if there is one."""
        self._open = dict(prompts)
        self._send(trap, act)

    def _send(self, trap: child.Trap | None = None, act: str = "") -> None:
        self._numbers = list(self._open)
        if self._open and self.process is not None:
            try:
                self.process.connection.send(Work([self._open[number] for number in self._numbers], trap, act))
            except OSError:
                self._note_last_error(self.process.connection)
                self.discard()

    def _note_last_error(self, connection: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                received = connection.recv()
                self._last_error = received if isinstance(received, KvplaneError) else None

    @property
    def is_done(self) -> bool:
        return not self._open

    def listen(self, limit_s: float) -> KvplaneError | None:
        """Receive the answers of the next step, within a time limit. Returns the error that the process ended with."""
        if self._last_error is not None:
            received, self._last_error = self._last_error, None
            return received
        process = self.process
        if process is None or self.is_done:
            return None
        try:
            if not process.connection.poll(limit_s):
                return None
            received = process.connection.recv()
        except (EOFError, OSError):
            self.discard()
            return None
        if isinstance(received, KvplaneError):
            self.discard()
            return received
        for at, hits, output in received or ():
            number = self._numbers[at]
            del self._open[number]
            self.ended.append((number, hits, output))
        return None

    def discard(self) -> None:
        """Kill the process, if it runs."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()


class Cluster:
    """All processes of one replica, with methods to break and repair them.

    Attributes:
        to_service, from_workers, to_redis: links that can be cut: of the engine, of workers, of the service.
        tier_disk: disk of the workers' files of slots, if the replica has tiers.
        copies: copies of the SQLite file, oldest first, made by `copy_store`.
        logs: folder with the standard error of all processes.
        first_descriptors: pid → descriptors when the process was first idle.
    """

    def __init__(self, folder: Path, plan: Plan, disks: tuple[Disk, Disk], server: servers.Server | None) -> None:
        self.folder = folder
        self.plan = plan
        self.disk, self.tier_disk = disks
        self.redis = server
        self.to_redis = CuttingProxy(server.address) if server else None
        self.file = self.disk.folder / "entries.db"
        store = f"redis://{self.to_redis.address}" if self.to_redis else f"sqlite:{self.file}"
        (logs := folder / "logs").mkdir()
        self.logs, self.service = logs, Service(logs, plan, store)
        self.to_service = CuttingProxy(self.service.address, self.service.session_socket)
        self.from_workers = CuttingProxy(self.service.address)
        self.client = kvplane.connect(self.service.address, retry=RetryPolicy(attempts=40))
        self.workers: list[Child | None] = [None] * MIXED.num_ranks
        self.addresses = [""] * MIXED.num_ranks
        self.engines = Engines(self.start_engine)
        self.copies: list[Path] = []
        self._lock: sqlite3.Connection | None = None  # process that locks the store's file
        self.first_descriptors: dict[int, int] = {}
        self.restarts, self.loads = 0, Counter[str]()

    # -- start and end -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.service.start()
        self.register()
        for rank in range(MIXED.num_ranks):
            self.start_worker(rank)
        self.engines.begin()

    def register(self) -> None:
        """Register the replica, also again with a service that lost its store."""
        source, ranks = self.plan.pool.source, MIXED.num_ranks
        self.client.register_replica(REPLICA, source, num_ranks=ranks, namespace_digest=b"f" if source.tiers else b"")

    def end(self) -> None:
        self._let_store_go_on()
        self.client.close()
        for link in self.links:
            link.close()
        for process in (self.engines.process, *self.workers):
            if process is not None:
                process.kill()
        if self.service.is_alive:
            self.service.kill()

    # -- processes ---------------------------------------------------------------------------------------------------

    def start_worker(self, rank: int) -> None:
        run_dir = self.folder / f"rank-{rank}"
        disk = self.tier_disk.folder if self.plan.pool.tiers else None
        options = WorkerOptions(self.from_workers.address, REPLICA, rank, "cpu", run_dir, 1 << 16, disk=disk)
        process = self._start(children.worker, options)
        address = process.receive()
        assert isinstance(address, str), address
        self.workers[rank], self.addresses[rank] = process, address

    def start_engine(self) -> Child:
        way = (self.to_service.address, self.to_service.session_socket)
        return self._start(child.engine, way, REPLICA, self.addresses, self.plan.pool.model)

    def do(self, target: Callable[..., None], *arguments: object) -> Any:
        """Receive a message of a child process, and wait for its exit."""
        process = self._start(target, *arguments)
        received = process.receive()
        process.wait()
        return received

    def _start(self, target: Callable[..., None], *arguments: object) -> Child:
        ours, theirs = FORKS.Pipe()
        way = Way(str(self.logs / target.__name__), self.plan.twin)
        process = FORKS.Process(target=run_child, args=(theirs, way, target, *arguments), daemon=True)
        process.start()
        theirs.close()
        return Child(process, ours, LIMIT_S)  # the first one imports torch

    def repair(self) -> None:
        """Continue stopped processes, restore links, and restart dead processes. Damaged data stays damaged."""
        self._let_store_go_on()
        for link in self.links:
            link.hold(False)
            link.mute(False)
            link.delay(0)
        self._repair_store()
        resume(self.pids())
        if not self.service.is_alive:
            self.start_service()
        for rank, worker in enumerate(self.workers):
            if worker is None:
                self.restarts += 1
                self.start_worker(rank)
                self.engines.discard()  # its pages no longer have a worker

    def _repair_store(self) -> None:
        for disk in (self.disk, self.tier_disk):
            if disk.is_own:
                disk.allow_writes(True)
                disk.make_room()
        if self.redis is None:
            return
        assert self.redis.process is not None
        if self.redis.process.poll() is not None:
            self.restarts += 1
            self.redis.start()
        resume([self.redis.process.pid])
        with self.redis.client() as client:
            with contextlib.suppress(ResponseError):  # no script runs
                client.script_kill()
            wait_until(lambda: not self._is_redis_busy(), "Redis answers", LIMIT_S)
            client.config_set("maxmemory", 0)
            for aside in client.keys(f"*{ASIDE}"):
                client.rename(aside, aside.removesuffix(ASIDE.encode()))

    def start_service(self) -> None:
        """Start the service as an operator would: a store that it refuses is moved away."""
        self.restarts += 1
        try:
            self.service.start()
        except ServiceRefused as refused:
            lines = str(refused).strip().splitlines()
            assert [line[:16] for line in lines] == ["kvplane: store: "], lines
            assert self.redis is None, lines
            self.move_store_away()
            self.service.start()
        self.register()

    def begin_engine(self) -> None:
        """Start an engine; a service that lost the replica gets it registered first."""
        self.restarts += 1
        self.register()
        self.engines.begin()

    def pids(self) -> dict[str, int]:
        """Process ids of the running processes, by role."""
        found = {f"worker {rank}": one.pid for rank, one in enumerate(self.workers) if one is not None}
        if self.engines.process is not None:
            found["engine"] = self.engines.process.pid
        if self.service.is_alive:
            assert self.service.process is not None
            found["service"] = self.service.process.pid
        return found

    @property
    def links(self) -> list[CuttingProxy]:
        """All of these process ids."""
        links = (self.to_service, self.from_workers, self.to_redis)
        return [link for link in links if link is not None]

    # -- the store ---------------------------------------------------------------------------------------------------

    def lock_store(self) -> None:
        """Lock the file from another process, until `repair`."""
        self._lock = sqlite3.connect(self.file, isolation_level=None)
        self._lock.execute("BEGIN IMMEDIATE")

    def keep_redis_busy(self) -> None:
        """Run a script in Redis until `repair`: Redis refuses all other calls with BUSY."""
        assert self.redis is not None
        with self.redis.client() as client:
            client.config_set("busy-reply-threshold", 1)
        with socket.create_connection(("127.0.0.1", self.redis.port)) as caller:
            caller.sendall(b"EVAL 'while true do end' 0\r\n")
            wait_until(self._is_redis_busy, "Redis refuses calls", LIMIT_S)

    def _is_redis_busy(self) -> bool:
        assert self.redis is not None
        with self.redis.client() as client:
            try:
                client.get("any")
            except ResponseError as error:
                return str(error).startswith("BUSY")
        return False

    def block_log(self) -> None:
        """Put a text where the log of the replica is, until `repair`: Redis does not read it as a log."""
        assert self.redis is not None
        with self.redis.client() as client:
            for log in client.keys(f"*:{{{REPLICA}}}:*:log"):
                client.rename(log, log + ASIDE.encode())
                client.set(log, "no log")

    def _let_store_go_on(self) -> None:
        self.disk.go_on()
        self.tier_disk.go_on()
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()

    def store_files(self) -> list[Path]:
        return sorted(self.file.parent.glob(f"{self.file.name}*"))

    def move_store_away(self) -> None:
        aside = self.folder / "aside"
        aside.mkdir(exist_ok=True)
        for path in self.store_files():
            shutil.move(path, aside / path.name)

    def copy_store(self) -> None:
        """Copy the store, for `restore_store`."""
        copy = self.folder / f"copy-{len(self.copies)}"
        copy.mkdir()
        for path in self.store_files():
            shutil.copy(path, copy)
        self.copies.append(copy)

    def restore_store(self, copy: Path) -> None:
        """Replace the store by an older copy; the service must not run."""
        for path in self.store_files():
            path.unlink()
        for path in copy.iterdir():
            shutil.copy(path, self.file.parent)

    # -- state -------------------------------------------------------------------------------------------------------

    def describe(self) -> pb.DescribeReplicaResponse:
        return self.client.describe_replica(REPLICA)

    def prove(self, limit_s: float = LIMIT_S) -> None:
        """Let the service check the invariants of the allocator. Raises grpc.RpcError."""
        with open_channel(self.service.address) as channel:
            AdminStub(channel).Snapshot(admin_pb2.SnapshotRequest(replica=REPLICA, summary=True), timeout=limit_s)

    def wait_until_stored(self) -> None:
        wait_until(lambda: is_stored(self.describe().store), "published keys are stored", LIMIT_S)

    def shared_files(self) -> int:
        prefixes = [shared_prefix(self.folder / f"rank-{rank}") for rank in range(MIXED.num_ranks)]
        return sum(len(list(SHM_FOLDER.glob(f"{prefix}*"))) for prefix in prefixes)

    def sockets(self) -> int:
        return len(list(self.folder.glob(f"rank-*/{SOCKET}")))


def is_stored(store: pb.StoreStatus) -> bool:
    return store.state == pb.STORE_STATE_OK and not store.lag_entries and not store.loading


def resume(pids: Sequence[int] | dict[str, int]) -> None:
    for pid in pids.values() if isinstance(pids, dict) else pids:
        with contextlib.suppress(ProcessLookupError):  # the reader gets an end of file when the process exits
            os.kill(pid, signal.SIGCONT)


@dataclass(frozen=True)
class Way:
    """How a process of the cluster runs: its log file, and its planted fault."""

    log: str
    twin: str


def run_child(connection: Any, way: Way, target: Callable[..., None], *arguments: object) -> None:
    """A process of the cluster."""
    log = os.open(way.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, sys.stderr.fileno())
    os.close(log)
    with weakened(way.twin) if way.twin else ExitStack():
        target(connection, *arguments)


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped by a signal; False when it has exited."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):
        return False


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@contextmanager
def running(folder: Path, plan: Plan) -> Iterator[Cluster]:
    """A running cluster; everything is removed at the end."""
    with ExitStack() as stack:
        disk, tier_disk = (stack.enter_context(small_disk(folder / name)) for name in ("disk", "tiers"))
        server = stack.enter_context(servers.serving(folder / "redis")) if plan.store == "redis" else None
        cluster = Cluster(folder, plan, (disk, tier_disk), server)
        stack.callback(cluster.end)
        cluster.start()
        yield cluster
