"""Worker processes of a demo."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_S = 60.0
WORKER = [sys.executable, "-W", "ignore", "-c", "from kvplane_tools.cli import main; main()", "worker"]


@contextmanager
def running_workers(address: str, replica: str, device: str, folder: Path, num_ranks: int) -> Iterator[list[str]]:
    """Start a worker process per rank. Returns their addresses."""
    given = ["--service", address, "--replica", replica, "--device", device]
    processes = [
        subprocess.Popen(
            [
                *WORKER,
                *given,
                *("--rank", str(rank)),
                *("--run-dir", str(folder / str(rank))),
                *("--disk", str(folder / "disk")),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        yield [address_of(process) for process in processes]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            leave(process)


def leave(worker: subprocess.Popen[str]) -> None:
    """Stop the workers with two signals: they would wait for this process, the engine.
    Two at once may arrive as one.
    """
    for _ in range(int(START_S)):
        try:
            worker.wait(1)
            return
        except subprocess.TimeoutExpired:
            worker.terminate()
    raise TimeoutError(f"worker {worker.pid} did not exit")


def address_of(worker: subprocess.Popen[str]) -> str:
    """The address that a worker prints once it is ready."""
    assert worker.stdout is not None
    matched = re.search(r"pages at (\S+)", worker.stdout.readline())
    if matched is None:
        raise SystemExit("demo: a worker did not start")
    return matched.group(1)
