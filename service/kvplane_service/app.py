"""The composition root: everything that a service process is made of, from start to end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import secrets
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING

from kvplane.base.errors import KvplaneError
from kvplane_service import garbage
from kvplane_service.about import About
from kvplane_service.auth.opening import open_gate
from kvplane_service.config import Config
from kvplane_service.registry import Registry
from kvplane_service.rpc.server import Outside, RpcServer
from kvplane_service.store.keeper import Chance, Keeper
from kvplane_service.store.opening import open_store
from kvplane_service.store.ownership import Durable, Ownership, is_gone
from kvplane_service.store.writer import Surroundings, offload_to_thread
from kvplane_service.telemetry.collector import ServiceCollector
from kvplane_service.telemetry.http import MetricsServer
from kvplane_service.telemetry.sampling import is_asked_for

if TYPE_CHECKING:
    from kvplane_service.rpc.traced import TracingInterceptor
    from kvplane_service.telemetry.tracing import Tracing

_SWEEPS_PER_LEASE = 4

_log = logging.getLogger(__name__)


class App:
    """One service process. Create it inside the running event loop."""

    def __init__(
        self,
        config: Config,
        clock: Callable[[], int] = time.monotonic_ns,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """`environment`: OpenTelemetry's variables.

        Raises:
            InvalidArgument: for a variable that cannot be, values that contradict each other, a file of who may call.
            NotFound: such a file cannot be read.
        """
        self.config = config
        self.registry = Registry(config, clock)
        around = Surroundings(clock, asyncio.sleep, offload_to_thread, random.random)
        chance = Chance(lambda: time.time_ns() // 1_000_000, lambda: secrets.randbelow((1 << 64) - 1) + 1)
        self.keeper = Keeper(self.registry, config, around, chance)
        self.ownership = Ownership(self.registry, config, self.keeper, around, is_gone)
        self.address = self.metrics_address = ""  # once it serves
        self._tracing: Tracing | None = None
        self.about = About()
        self._gate = open_gate(config, clock)
        outside = Outside(self._gate, self._start_tracing(environment))
        durable = Durable(self.keeper, self.ownership)
        self._server = RpcServer(self.registry, config, self.about, durable, outside)
        self._metrics = MetricsServer(ServiceCollector(self.registry, self.keeper.report))
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> str:
        """Begin to serve; returns the address. Entries that were stored are read meanwhile.

        Raises:
            Unavailable: the address, or that of metrics, is taken.
            KvplaneError: the store cannot be used; it was not touched.
        """
        store = await asyncio.to_thread(open_store, self.config)
        if store is not None:
            await self.keeper.start(store)
            await self.ownership.beat()
        if self.config.metrics_listen:
            self.metrics_address = await self._metrics.start(self.config.metrics_listen)
        self.about.metrics_address, self.about.tracing = self.metrics_address, self._tracing is not None
        try:
            self.address = await self._server.start()
        except KvplaneError:
            await self._metrics.stop()
            raise
        self._start_task(self._sweep())
        if store is None:
            await self._server.announce_ready()
        else:
            self._start_task(self.ownership.keep())
            self._start_task(self._recover())
        return self.address

    @property
    def health_address(self) -> str:
        """Of the port with health alone, "" when there is none."""
        return self._server.health_address

    async def drain(self) -> None:
        """Go without losing an answer: unhealthy first, then no new sessions, then wait for the open ones."""
        self.about.draining = True
        await self._server.announce_drain()
        await asyncio.sleep(self.config.drain_delay_ms / 1000)
        await self._server.drain(self.config.drain_grace_ms)
        await self._end()

    async def stop(self) -> None:
        """Go at once."""
        await self._server.stop()
        await self._end()

    def _start_tracing(self, environment: Mapping[str, str]) -> list[TracingInterceptor]:
        """Trace what the environment asks for; the library is loaded only then."""
        if not is_asked_for(environment):
            return []
        from kvplane_service.rpc.traced import TracingInterceptor
        from kvplane_service.telemetry.tracing import Tracing

        self._tracing = tracing = Tracing(environment)
        self.registry.watch(lambda entry: entry.host.decisions.follow(tracing.follower(entry.host.name)))
        return [TracingInterceptor(tracing)]

    def _start_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(_tell_bug)
        self._tasks.append(task)

    async def _recover(self) -> None:
        """Read what was stored, then be ready, and follow what is published."""
        await self.keeper.load()
        self._start_task(self.keeper.write())
        await self._server.announce_ready()

    async def _sweep(self) -> None:
        """Withdraw what silent replicas have published, and break off who may no longer call."""
        while True:
            await asyncio.sleep(self.config.lease_ms / 1000 / _SWEEPS_PER_LEASE)
            for entry in self.registry:
                entry.host.expire()
            if self._gate is not None:
                self._gate.recheck()

    async def _end(self) -> None:
        await self._metrics.stop()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.shutdown)
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self.keeper.stop()
        if self._gate is not None:
            await asyncio.to_thread(self._gate.close)


def _tell_bug(task: asyncio.Task[None]) -> None:
    """What runs beside the calls ends with the service; when it ends before, that is a bug, and nobody waits for it."""
    if not task.cancelled() and task.exception() is not None:
        _log.critical("a bug in the service", exc_info=task.exception())


async def serve(config: Config, ready: Callable[[App], None]) -> None:
    """Serve until SIGTERM, SIGINT or a Drain, then drain; the next signal stops at once.

    Args:
        ready: called once calls are answered.

    Raises:
        Unavailable: an address is taken.
    """
    signals: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number.name)
    app = App(config)
    await app.start()
    garbage.settle()
    ready(app)
    _log.info("%s: draining", await _first_call(app, signals))
    draining = asyncio.create_task(app.drain())
    second = asyncio.create_task(signals.get())
    await asyncio.wait((draining, second), return_when=asyncio.FIRST_COMPLETED)
    if draining.done():
        second.cancel()
        await draining
        _log.info("drained")
        return
    _log.info("%s: stopping at once", second.result())
    draining.cancel()
    await app.stop()
    with contextlib.suppress(asyncio.CancelledError):
        await draining


async def _first_call(app: App, signals: asyncio.Queue[str]) -> str:
    """Wait for a signal or an operator's Drain; returns which it was."""
    signalled = asyncio.create_task(signals.get())
    asked = asyncio.create_task(app.about.drain_asked.wait())
    await asyncio.wait((signalled, asked), return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if signalled.done():
        return signalled.result()
    signalled.cancel()
    return "Admin.Drain"
