"""Create the parts of a service process, and start, drain and stop them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import secrets
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import TYPE_CHECKING

from kvplane.base.errors import InternalError, KvplaneError
from kvplane_service.auth.gate import open_gate
from kvplane_service.auth.tokens import metrics_token
from kvplane_service.config import Config, is_open_to_all, is_store_trusted
from kvplane_service.process.peer_services import PeerServices
from kvplane_service.registry import Registry
from kvplane_service.replicas.host import ReplicaHost
from kvplane_service.replicas.idle_check import IdleCheck, check_in_background
from kvplane_service.replicas.recent import Recent, sample_in_background
from kvplane_service.rpc.about import About
from kvplane_service.rpc.server import CallFilters, RpcServer
from kvplane_service.runtime import interpreter
from kvplane_service.runtime.executors import Executor, InOrder
from kvplane_service.runtime.interpreter import allow_connections
from kvplane_service.store.keeper import Entropy, Keeper
from kvplane_service.store.opening import make_store
from kvplane_service.store.ownership import Ownership, expire_in_background
from kvplane_service.store.owning import make_owners
from kvplane_service.store.writer import Runtime
from kvplane_service.telemetry.collector import ServiceCollector
from kvplane_service.telemetry.holds import Holds
from kvplane_service.telemetry.http import MetricsServer
from kvplane_service.telemetry.sampling import is_asked_for

if TYPE_CHECKING:
    from kvplane_service.rpc.traced import TracingInterceptor
    from kvplane_service.telemetry.tracing import Tracing

_SWEEPS_PER_LEASE = 4
_LAST_WORDS_S = 1.7  # time after the grace period in which the parts stop and pending changes are written
_LEAST_S = 0.2  # time that each part gets to stop, even after the deadline

_log = logging.getLogger(__name__)


class App:
    """One service process. Create it inside the running event loop.

    Attributes:
        address, metrics_address: addresses that are served, "" before `start` and for a disabled endpoint.
        failed: a future whose result is set when a background task ends unexpectedly: which one, and why.
    """

    def __init__(
        self,
        config: Config,
        clock: Callable[[], int] = time.monotonic_ns,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Create all parts. `clock` returns monotonic nanoseconds; `environment` has the variables of OpenTelemetry.

        Raises:
            InvalidArgument: a variable of OpenTelemetry or a file of owners, tokens or keys is invalid, or
                configuration values contradict each other.
            NotFound: such a file cannot be read.
        """
        self.config = config
        self._clock = clock
        self.registry = Registry(config, clock)
        runtime = Runtime(clock, asyncio.sleep, Executor("replicas that come back"), random.random)
        entropy = Entropy(lambda: time.time_ns() // 1_000_000, lambda: secrets.randbelow((1 << 64) - 1) + 1)
        self.keeper = Keeper(self.registry, config, runtime, entropy)
        owners = make_owners(config, self.keeper, runtime, entropy.draw, environment)
        self.ownership = Ownership(self.registry, config, self.keeper, runtime, owners)
        self._peer_services = PeerServices(self.registry, config)
        self.address = self.metrics_address = ""
        self._tracing: Tracing | None = None
        self.about = About()
        self._gate = open_gate(config, clock)
        filters = CallFilters(self._gate, self._start_tracing(environment))
        self._server = RpcServer(self.registry, config, self.about, self.keeper, self.ownership, filters)
        self._holds = Holds()
        collector = ServiceCollector(self.registry, self.keeper.report, self._holds)
        self._metrics = MetricsServer(collector, metrics_token(config.metrics_token_file), self._server.page.answer)
        self._tasks: list[asyncio.Task[None]] = []

        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> str:
        """Start serving and return the address. The content of the store is read in the background.

        Raises:
            Unavailable: the address of the service or of its metrics is in use.
            KvplaneError: the store cannot be used; it was not changed.
        """
        store = make_store(self.config)
        if store is not None:
            await self.keeper.start(store)
            await self.ownership.begin()
        if self.config.metrics_listen:
            self.metrics_address = await self._metrics.start(self.config.metrics_listen)
        self.about.metrics_address, self.about.tracing = self.metrics_address, self._tracing is not None
        try:
            self.address = await self._server.start()
        except KvplaneError:
            await self._metrics.stop()
            raise
        self._start_task("leases", self._sweep())
        self._start_task("loop holds", self._holds.watch())
        self._start_task("logs", self.registry.logs.pack_in_background())
        self._start_task("samples of replicas", sample_in_background(self._recent, self._clock, asyncio.sleep))
        if self._peer_services:
            self._start_task("other services", self._peer_services.run())
        if self.config.replica_ttl_ms:
            expiry = expire_in_background(self.registry, self.ownership, self.config.replica_ttl_ms, asyncio.sleep)
            self._start_task("expiry of replicas", expiry)
        if self.config.idle_check_ms:
            checks = check_in_background(self._idle_checks, self.config.idle_check_ms, self._clock, asyncio.sleep)
            self._start_task("idle checks", checks)
        if store is None:
            self._server.health.serving()
        else:
            self._server.health.store(self.keeper.is_there)
            if self.keeper.shared_store is not None:
                self._start_task("owner's lease", self.ownership.keep())
            self._start_task("store", self._follow_store())
            self._start_task("loads of replicas", self.keeper.supervise_loads())
        return self.address

    @property
    def health_address(self) -> str:
        """Address of the port that serves only gRPC Health, "" if there is none."""
        return self._server.health_address

    async def drain(self) -> None:
        """Stop so that no answer to an engine is lost: report unhealthy, refuse new sessions, wait for open sessions,
        write all changes to the store.

        Ends at most two seconds after `drain_delay_ms` and `drain_grace_ms`, even if a part hangs.
        """
        self.about.draining = True
        self._server.health.draining()
        await asyncio.sleep(self.config.drain_delay_ms / 1000)
        ends_at = time.monotonic() + self.config.drain_grace_ms / 1000 + _LAST_WORDS_S
        await self._server.drain(self.config.drain_grace_ms)
        await self._end(ends_at)

    async def stop(self) -> None:
        """Stop without waiting for open sessions; changes are still written to the store."""
        await self._server.stop()
        await self._end(time.monotonic() + _LAST_WORDS_S)

    def _start_tracing(self, environment: Mapping[str, str]) -> list[TracingInterceptor]:
        """Return the gRPC interceptors for tracing. The tracing library is imported only if the environment enables
        tracing.
        """
        if not is_asked_for(environment):
            return []
        from kvplane_service.rpc.traced import TracingInterceptor
        from kvplane_service.telemetry.tracing import Tracing

        self._tracing = tracing = Tracing(environment)
        self.registry.watch(lambda entry: entry.host.decisions.follow(tracing.follower(entry.host.name)))
        return [TracingInterceptor(tracing)]

    def _start_task(self, name: str, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Report a background task that ended: such tasks run until the service stops, so an earlier end is a bug that
        stops the service.
        """
        if not task.cancelled() and not self.failed.done():
            _log.critical("background task %r ended unexpectedly", task.get_name(), exc_info=task.exception())
            self.failed.set_result(f"background task {task.get_name()!r} ended: {task.exception()!r}")

    async def _follow_store(self) -> None:
        """Read the store, report the service as ready, then write changes. If the store is unavailable, report the
        service as ready without stored keys, and read them when the store answers. A replica whose stored entries
        cannot be read delays neither the report nor the writing.
        """
        if not self.keeper.is_read:
            _log.warning("the store is unavailable: serving without stored keys until it answers")
            self._server.health.serving()
        await self.keeper.load()
        self._server.health.serving()
        await self.keeper.write()

    async def _sweep(self) -> None:
        """Expire leases and end calls whose credentials are no longer valid, several times per lease period."""
        pause_s = self.config.lease_ms / 1000 / _SWEEPS_PER_LEASE
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(pause_s)
            late_ns = int((time.monotonic() - began_s - pause_s) * 1e9)
            self._expire(late_ns)
            if self._gate is not None:
                self._gate.recheck()
            if self.keeper.is_on:
                self._server.health.store(self.keeper.is_there)
            self._server.health.state(all(check.broken is None for check in self._idle_checks()))

    def _recent(self) -> Iterator[tuple[ReplicaHost, Recent]]:
        return ((entry.host, entry.recent) for entry in self.registry.one_by_one())

    def _idle_checks(self) -> Iterator[IdleCheck]:
        return (entry.host.idle_check for entry in self.registry.one_by_one())

    def _expire(self, late_ns: int) -> None:
        """Expire the leases of all replicas that were not renewed in time; `late_ns` nanoseconds of delay of this
        process are added to each lease first. This is a separate function because a local variable of `_sweep` would
        keep the last deregistered replica in memory.
        """
        for entry in self.registry:
            entry.extend_leases(late_ns)  # messages were not read while this process was stalled
            entry.host.expire()

    async def _end(self, ends_at: float) -> None:
        """Write pending changes to the store, then stop metrics, audit log and traces; `ends_at` is the deadline
        (time.monotonic).
        """
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_LEAST_S)
        await self.keeper.stop(max(_LEAST_S, ends_at - time.monotonic()))
        last = {"metrics": self._metrics.stop()}
        if self._gate is not None:
            last["the audit log"] = InOrder("the audit log")(self._gate.close)
        if self._tracing is not None:
            last["traces"] = InOrder("traces")(self._tracing.shutdown)
        tasks = [asyncio.create_task(work, name=name) for name, work in last.items()]
        _, hung = await asyncio.wait(tasks, timeout=max(_LEAST_S, ends_at - time.monotonic()))
        for task in hung:
            _log.warning("could not stop %s in time", task.get_name())
            task.cancel()


async def serve(config: Config, ready: Callable[[App], None]) -> None:
    """Serve until SIGTERM, SIGINT or the call Admin.Drain, then drain; a second signal stops the service at once.

    Args:
        ready: called when the service answers calls.

    Raises:
        Unavailable: an address is in use.
        InternalError: a background task failed; the service has drained.
    """
    signals: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number.name)
    app = App(config)
    if is_open_to_all(config):
        _log.warning(
            "any client that reaches %s has access: set tls_cert and auth_owners, or listen on 127.0.0.1 or unix:PATH",
            config.listen,
        )
    allow_connections(config.max_connections * (2 if config.session_socket else 1))
    await app.start()
    if is_store_trusted(config):
        _log.warning("the store is trusted: any process that can write to it can cause wrong hits; set store_key_file")
    interpreter.tune()
    ready(app)
    reason = await _first_call(app, signals)
    _log.info("%s: draining", reason)
    draining = asyncio.create_task(app.drain())
    second = asyncio.create_task(signals.get())
    await asyncio.wait((draining, second), return_when=asyncio.FIRST_COMPLETED)
    if draining.done():
        second.cancel()
        await draining
        _log.info("drained")
    else:
        _log.info("%s: stopping at once", second.result())
        draining.cancel()
        await app.stop()
        with contextlib.suppress(asyncio.CancelledError):
            await draining
    if app.failed.done():
        raise InternalError(app.failed.result(), remedy="report it, with the log of the service")


async def _first_call(app: App, signals: asyncio.Queue[str]) -> str:
    """Wait for a signal, for the call Admin.Drain, or for a failed background task, and return the name or description
    of the event that came first.
    """
    signalled = asyncio.create_task(signals.get())
    asked = asyncio.create_task(app.about.drain_asked.wait())
    await asyncio.wait((signalled, asked, app.failed), return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if signalled.done():
        return signalled.result()
    signalled.cancel()
    return app.failed.result() if app.failed.done() else "Admin.Drain"
