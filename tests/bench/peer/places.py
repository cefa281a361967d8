"""Targets of a session: this process, or a service in another one."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import kvplane
from kvplane.base.groups import ReplicaSpec
from kvplane.base.session import OpenRequest
from kvplane.blocking.session import Session
from kvplane.session.options import draw_nonce
from kvplane_service.config import Config
from kvplane_service.registry import Registration, Registry
from tests.bench.peer.plan import IN_PROCESS, SOCKET, TCP, UNIX
from tests.service.inprocess import InProcessTransport

SERVE = "from kvplane_tools.cli import main; main()"


class Place(Protocol):
    """Opens sessions, each on its own replica, which is removed afterwards."""

    def session(self, spec: ReplicaSpec) -> Session:
        """A session on a fresh replica."""
        ...

    def forget(self) -> None:
        """Remove the replica of the last session, which is closed."""
        ...


class InProcess:
    """The session runs the core on the caller's thread."""

    def __init__(self) -> None:
        self._registry = Registry(Config(), time.monotonic_ns)

    def session(self, spec: ReplicaSpec) -> Session:
        self._registry.register("bench", Registration(spec))
        transport = InProcessTransport(lambda name: self._registry.get(name).host)
        return Session(transport, OpenRequest("bench", draw_nonce()))

    def forget(self) -> None:
        self._registry.remove("bench")


class Remote:
    """The session is a stream to a service."""

    def __init__(self, client: kvplane.Client, session_socket: str = "") -> None:
        self._client, self._socket = client, session_socket
        self._names = (f"bench-{number}" for number in itertools.count())
        self._name = ""

    def session(self, spec: ReplicaSpec) -> Session:
        self._name = next(self._names)
        self._client.register_replica(self._name, spec)
        return self._client.session(self._name, session_socket=self._socket)

    def forget(self) -> None:
        self._client.deregister_replica(self._name)


@contextmanager
def places() -> Iterator[dict[str, Place]]:
    """All by name; the services run during the block."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        listening = {UNIX: f"unix:{Path(folder) / 'kvplane.sock'}", TCP: "127.0.0.1:0"}
        local = str(Path(folder) / "sessions.sock")
        address = stack.enter_context(_service("127.0.0.1:0", f"session_socket={local}"))
        found: dict[str, Place] = {
            IN_PROCESS: InProcess(),
            SOCKET: Remote(stack.enter_context(kvplane.connect(address)), local),
        }
        for name, listen in listening.items():
            address = stack.enter_context(_service(listen))
            found[name] = Remote(stack.enter_context(kvplane.connect(address)))
        yield found


@contextmanager
def _service(listen: str, *settings: str) -> Iterator[str]:
    """`kvplane serve` in its own process, as a user starts it; yields its address."""
    command = [sys.executable, "-c", SERVE, "serve", "--listen", listen, "--set", "log_level=WARNING"]
    for setting in settings:
        command += ["--set", setting]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if "serving on " in line), "")
            assert line, "the service ended before it served"
            yield line.split("serving on ")[1].strip()
        finally:
            process.terminate()
