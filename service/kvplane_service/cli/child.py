"""A service of one's own in a child process, for commands that are given no address.

The child listens on a free loopback port and prints it. It is in a session of its own, so that Ctrl-C in the
terminal reaches the parent alone, which then ends it; and it ends itself when the pipe on its standard input
closes, so that none is left behind however the parent dies.
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
_LAST_WORDS_BYTES = 2000


class ServiceChild:
    """A running service with embedded defaults; a context manager that ends it.

    Attributes:
        address: "127.0.0.1:port".
    """

    def __init__(self) -> None:
        """Start it and wait until it says where it listens; raises Unavailable with its last words when it does not."""
        self.address = ""
        self._said_address = threading.Event()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from kvplane_service.cli.child import serve; serve()"],
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
        """Of the process."""
        return self._process.pid

    def __enter__(self) -> ServiceChild:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process and wait for it; idempotent.

        SIGTERM drains, a second one does not wait, SIGKILL asks nobody.
        """
        for wanted in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                self._process.send_signal(wanted)
                self._wait(STOP_TIMEOUT_S)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._log.close()

    def _wait(self, timeout_s: float) -> None:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return  # the next signal is stronger

    def _wait_for_address(self) -> None:
        out = self._process.stdout
        assert out is not None, "stdout is a pipe"
        threading.Thread(target=self._listen, args=(out,), name="kvplane-child-output", daemon=True).start()
        self._said_address.wait(START_TIMEOUT_S)
        if not self.address:
            raise Unavailable(f"the service did not start: {self._last_words() or 'it said nothing'}")

    def _listen(self, out: IO[bytes]) -> None:
        """Find the address in what the child prints, and keep its pipe from filling."""
        with out:
            for line in out:
                found = _ADDRESS.search(line)
                if found and not self.address:
                    self.address = found.group().decode()
                    self._said_address.set()
        self._said_address.set()

    def _last_words(self) -> str:
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - _LAST_WORDS_BYTES))
        return self._log.read().decode(errors="replace").strip()


def _embedded_environment() -> dict[str, str]:
    """The parent's environment without settings of a service: the child runs on its defaults."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KVPLANE_")}


def _end_with_parent() -> None:
    """Wait for the end of standard input, which the end of the parent brings; nothing here outlives it, so no drain."""
    while sys.stdin.buffer.read(1):
        pass
    os._exit(0)


def serve() -> None:
    """What the child runs."""
    from kvplane_service.cli import main

    threading.Thread(target=_end_with_parent, name="kvplane-end-with-parent", daemon=True).start()
    sys.argv = ["kvplane", "serve", "--listen", "127.0.0.1:0"]
    main()
