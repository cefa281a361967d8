"""Services for tests of the client, each with one small replica."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kvplane.base.session import SessionTransport
from kvplane.channel import open_channel
from kvplane.transport import GrpcTransport
from kvplane.unary import Client
from kvplane_service.app import App
from kvplane_service.config import Config
from kvplane_service.core.inspect import digest
from kvplane_service.host import ReplicaHost
from kvplane_service.inprocess import InProcessTransport
from kvplane_service.registry import Registration, Registry
from tests.client.mini_engine import HYBRID

_T = TypeVar("_T")
LIMIT_S = 20.0  # of everything that a test waits for


class InProcessWorld:
    """A registry in this process.

    Attributes:
        now_ns: the service's clock; a test moves it.
    """

    replica = "small"

    def __init__(self, config: Config | None = None) -> None:
        self.now_ns = 0
        self.registry = Registry(config or Config(), lambda: self.now_ns)
        self.register()

    def register(self) -> None:
        """Create the replica."""
        self.registry.register(self.replica, Registration(HYBRID))

    def forget(self) -> None:
        """As a restart does: the replica is there again, and new."""
        self.registry.remove(self.replica)
        self.register()

    @property
    def host(self) -> ReplicaHost:
        """Of the replica."""
        return self.registry.get(self.replica).host

    def transport(self) -> SessionTransport:
        """A transport of its own for each session."""
        return InProcessTransport(lambda name: self.registry.get(name).host)

    def digest(self) -> str:
        """Of the replica's state."""
        return digest(self.host.replica)


class ServiceThread:
    """A whole service on a loop in a thread of its own.

    Attributes:
        address: where it listens.
    """

    def __init__(self, config: Config) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.app = self.call(self._create, config)
        self.address = self.do(self.app.start)

    def do(self, act: Callable[[], Awaitable[_T]]) -> _T:
        """Run a coroutine function on the service's loop."""

        async def run() -> _T:
            return await act()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(LIMIT_S)

    def call(self, act: Callable[..., Awaitable[_T]], *args: object) -> _T:
        """Run a coroutine function with arguments on the service's loop."""
        return self.do(lambda: act(*args))

    async def _create(self, config: Config) -> App:
        return App(config)

    def stop(self) -> None:
        """At once, and take the loop down."""
        self.do(self.app.stop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_S)
        self._loop.close()


class GrpcWorld:
    """A service behind gRPC."""

    replica = "small"

    def __init__(self, listen: str) -> None:
        self.service = ServiceThread(Config(listen=listen))
        self._channel = open_channel(self.service.address)
        self.client = Client(self._channel)
        self.client.register_replica(self.replica, HYBRID)

    def transport(self) -> SessionTransport:
        """A transport of its own for each session."""
        return GrpcTransport(self._channel)

    def digest(self) -> str:
        """Of the replica's state."""
        return self.client.snapshot(self.replica, summary=True).digest

    def reset(self) -> None:
        """As new."""
        self.client.deregister_replica(self.replica)
        self.client.register_replica(self.replica, HYBRID)

    def close(self) -> None:
        """Take it down."""
        self.client.close()
        self.service.stop()
