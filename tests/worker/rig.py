"""Workers and engines in child processes, on a running service."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from kvplane.base.errors import KvplaneError
from kvplane.base.sources import LayerSource
from kvplane.blocking.client import connect
from kvplane.v1 import plan_pb2
from kvplane_service.config import Config
from kvplane_worker.lending.rundir import LOCK, RunDir, shared_prefix
from kvplane_worker.memory.shared import SHM_FOLDER
from kvplane_worker.process import WorkerOptions
from tests.plan.layers import full, named, window
from tests.service.rig import Service, running
from tests.worker import children

WAIT_S = 30
# A server process that imports torch once and forks: a worker starts in milliseconds.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.worker.children"])
LAYERS = named(f=(2, full()), w=(2, window()))
BLOCKS = 64
KILLS_ON_GPU = 5


class Child:
    """A child process, and the connection to it, on which a message comes within `limit_s` seconds."""

    def __init__(self, process: ForkServerProcess, connection: Connection, limit_s: float = WAIT_S) -> None:
        assert process.pid is not None
        self.limit_s = limit_s
        self.process = process
        self.connection = connection
        self.pid = process.pid
        self.ended = False

    def receive(self) -> Any:
        """Receive the next message."""
        assert self.connection.poll(self.limit_s), f"process {self.pid} sent nothing within {self.limit_s:.0f} s"
        return self.connection.recv()

    def do(self, name: str, *arguments: object) -> Any:
        """Send a command to an engine. Returns its result, or its error."""
        self.connection.send((name, arguments))
        return self.receive()

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process has exited."""
        self.process.kill()
        self.wait()

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def wait(self) -> int:
        """Wait until the process has exited. Returns its exit code."""
        self.process.join(self.limit_s)
        code = self.process.exitcode
        assert code is not None, f"process {self.pid} still runs"
        self.connection.close()
        self.process.close()
        self.ended = True
        return code


class World:
    """A service with a planned replica "r", and the child processes of a test."""

    def __init__(self, service: Service, folder: Path) -> None:
        self.service = service
        self.folder = folder
        self.device = "cpu"
        self.children: list[Child] = []

    def register(self, name: str = "r", num_ranks: int = 1, namespace: bytes = b"", **source: Any) -> None:
        given = {"layers": LAYERS, "num_blocks": BLOCKS, "max_model_len": 256, "max_batched_tokens": 256, **source}
        with connect(self.service.address) as client:
            client.register_replica(name, LayerSource(**given), num_ranks=num_ranks, namespace_digest=namespace)

    def options(self, rank: int = 0, replica: str = "r", folder: str = "") -> WorkerOptions:
        run_dir = self.folder / (folder or f"{replica}-{rank}")
        disk = self.folder / "disk"
        return WorkerOptions(self.service.address, replica, rank, self.device, run_dir, 1 << 16, disk=disk)

    def start(self, target: Any, *arguments: object) -> Child:
        ours, theirs = FORKS.Pipe()
        process = FORKS.Process(target=target, args=(theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        child = Child(process, ours)
        self.children.append(child)
        return child

    def worker(self, rank: int = 0, replica: str = "r", folder: str = "", **options: Any) -> tuple[Child, str]:
        """Start a worker. Returns it with its address once it is ready."""
        child = self.start(children.worker, replace(self.options(rank, replica, folder), **options))
        return child, self._address_of(child)

    def gated_worker(self, gate: Path) -> tuple[Child, str]:
        """Start a worker of rank 0 whose scatters stop before the last block while the gate exists."""
        child = self.start(children.gated_worker, self.options(), gate)
        return child, self._address_of(child)

    def _address_of(self, child: Child) -> str:
        address = child.receive()
        assert isinstance(address, str), address
        return address

    def refused_worker(self, **where: Any) -> KvplaneError:
        """Start a worker that must be refused. Returns its error."""
        child = self.start(children.worker, self.options(**where))
        error = child.receive()
        assert isinstance(error, KvplaneError), error
        child.wait()
        return error

    def engine(self, user: int = 0) -> Child:
        return self.start(children.engine, user)

    def shown(self, name: str = "r") -> list[plan_pb2.WorkerInfo]:
        return list(self.service.describe(name).workers)

    def shared_files(self) -> set[str]:
        """Names of the shared memory of this world's workers, running or dead."""
        prefixes = [shared_prefix(path) for path in self.folder.iterdir()]
        return {file.name for prefix in prefixes for file in SHM_FOLDER.glob(f"{prefix}*")}

    def end(self) -> None:
        for child in self.children:
            if not child.ended:
                child.kill()
        for lock in self.folder.glob(f"*/{LOCK}"):
            left = RunDir(lock.parent)
            left.forget_left()
            left.leave()


@contextmanager
def world(folder: Path, **config: Any) -> Iterator[World]:
    """A service without replicas and workers."""
    given = {"listen": "127.0.0.1:0", "worker_lease_ms": 60_000, "lease_ms": 60_000, **config}
    with running(Config(**given)) as service:
        it = World(service, folder)
        try:
            yield it
        finally:
            it.end()


def open_files() -> int:
    """Number of open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def refusal(act: Any, *arguments: object) -> KvplaneError:
    """Call a function that must raise a KvplaneError, and return the error."""
    with pytest.raises(KvplaneError) as caught:
        act(*arguments)
    return caught.value
