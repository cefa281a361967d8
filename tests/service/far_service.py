"""`python -m tests.service.far_service FOLDER`: a service and an engine whose host tier workers of others map.

It prints its address when the engine has served a prompt. A test stops it, and lets it continue.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvplane.base.worker import PeerArena, WorkerInfo
from kvplane_service.config import Config
from kvplane_service.process.app import App
from kvplane_service.rpc import workers
from kvplane_worker.lending.rundir import SOCKET
from kvplane_worker.rpc.arenas import ArenaLender, borrow
from kvplane_worker.tiers import Peer
from tests.engine.stress import FULL
from tests.engine.world import World
from tests.peers.site import Site, pool_of, tiers_of
from tests.service.test_peers import serve

BEAT_S, RENEW_S = 0.1, 0.05


class FarSite(Site):
    """Engines that map the host tiers of workers in other processes, over the worker's socket."""

    def peer(self, reader: World, arena: PeerArena, rank: int) -> Peer | None:
        near = arena.address.startswith("unix:/engine/")
        return super().peer(reader, arena, rank) if near else borrow(arena)


class LentSite(Site):
    """An engine whose worker has a folder."""

    folder = Path()

    def info(self, world: World, rank: int) -> WorkerInfo:
        return replace(super().info(world, rank), address=f"unix:{self.folder / SOCKET}")


async def lend(folder: Path) -> None:
    """Serve a prompt on an engine, then lend what it saved."""
    vars(workers)["BEAT_S"] = BEAT_S
    app = App(Config(listen="127.0.0.1:0"))
    address = await app.start()
    LentSite.folder = folder
    site = LentSite(1, pool_of(2, (FULL,)), registry=app.registry)
    (world,) = site.worlds
    lender = ArenaLender(tiers_of(world, 0)[0].arena, folder)
    serve(world)
    print(address, flush=True)
    while os.getppid() != 1:  # the test has ended
        site.connect()
        await asyncio.sleep(RENEW_S)
    lender.close()


class Far:
    """The process, and the address of its service."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        self.address = process.stdout.readline().strip()

    def stop(self) -> None:
        """Stop it: its sockets stay open, and nothing reads them or answers."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it continue."""
        self._process.send_signal(signal.SIGCONT)


@contextmanager
def far_service(folder: Path) -> Iterator[Far]:
    """Run it."""
    command = [sys.executable, "-m", "tests.service.far_service", str(folder)]
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipe) as process:
        try:
            yield Far(process)
        finally:
            process.kill()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(lend(Path(sys.argv[1])))
