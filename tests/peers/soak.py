"""Prompts that move between engines for a long time: nothing may grow. `python -m tests.peers --soak 30`: minutes.

Three engines on two services that follow each other over gRPC; from time to time one is killed, and another
begins; workers map all memories again with every renewal. Where NIXL is installed, three more whose workers read each
other over it.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvplane_service.config import Config
from kvplane_service.process.app import App
from kvplane_service.registry import Registry
from tests.peers.campaign import HAS_NIXL, OF_TWO, OVER_NIXL, Outcome, Run
from tests.peers.ledger import LEDGER
from tests.peers.site import tiers_of
from tests.soak.__main__ import BOUNDS
from tests.soak.verdict import MIB, Verdict, verdict_of
from tests.store.servers import free_port

ROUND_S, AT_ONCE, STRIKE_SHARE = 0.001, 25, 0.1
RENEW_S = 2.0  # well within the leases of workers
SAY_S, LEAST_SAMPLES = 60.0, 6


class Spill(Run):
    """Engines that hold a few prompts each, and are asked for all."""

    def __init__(self, kind: str, seed: int, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._renewed_s = loop, 0.0
        super().__init__(kind, seed)
        for link in self.site.links:
            link.cut()
        self.site.links.clear()  # the services have a real connection

    def _registries(self, count: int) -> Sequence[Registry]:
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(count)]
        services = ",".join(addresses)
        self.apps = [self._loop.run_until_complete(_started(one, services)) for one in addresses]
        return [app.registry for app in self.apps]

    def _round(self) -> None:
        """Let the services run."""
        self._loop.run_until_complete(asyncio.sleep(ROUND_S))
        if time.monotonic() - self._renewed_s > RENEW_S:
            self._renewed_s = time.monotonic()
            self.site.connect()

    def spill(self) -> None:
        """Serve some requests; periodically an engine is killed, and another begins, maybe on the other service."""
        self.play(AT_ONCE)
        self._asked.clear()
        if self._rng.random() < STRIKE_SHARE:
            self._strike()

    def close(self) -> None:
        """End engines and services."""
        self.end()
        for app in self.apps:
            self._loop.run_until_complete(app.stop())

    @property
    def memories(self) -> list[bytes]:
        """What names the host tiers."""
        return [tiers_of(world, 0)[0].incarnation for world in self.site.worlds]

    @property
    def registrations(self) -> int:
        """Replicas, and those of the other service, that the services know; and the peers of all workers."""
        of_services = sum(len(one) + len(one._remote) for app in self.apps for one in app.registry.namespaces.values())
        return of_services + sum(len(tiers_of(world, 0)[1].peers) for world in self.site.worlds)


async def _started(address: str, services: str) -> App:
    settings: dict[str, Any] = {"listen": address, "peer_services": services, **BOUNDS}
    app = App(Config(**settings))
    await app.start()
    return app


def resources(pids: Sequence[int]) -> dict[str, int]:
    """Memory and descriptors of these processes together. What this one has freed is given back first: threads of
    movers come and go, and the C library keeps memory for each that it will have.
    """
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    found = {"rss": 0, "descriptors": 0}
    for pid in pids:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
        found["rss"] += pages * os.sysconf("SC_PAGE_SIZE")
        found["descriptors"] += len(os.listdir(f"/proc/{pid}/fd"))
    return found


def soak(minutes: float, seed: int, say: Callable[[str], None] = print) -> tuple[Verdict, list[Outcome]]:
    """Serve for so long; return how much grew, and what each three engines answered."""
    loop, began_s = asyncio.new_event_loop(), time.monotonic()
    asyncio.set_event_loop(loop)
    kinds = ["spill" + OF_TWO, *(["spill" + OF_TWO + OVER_NIXL] if HAS_NIXL else [])]
    runs = [Spill(kind, seed, loop) for kind in kinds]
    samples, said_s = list[str](), 0.0
    while (at_s := time.monotonic() - began_s) < 60 * minutes or len(samples) < LEAST_SAMPLES:
        for run in runs:
            run.spill()
        LEDGER.keep([memory for run in runs for memory in run.memories])
        pids = [os.getpid(), *(agent.pid for run in runs for agent in run.site.agents.values())]
        counts = {"threads": threading.active_count(), "tasks": len(asyncio.all_tasks(loop))}
        counts |= resources(pids) | {"registrations": sum(run.registrations for run in runs)}
        samples.append(json.dumps({"at_s": at_s, "held_ms": 0.0} | counts))
        if at_s >= said_s:
            said_s = at_s + SAY_S
            requests = sum(run.outcome.report.requests for run in runs)
            what = ", ".join(f"{number} {name}" for name, number in counts.items() if name != "rss")
            say(f"{at_s / 60:5.1f} minutes: {requests} requests, {counts['rss'] / MIB:.0f} MiB, {what}")
    for run in runs:
        run.close()
    loop.close()
    return verdict_of(samples), [run.outcome for run in runs]
