"""A TCP proxy that can cut connections, delay or drop their bytes, and refuse new connections."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress


class CuttingProxy:
    """Forwards bytes between clients and one address, until a fault is set.

    Attributes:
        address: where clients connect.
        session_socket: where they connect for sessions, "" without a session socket.
        num_connections: accepted so far.
    """

    def __init__(self, target: str, session_socket: str = "") -> None:
        """`session_socket` is that of the service at `target`."""
        host, _, port = target.rpartition(":")
        self._listeners = [socket.create_server(("127.0.0.1", 0))]
        self.session_socket = f"{session_socket}.p" if session_socket else ""
        if session_socket:
            self._listeners.append(socket.create_server(self.session_socket, family=socket.AF_UNIX))
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._refusing = False
        self._delay_s = 0.0
        self._carries, self._answers = threading.Event(), threading.Event()
        self._carries.set()
        self._answers.set()
        self.num_connections = 0
        self.address = f"127.0.0.1:{self._listeners[0].getsockname()[1]}"
        for listener, target_of_it in zip(self._listeners, [(host, int(port)), session_socket], strict=False):
            threading.Thread(target=self._accept, args=(listener, target_of_it), daemon=True).start()

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

    def delay(self, seconds: float) -> None:
        """Delay everything by this many seconds from now on; 0 = no delay."""
        self._delay_s = seconds

    def hold(self, holding: bool) -> None:
        """A black hole: take what is sent and carry nothing of it, or carry it all. Nothing is lost, unless `cut`."""
        _let(self._carries, not holding)

    def mute(self, muted: bool) -> None:
        """Carry what clients send, and hold what they are answered, or carry that too."""
        _let(self._answers, not muted)

    def close(self) -> None:
        """Cut, and listen no more."""
        for listener in self._listeners:
            listener.shutdown(socket.SHUT_RDWR)  # otherwise the thread that accepts would wait indefinitely
            listener.close()
        self.hold(False)
        self.mute(False)
        self.cut()

    def _accept(self, listener: socket.socket, target: str | tuple[str, int]) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with self._lock:
                self.num_connections += 1
                refused = self._refusing
            if refused:
                client.close()
                continue
            try:
                server = socket.socket(listener.family)
                server.connect(target)
            except OSError:  # no service listens now
                server.close()
                client.close()
                continue
            with self._lock:
                self._open |= {client, server}
            for source, sink, passes in ((client, server, self._carries), (server, client, self._answers)):
                threading.Thread(target=self._carry, args=(source, sink, passes), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, passes: threading.Event) -> None:
        try:
            while data := source.recv(65536):
                time.sleep(self._delay_s)
                self._carries.wait()
                passes.wait()
                sink.sendall(data)
        except OSError:
            pass
        with self._lock:
            for one in (source, sink):
                if one in self._open:
                    self._open.discard(one)
                    with suppress(OSError):  # its other end has gone already
                        one.shutdown(socket.SHUT_RDWR)  # or it would stay open until the thread that reads it returns
                    one.close()


def _let(pass_: threading.Event, passes: bool) -> None:
    if passes:
        pass_.set()
    else:
        pass_.clear()
