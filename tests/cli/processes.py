"""The command line as processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KVPLANE = [sys.executable, "-c", "from kvplane_tools.cli import main; main()"]
LIMIT_S = 110.0


def run_kvplane(*arguments: str | int | Path) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    command = [*KVPLANE, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@contextmanager
def running(*arguments: str | int | Path) -> Iterator[subprocess.Popen[str]]:
    """A running command; killed at the end of the block."""
    command = [*KVPLANE, *map(str, arguments)]
    # A group of its own, so that a signal of the test reaches it alone, as Ctrl-C in its own terminal would.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(LIMIT_S)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def interrupt(process: subprocess.Popen[str]) -> int:
    """Send SIGINT to the process group, as Ctrl-C does; returns the exit code."""
    os.killpg(process.pid, signal.SIGINT)
    return process.wait(LIMIT_S)


def children(pid: int) -> list[int]:
    """Running child processes of a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text(encoding="ascii").split()]
    return found


class Watched:
    """Any process, held by a file descriptor so that its number cannot be reused."""

    def __init__(self, pid: int) -> None:
        self._file = os.pidfd_open(pid)

    def wait_for_end(self) -> bool:
        """True if it ends within the limit."""
        ready, _, _ = select.select([self._file], [], [], LIMIT_S)
        os.close(self._file)
        return bool(ready)
