"""Start and drain `kvplane router`. It holds nothing that must survive: it learns the caches again from the engines."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable

import grpc

from kvplane.base.errors import InternalError, InvalidArgument
from kvplane.rpc.access import PLAIN, Access
from kvplane.v1 import front_ends_pb2, routing_pb2
from kvplane_fleet.decisions import Decisions
from kvplane_fleet.fleet import Fleet, following
from kvplane_fleet.router import picker, pod_scores
from kvplane_fleet.router.metrics import RouterCollector
from kvplane_fleet.router.prober import Prober
from kvplane_fleet.router.servicer import RoutingServicer
from kvplane_fleet.settings import FleetSettings
from kvplane_service.auth.gate import open_gate
from kvplane_service.auth.scopes import HEALTH, Rule, Scope, service_rules
from kvplane_service.auth.tokens import metrics_token
from kvplane_service.config import Config, is_open_to_all
from kvplane_service.config_loading import Loaded
from kvplane_service.rpc.health import SERVICE as HEALTH_SERVICE
from kvplane_service.rpc.health import Health
from kvplane_service.rpc.methods import CallHooks, service_handler
from kvplane_service.rpc.ports import add_port, server_credentials
from kvplane_service.rpc.server import HEALTH_OPTIONS, add_reflection, server_options
from kvplane_service.runtime import interpreter
from kvplane_service.runtime.interpreter import allow_connections
from kvplane_service.telemetry.http import MetricsServer

ROUTING = routing_pb2.DESCRIPTOR.services_by_name["Routing"]
FRONT_ENDS = front_ends_pb2.DESCRIPTOR.services_by_name
_READ, _REPORT = Rule(Scope.READ), Rule(Scope.REPORT)
RULES = {
    **HEALTH,
    **service_rules(
        "Routing", Score=_READ, ScoreStream=_READ, Report=_REPORT, ListPlaces=_READ, WatchIndex=Rule(Scope.EVENTS)
    ),
    f"{picker.NAME}/Process": _REPORT,  # it reports what it sees of the answers
    f"{pod_scores.NAME}/GetPodScores": _READ,
}
# The keys of `kvplane config` that a router reads.
CONFIG_KEYS = frozenset(
    """
    listen metrics_listen metrics_token_file health_listen tls_cert tls_key tls_client_ca tls_client_auth auth_owners
    auth_tokens auth_jwks auth_jwt_issuer auth_jwt_audience audit_log max_message_bytes max_connections keepalive_ms
    keepalive_timeout_ms reflection uvloop log_level drain_delay_ms drain_grace_ms
    """.split()
)
_SWEEP_S = 1.0

_log = logging.getLogger(__name__)


def check_keys(loaded: Loaded) -> None:
    """Raise InvalidArgument if a flag or file sets a key that only the allocation service reads."""
    for key, source in loaded.sources.items():
        if key not in CONFIG_KEYS and source != "default" and not source.startswith(("default ", "KVPLANE_")):
            remedy = f"leave it out; a router reads {', '.join(sorted(CONFIG_KEYS))}"
            raise InvalidArgument("only the allocation service reads it", field=key, remedy=remedy)


async def _nothing_to_adopt(_: str) -> None:
    """No call of a router names a replica that another process may have."""


class Router:
    """One router process. Create it inside the running event loop.

    Attributes:
        address, metrics_address, health_address: addresses that are served, "" before `start` and if disabled.
    """

    def __init__(
        self,
        config: Config,
        settings: FleetSettings,
        clock: Callable[[], float] = time.monotonic,
        access: Access = PLAIN,
    ) -> None:
        """`clock` returns seconds that never decrease; `access` is that with which services of places are called.
        Raises InvalidArgument, NotFound as `open_gate`.
        """
        self._config, self.settings = config, settings
        self.fleet = Fleet(access)
        self.decisions = Decisions(self.fleet, settings.router, clock)
        self.address = self.metrics_address = self.health_address = ""
        self.prober = Prober(self.fleet, self.decisions, settings.router, clock)
        self.gate = open_gate(config, time.monotonic_ns, RULES)
        self._health = Health((ROUTING.full_name, picker.NAME, pod_scores.NAME))
        self._servicer = RoutingServicer(self.fleet, self.decisions, clock)
        self._server = grpc.aio.server(options=server_options(config))
        hooks, open_to_all = CallHooks(_nothing_to_adopt, self.gate), CallHooks(_nothing_to_adopt)
        decide = self._servicer.decide
        picks = picker.EndpointPicker(self.fleet, self.decisions, decide, clock)
        scores = pod_scores.PodScores(self.fleet, decide)
        self._server.add_generic_rpc_handlers(
            (
                service_handler(ROUTING, self._servicer, hooks),
                service_handler(HEALTH_SERVICE, self._health.servicer, hooks),
                service_handler(FRONT_ENDS["ExternalProcessor"], picks, hooks, picker.NAME),
                service_handler(FRONT_ENDS["Indexer"], scores, hooks, pod_scores.NAME),
            )
        )
        if config.serves_reflection:
            add_reflection(self._server, (ROUTING.full_name, HEALTH_SERVICE.full_name))
        self._health_server = grpc.aio.server(options=HEALTH_OPTIONS)
        self._health_server.add_generic_rpc_handlers(
            (service_handler(HEALTH_SERVICE, self._health.servicer, open_to_all),)
        )
        token = metrics_token(config.metrics_token_file)
        self._metrics = MetricsServer(RouterCollector(self.fleet, self.decisions, self.prober.results), token)

    async def start(self) -> None:
        """Start serving. Raises Unavailable if an address is in use."""
        config = self._config
        credentials = server_credentials(config) if config.tls_cert else None
        self._health.starting()
        self.address = add_port(self._server, config.listen, credentials=credentials)
        if config.health_listen:
            self.health_address = add_port(self._health_server, config.health_listen, "health_listen")
        if config.metrics_listen:
            self.metrics_address = await self._metrics.start(config.metrics_listen)
        await self._health_server.start()
        await self._server.start()

    async def keep(self) -> None:
        """Report ready once the caches are learned, or after the warm-up; then forget what expires, until cancelled."""
        try:
            # Not `wait_for`: before Python 3.12 it drops a cancellation that comes as the wait ends.
            async with asyncio.timeout(self.settings.router.warm_up_s):
                await self.fleet.wait_until_current()
        except TimeoutError:
            _log.warning("some engines are not connected: their prompts count as not cached")
        self._health.serving()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.prober.run())
            while True:
                await asyncio.sleep(_SWEEP_S)
                self.decisions.sweep()
                if self.gate is not None:
                    self.gate.recheck()

    async def drain(self) -> None:
        """Report not ready, end the streams, and stop."""
        self._health.draining()
        await asyncio.sleep(self._config.drain_delay_ms / 1000)
        self._servicer.drain()
        await self._server.stop(self._config.drain_grace_ms / 1000)
        await self._health_server.stop(None)
        await self._metrics.stop()
        if self.gate is not None:
            self.gate.close()


async def serve(
    config: Config, settings: FleetSettings, ready: Callable[[Router], None], access: Access = PLAIN
) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal stops the process at once.

    Args:
        config: how calls are served.
        settings: the places, and how the router decides.
        ready: called when the router answers calls.
        access: TLS and token with which the services of places are called.

    Raises:
        Unavailable: an address is in use.
        InternalError: a background task failed.
    """
    if is_open_to_all(config):
        _log.warning("any client that reaches %s has access: set tls_cert and auth_owners", config.listen)
    allow_connections(config.max_connections)
    loop, asked = asyncio.get_running_loop(), asyncio.Event()

    def signalled() -> None:
        """Drain at the first signal; leave later ones to their default handlers."""
        asked.set()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    router = Router(config, settings, access=access)
    async with following(router.fleet, settings.places) as follows:
        await router.start()
        interpreter.tune()
        ready(router)
        keeping, ending = asyncio.create_task(router.keep()), asyncio.create_task(asked.wait())
        await asyncio.wait((*follows, keeping, ending), return_when=asyncio.FIRST_COMPLETED)
        keeping.cancel()
        ending.cancel()
        await router.drain()
        (kept,) = await asyncio.gather(keeping, return_exceptions=True)
    if isinstance(kept, Exception):
        raise InternalError(f"a background task ended: {kept!r}", remedy="report it, with the log") from kept
