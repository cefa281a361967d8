"""`kvplane serve` with a ticker in its event loop, and what it noted."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TICK_S = 0.002
SERVE = "import sys; from tests.bench.ticking import serve; serve(sys.argv.pop(1))"


def serve(path: str) -> None:
    """`kvplane serve` that writes the durations of steps and intervals of ticks on SIGUSR1."""
    from kvplane_service.rpc import session
    from kvplane_tools.cli import main, server

    steps, ticks, together = list[int](), list[int](), list[int]()
    handle, print_addresses = session._Stream._step, server._print_addresses

    async def timed(self: Any, message: Any) -> bytes:
        started = time.thread_time_ns()
        answer = await handle(self, message)
        steps.append(time.thread_time_ns() - started)
        return answer

    async def tick() -> None:
        while True:
            before, all_before = time.thread_time_ns(), time.process_time_ns()
            await asyncio.sleep(TICK_S)
            ticks.append(time.thread_time_ns() - before)
            together.append(time.process_time_ns() - all_before)

    def print_and_tick(app: Any) -> None:
        ticking.append(asyncio.get_running_loop().create_task(tick()))
        print_addresses(app)

    def note(*_: object) -> None:
        Path(path).write_text(json.dumps({"steps": steps, "ticks": ticks, "together": together}))
        for noted in (steps, ticks, together):
            noted.clear()

    ticking = list[asyncio.Task[None]]()
    session._Stream._step = timed  # type: ignore[method-assign]
    server._print_addresses = print_and_tick
    signal.signal(signal.SIGUSR1, note)
    main()


@contextmanager
def service(*flags: str) -> Iterator[tuple[str, subprocess.Popen[str], Path]]:
    """Where it listens, its process, and the file of what held it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "held.json"
        command = [sys.executable, "-c", SERVE, str(path), "serve", "--listen", "127.0.0.1:0", *flags]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1], process, path
        finally:
            process.terminate()
            process.wait(30)


def noted(process: subprocess.Popen[str], path: Path) -> dict[str, list[int]]:
    """Durations of steps and intervals of ticks since the last call, in ns."""
    path.unlink(missing_ok=True)
    process.send_signal(signal.SIGUSR1)
    while not path.exists() or not path.read_text().endswith("}"):
        time.sleep(0.01)
    found: dict[str, list[int]] = json.loads(path.read_text())
    return found
