"""A TCP proxy that can cut what goes through it, and refuse to carry more."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class CuttingProxy:
    """Carries bytes between clients and one address until told otherwise.

    Attributes:
        address: where clients connect.
        num_connections: accepted so far.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._refusing = False
        self.num_connections = 0
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Reset every connection that is open."""
        with self._lock:
            for one in self._open:
                with suppress(OSError):  # its other end has gone already
                    one.shutdown(socket.SHUT_RDWR)

    def refuse(self, refusing: bool) -> None:
        """Close every new connection at once, or carry them again."""
        with self._lock:
            self._refusing = refusing

    def close(self) -> None:
        """Cut, and listen no more."""
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self.num_connections += 1
                refused = self._refusing
            if refused:
                client.close()
                continue
            server = socket.create_connection(self._target)
            with self._lock:
                self._open |= {client, server}
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass
        with self._lock:
            for one in (source, sink):
                if one in self._open:
                    self._open.discard(one)
                    one.close()
