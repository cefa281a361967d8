"""Run a service in a child process, for commands that are given no address of a service.

The child listens on a free loopback port and prints the port. It runs in its own process session, so that Ctrl-C in the
terminal reaches only the parent, which then stops the child. The child also exits when the pipe on its standard input
closes, so it never outlives its parent, even if the parent is killed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from types import TracebackType
from typing import IO

from kvplane.base.errors import Unavailable

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0
_ADDRESS = re.compile(rb"127\.0\.0\.1:[1-9]\d*")
_LOG_BYTES = 2000


class ServiceChild:
    """A running service with the default configuration; as a context manager it stops the service at the end of the
    block.

    Attributes:
        address: "127.0.0.1:port".
        page: URL of its status page; "" without `with_page`.
    """

    def __init__(self, with_page: bool = False) -> None:
        """Start the service and wait for its address. Raises Unavailable, with the end of the service's log, if no
        address appears within START_TIMEOUT_S seconds.
        """
        self.address = self.page = ""
        self._with_page = with_page
        self._has_address = threading.Event()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from kvplane_tools.cli.child import serve; serve({with_page})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=_embedded_environment(),
            start_new_session=True,
        )
        with ExitStack() as if_failed:
            if_failed.callback(self.close)
            self._wait_for_address()
            if_failed.pop_all()

    @property
    def pid(self) -> int:
        """Process id of the service."""
        return self._process.pid

    def __enter__(self) -> ServiceChild:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the process and wait for its end. May be called repeatedly.

        Sends SIGTERM to drain the service, after STOP_TIMEOUT_S seconds a second SIGTERM to stop it at once, and at
        last SIGKILL.
        """
        for each in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                self._process.send_signal(each)
                self._wait(STOP_TIMEOUT_S)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._log.close()

    def _wait(self, timeout_s: float) -> None:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return  # close() sends the next, stronger signal

    def _wait_for_address(self) -> None:
        out = self._process.stdout
        assert out is not None, "stdout is a pipe"
        threading.Thread(target=self._listen, args=(out,), name="kvplane-child-output", daemon=True).start()
        self._has_address.wait(START_TIMEOUT_S)
        if not self.address:
            raise Unavailable(
                f"the service printed no address within {START_TIMEOUT_S:.0f} s: "
                f"{self._end_of_log() or 'its log is empty'}"
            )

    def _listen(self, out: IO[bytes]) -> None:
        """Find the address in the child's output, and read the rest of the output so that the pipe never fills."""
        with out:
            for line in out:
                found = _ADDRESS.search(line)
                if found and not self.address:
                    self.address = found.group().decode()
                elif found and not self.page:
                    self.page = f"http://{found.group().decode()}/"
                if self.address and (self.page or not self._with_page):
                    self._has_address.set()
        self._has_address.set()

    def _end_of_log(self) -> str:
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - _LOG_BYTES))
        return self._log.read().decode(errors="replace").strip()


def _embedded_environment() -> dict[str, str]:
    """Return the parent's environment without KVPLANE_* variables, so that the child uses the default configuration."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KVPLANE_")}


def _end_with_parent() -> None:
    """Exit when standard input closes, which happens when the parent ends. The service exits without draining, because
    its only clients run in the parent.
    """
    while sys.stdin.buffer.read(1):
        pass
    os._exit(0)


def serve(with_page: bool) -> None:
    """Run the service in the child process (entry point of the child)."""
    from kvplane_tools.cli import main

    threading.Thread(target=_end_with_parent, name="kvplane-end-with-parent", daemon=True).start()
    sys.argv = ["kvplane", "serve", "--listen", "127.0.0.1:0", *(("--metrics", "127.0.0.1:0") if with_page else ())]
    main()
