"""A service process next to a store that hangs, and checks of what it still answers."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import kvplane
from kvplane import Content, ModelSource, Part, RetryPolicy
from kvplane.base.errors import KvplaneError, Unavailable
from tests.cli.processes import KVPLANE
from tests.client.proxy import CuttingProxy
from tests.store import servers

REPLICAS = 12
CALLERS = 24
BOUND_S = (
    12.0  # for calls that take milliseconds on an idle machine; with the faults that this finds they took 40 to 120 s
)
GRACE_MS = 4000
MODEL = ModelSource(model="llama-3.1-8b", num_blocks=2000, max_model_len=16384)


class TooLate(Exception):
    """A call was not answered in time."""


@dataclass
class Hangable:
    """A store with functions that make it hang and resume."""

    setting: str
    hang: Callable[[], object]
    resume: Callable[[], object]


@contextmanager
def stopped_redis(folder: Path) -> Iterator[Hangable]:
    with servers.serving(folder) as server:
        assert server.process is not None
        send = server.process.send_signal
        yield Hangable(f"redis://{server.address}", lambda: send(signal.SIGSTOP), lambda: send(signal.SIGCONT))
        send(signal.SIGCONT)


@contextmanager
def black_hole(folder: Path) -> Iterator[Hangable]:
    """A proxy between the service and Redis: connections stay open, no byte passes."""
    with servers.serving(folder) as server:
        proxy = CuttingProxy(server.address)
        yield Hangable(f"redis://{proxy.address}", lambda: proxy.hold(True), lambda: proxy.hold(False))
        proxy.hold(False)
        proxy.close()


@contextmanager
def locked_file(folder: Path) -> Iterator[Hangable]:
    """A disk on which a write does not end: another process holds the lock of the file."""
    folder.mkdir()
    path = folder / "entries.db"

    def hang() -> None:
        locks.append(sqlite3.connect(path, isolation_level=None, check_same_thread=False))
        locks[0].execute("BEGIN IMMEDIATE")

    locks: list[sqlite3.Connection] = []
    yield Hangable(f"sqlite:{path}", hang, lambda: locks[0].execute("ROLLBACK"))
    for lock in locks:
        lock.close()


STORES = {"redis stopped": stopped_redis, "black hole": black_hole, "file locked": locked_file}


@dataclass
class Service:
    """A process of `kvplane serve`, with a planted fault where a twin is named, with replicas and two sessions."""

    process: subprocess.Popen[str]
    address: str
    metrics: str
    log: Path
    sessions: list[kvplane.Session] = field(default_factory=list)

    @property
    def client(self) -> kvplane.Client:
        return kvplane.connect(self.address, timeout_s=BOUND_S, retry=RetryPolicy(attempts=1))

    def register_all(self) -> None:
        with self.client as client:
            for number in range(REPLICAS):
                client.register_replica(f"r{number}", MODEL)
        for number in range(2):
            self.sessions.append(self.client.session(f"r{number}"))
            self.sessions[-1].apply(Part())

    def scrape(self) -> str:
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=BOUND_S) as answer:
            return answer.read().decode()

    # -- what is measured

    def answers(self) -> dict[str, Callable[[], object]]:
        """Calls that need no store."""
        client, other = self.client, self.client
        return {
            "metrics": self.scrape,
            "unary call": lambda: client.find_cache_hit("r5", Content(token_ids=list(range(9000)))),
            "registration": lambda: client.register_replica(f"new-{time.monotonic_ns()}", MODEL),
            "step": lambda: self.sessions[0].apply(Part()),
            "new session": lambda: other.session("r2").close(),
        }

    def check_answers(self, *without: str) -> None:
        for name, call in self.answers().items():
            if name in without:
                continue
            started_s = time.monotonic()
            try:
                call()
            except (KvplaneError, OSError) as error:
                raise TooLate(f"{name}: {error!r}") from error
            took_s = time.monotonic() - started_s
            if took_s > BOUND_S:
                raise TooLate(f"{name}: {took_s:.1f} s")

    @contextmanager
    def store_clients(self) -> Iterator[list[KvplaneError]]:
        """Clients that repeatedly register replicas or request replicas of other services; yields their errors."""
        over, refusals = threading.Event(), list[KvplaneError]()

        def call(number: int) -> None:
            client = kvplane.connect(self.address, timeout_s=60.0, retry=RetryPolicy(attempts=1))
            while not over.is_set():
                try:
                    if number % 2:
                        client.register_replica(f"other-{number}-{time.monotonic_ns()}", MODEL)
                    client.describe_replica(f"unknown-{number}")
                except KvplaneError as error:
                    refusals.append(error)
                over.wait(0.05)

        threads = [threading.Thread(target=call, args=(number,), daemon=True) for number in range(CALLERS)]
        for thread in threads:
            thread.start()
        try:
            yield refusals
        finally:
            over.set()

    def check_drain(self) -> None:
        """Engines are notified first, and the process ends soon after the grace period."""
        drain(self.process, self.sessions, GRACE_MS / 1000, BOUND_S)
        if self.process.returncode:
            raise TooLate(f"it ended with {self.process.returncode}: {self.log.read_text()}")


def drain(
    process: subprocess.Popen[str], sessions: Sequence[kvplane.Session], grace_s: float, late_s: float
) -> tuple[float, float]:
    """Send SIGTERM to a service; returns the seconds until the first session was notified, and until the process ended.

    Raises:
        TooLate: the session was not notified within the grace period, or the process lives `late_s` longer than that.
    """
    started_s = time.monotonic()
    process.send_signal(signal.SIGTERM)
    while not sessions[0].draining:
        if time.monotonic() - started_s > grace_s:
            raise TooLate("no engine was notified of the drain within the grace period")
        try:
            sessions[0].apply(Part())
        except Unavailable as error:
            raise TooLate(f"an engine was not notified of the drain: {error}") from error
        time.sleep(0.05)
    notified_s = time.monotonic() - started_s
    for one in sessions:
        with contextlib.suppress(KvplaneError):
            one.close()
    try:
        process.wait(grace_s + late_s)
    except subprocess.TimeoutExpired:
        raise TooLate("the process did not end") from None
    return notified_s, time.monotonic() - started_s


@contextmanager
def serving(folder: Path, store: str, twin: str = "") -> Iterator[Service]:
    """A service process."""
    program = [sys.executable, "-m", "tests.twins", twin, "kvplane"] if twin else KVPLANE
    settings = {"store": store, "drain_grace_ms": GRACE_MS, "store_flush_ms": 20}
    chosen = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    log = folder / "service.log"
    with ExitStack() as stack:
        errors = stack.enter_context(log.open("w"))
        process = subprocess.Popen(
            [*program, "serve", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", *chosen],
            stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        stack.callback(process.wait)
        stack.callback(process.kill)
        assert process.stdout is not None
        stack.enter_context(process.stdout)
        lines = [process.stdout.readline() for _ in range(2)]
        assert all(lines), log.read_text()
        yield Service(process, lines[0].split()[-1], lines[1].split("//")[1].split("/")[0], log)
