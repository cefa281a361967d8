"""The socket to which callers connect, and the process behind each connection, as the kernel names it.

gRPC does not show which process has connected. So the worker accepts connections itself, asks the kernel
(SO_PEERCRED), closes those of other users, and passes the bytes of the others on to gRPC, which listens on a second
socket. gRPC sees each connection under a random name, by which a handler finds the process.

    engine ── worker.sock ──▶ Callers: whose process is it? ── grpc.sock ──▶ gRPC server ──▶ servicer
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from kvplane.base.errors import FailedPrecondition, InvalidArgument, PermissionDenied
from kvplane.rpc.peers import Peer, peer_of
from kvplane_worker.lending.writer import ProcessName

MAX_CONNECTIONS = 64
RETRY_S = 0.1  # after a connection that could not be accepted
_CHUNK_BYTES = 1 << 18
_GRPC_PREFIX = "unix-abstract:"  # what gRPC shows of a client's socket with a name that is no path

Caller: TypeAlias = Callable[[], ProcessName]  # finds the process that makes a call; raises as `process_of`

_log = logging.getLogger(__name__)


class Callers:
    """The connections to a worker, and their processes.

    A process is named when it connects, while its connection is open: its pid cannot be that of a later process.
    """

    def __init__(self, address: Path, inner: Path) -> None:
        """Bind the socket at `address`; connections are passed on to the socket at `inner`."""
        self._inner = inner
        self._processes: dict[str, ProcessName | None] = {}  # by the name that gRPC sees; None: not visible here
        self._open = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(address))
        self._is_closed = False

    def start(self) -> None:
        """Start to accept connections."""
        self._listener.listen(MAX_CONNECTIONS)
        threading.Thread(target=self._accept, name="kvplane-callers", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections. Open ones end with gRPC's server, which closes its side."""
        self._is_closed = True
        with contextlib.suppress(OSError):  # it does not listen yet
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes up `accept`
        self._listener.close()

    def process_of(self, peer: str) -> ProcessName:
        """Return the process behind a connection, given what gRPC shows of it.

        Raises:
            PermissionDenied: the connection did not come through the worker's socket.
            FailedPrecondition: the process is in a process namespace that the worker does not see.
        """
        try:
            process = self._processes[peer]
        except KeyError:
            raise PermissionDenied(
                "the connection did not come through the worker's socket",
                field="address",
                remedy="connect to worker.sock in the worker's directory",
            ) from None
        if process is None:
            raise FailedPrecondition(
                "the calling process is in a process namespace that the worker does not see",
                field="pid",
                remedy="run the engine in the worker's process namespace (hostPID or shareProcessNamespace)",
            )
        return process

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._is_closed:
                    return
                _log.warning("a connection was not accepted: %s", error)
                time.sleep(RETRY_S)
                continue
            self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        """Pass a connection on, or close it."""
        peer = peer_of(connection)
        if not peer.is_trusted:
            _log.warning("closed a connection of process %d of user %d: not the worker's user", peer.pid, peer.uid)
            connection.close()
        elif not self._open.acquire(blocking=False):
            _log.warning("closed a connection of process %d: %d are open, the maximum", peer.pid, MAX_CONNECTIONS)
            connection.close()
        else:
            threading.Thread(target=self._serve, args=(connection, peer), daemon=True).start()

    def _serve(self, connection: socket.socket, peer: Peer) -> None:
        name = f"kvplane-{secrets.token_hex(16)}"
        try:
            with connection, socket.socket(socket.AF_UNIX) as passed:
                self._processes[_GRPC_PREFIX + name] = _name_of(connection, peer)
                passed.bind(f"\0{name}")
                passed.connect(str(self._inner))
                back = threading.Thread(target=_copy, args=(passed, connection), daemon=True)
                back.start()
                _copy(connection, passed)
                back.join()
        except OSError as error:
            _log.warning("the connection of process %d ended: %s", peer.pid, error)
        finally:
            self._processes.pop(_GRPC_PREFIX + name, None)
            self._open.release()


def _name_of(connection: socket.socket, peer: Peer) -> ProcessName | None:
    """Return the process that connected; None if it is not visible here, or has closed the connection."""
    try:
        process = ProcessName.of(peer.pid)
    except InvalidArgument:
        return None
    return process if _is_open(connection) else None


def _is_open(connection: socket.socket) -> bool:
    """Return whether the other end is open: then its process had not exited before."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return not poll.poll(0)


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy bytes until one side ends; then end both, since HTTP/2 has no use for half a connection."""
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK_BYTES):
            target.sendall(data)
    for side in (source, target):
        with contextlib.suppress(OSError):
            side.shutdown(socket.SHUT_RDWR)
