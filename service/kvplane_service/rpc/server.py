"""The servers: all services, Health and reflection by gRPC on one address; if configured, only Health on another one,
and sessions by ttrpc on a Unix socket.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from kvplane.v1 import admin_pb2, allocation_pb2, events_pb2, plan_pb2
from kvplane_service.auth.gate import Gate
from kvplane_service.auth.visible import VisibleReplicas
from kvplane_service.config import Config
from kvplane_service.registry import Registry
from kvplane_service.rpc import health
from kvplane_service.rpc.about import About
from kvplane_service.rpc.admin import AdminServicer
from kvplane_service.rpc.allocation import AllocationServicer
from kvplane_service.rpc.events import EventsServicer
from kvplane_service.rpc.methods import CallHooks, service_handler, stream_method, unary_methods
from kvplane_service.rpc.ports import add_port, server_credentials
from kvplane_service.rpc.session import SessionStreams
from kvplane_service.rpc.status_page import StatusPage
from kvplane_service.rpc.ttrpc import TtrpcServer
from kvplane_service.rpc.workers import WorkersServicer
from kvplane_service.store.keeper import Keeper
from kvplane_service.store.ownership import Ownership

REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
MAX_STREAMS = 1024  # calls at a time on one connection; a client waits for more
_LAST_CALLS_S = 1.0  # time for calls in progress when the server stops

_log = logging.getLogger(__name__)

_ALLOCATION = allocation_pb2.DESCRIPTOR.services_by_name["Allocation"]
_EVENTS = events_pb2.DESCRIPTOR.services_by_name["Events"]
_WORKERS = plan_pb2.DESCRIPTOR.services_by_name["Workers"]
_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"]


@dataclass(frozen=True, slots=True)
class CallFilters:
    """What every call passes before it reaches a servicer: interceptors, and a gate (None = no authentication)."""

    gate: Gate | None = None
    interceptors: Sequence[grpc.aio.ServerInterceptor] = ()


class RpcServer:
    """Serves a registry over gRPC. Create it inside the running event loop.

    Attributes:
        health: what gRPC Health reports.
        page: the status page, for the metrics port.
    """

    def __init__(
        self,
        registry: Registry,
        config: Config,
        about: About,
        keeper: Keeper,
        ownership: Ownership,
        filters: CallFilters,
    ) -> None:
        self._config = config
        self._server = grpc.aio.server(options=server_options(config), interceptors=filters.interceptors)
        self._ownership = ownership
        visible = VisibleReplicas(registry, ownership.ensure_local)
        self._streams = SessionStreams(visible, ownership)
        self._events = EventsServicer(visible)
        self._allocation = AllocationServicer(visible, self._streams, keeper, ownership)
        services = (_ALLOCATION.full_name, _EVENTS.full_name, _WORKERS.full_name, _ADMIN.full_name)
        self.health = health.Health(services)
        hooks = CallHooks(visible.ensure_local, filters.gate)
        admin = AdminServicer(visible, about)
        methods = unary_methods(_ALLOCATION, self._allocation) | unary_methods(_ADMIN, admin)
        self.page = StatusPage(methods, hooks, config)
        handlers = (
            service_handler(_ALLOCATION, self._allocation, hooks),
            service_handler(_EVENTS, self._events, hooks),
            service_handler(_WORKERS, WorkersServicer(visible), hooks),
            service_handler(_ADMIN, admin, hooks),
            service_handler(health.SERVICE, self.health.servicer, hooks),
        )
        self._server.add_generic_rpc_handlers(handlers)
        session = _ALLOCATION.methods_by_name["Session"]
        serve = stream_method(_ALLOCATION.full_name, session, self._allocation, hooks)
        self._local = TtrpcServer({f"/{_ALLOCATION.full_name}/{session.name}": serve}, config)
        self._health_server = grpc.aio.server(options=HEALTH_OPTIONS)
        open_to_all = service_handler(health.SERVICE, self.health.servicer, CallHooks(visible.ensure_local))
        self._health_server.add_generic_rpc_handlers((open_to_all,))
        self.health_address = ""  # set by `start` if configured
        if config.serves_reflection:
            # Clients request the descriptor of every listed service, and there is none for v1 of reflection.
            names = (*services, health.SERVICE.full_name, reflection.SERVICE_NAME)
            add_reflection(self._server, names)

    async def start(self) -> str:
        """Start serving, and return the address, with the selected port instead of port 0.

        Raises:
            Unavailable: an address is in use, or does not belong to this machine.
            KvplaneError: the certificate cannot be used.
        """
        config = self._config
        credentials = server_credentials(config) if config.tls_cert else None
        address = add_port(self._server, config.listen, credentials=credentials)
        if config.health_listen:
            self.health_address = add_port(self._health_server, config.health_listen, "health_listen")
        self.health.starting()
        if config.session_socket:
            await self._local.start()
        await self._health_server.start()
        await self._server.start()
        return address

    async def drain(self, grace_ms: int) -> None:
        """Refuse new work, wait at most `grace_ms` for sessions to close, release the replicas, so that other services
        may take them over, and stop.

        Engines are notified first, even if the store hangs; the release of replicas is written to the store
        concurrently.
        """
        self._streams.refuse_new()
        self._allocation.refuse_new()
        self._events.drain()
        leaving = asyncio.create_task(self._ownership.leave(self._streams.replicas()))
        await self._streams.drain(grace_ms)
        await asyncio.gather(self._let_go(leaving), self._server.stop(_LAST_CALLS_S), self._local.stop(_LAST_CALLS_S))
        await self._health_server.stop(None)

    async def _let_go(self, leaving: asyncio.Task[None]) -> None:
        """Release every replica, so that other services may take it over, unless the store does not answer within
        _LAST_CALLS_S seconds.
        """
        try:
            async with asyncio.timeout(_LAST_CALLS_S):
                await leaving
                await self._ownership.leave(())
        except TimeoutError:
            _log.warning("the store does not answer: other services adopt the replicas when the lease expires")

    async def stop(self) -> None:
        """Stop serving at once; running calls are cancelled."""
        await self._server.stop(None)
        await self._local.stop(0)
        await self._health_server.stop(None)


# What clients may hold before they are known. No message is decompressed: a few bytes could become many. gRPC buffers
# up to 64 KiB of a stream that no handler has read; it would let fast connections have more.
_BOUNDS = (
    ("grpc.so_reuseport", 0),  # a second process on the port is a mistake, not load balancing
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),  # a client connects again when it calls
    ("grpc.http2.bdp_probe", 0),
    ("grpc.experimental.tcp_max_read_chunk_size", 64 << 10),
    # Above it calls are cancelled at random. A call that waits here waits for all before it, of any client: with 64,
    # the 99th percentile in the first seconds of a flood of unknown clients was 260 ms instead of 850, but half of 200
    # calls that one client sent at once were cancelled.
    ("grpc.server.max_pending_requests", 512),
    ("grpc.server.max_pending_requests_hard_limit", 1024),
)
HEALTH_OPTIONS = (
    *_BOUNDS,
    ("grpc.max_allowed_incoming_connections", 256),
    ("grpc.max_concurrent_streams", 32),
    ("grpc.max_receive_message_length", 4 << 10),
)


def server_options(config: Config) -> list[tuple[str, int]]:
    """Return the options of a server whose clients may be unknown."""
    return [
        *_BOUNDS,
        ("grpc.max_allowed_incoming_connections", config.max_connections),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", -1),  # unlimited: an answer whose step was applied must reach the client
        ("grpc.keepalive_time_ms", config.keepalive_ms),
        ("grpc.keepalive_timeout_ms", config.keepalive_timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ]


def add_reflection(server: grpc.aio.Server, names: tuple[str, ...]) -> None:
    """Serve gRPC reflection v1alpha, and v1 with the same messages, because grpcio-reflection does not support
    v1 yet.
    """
    servicer = reflection.aio.ReflectionServicer(names)
    request = reflection_pb2.ServerReflectionRequest
    response = reflection_pb2.ServerReflectionResponse
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo, request.FromString, response.SerializeToString
    )
    for name in (reflection.SERVICE_NAME, REFLECTION_V1):
        methods = {"ServerReflectionInfo": handler}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, methods),))
