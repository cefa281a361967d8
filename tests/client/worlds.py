"""Services for tests of the client, each with one small replica."""

from __future__ import annotations

from kvplane.base.session import SessionTransport
from kvplane.blocking.client import Client
from kvplane.blocking.transport import GrpcTransport
from kvplane.blocking.ttrpc import SessionSocket
from kvplane.rpc.access import PLAIN
from kvplane.rpc.channel import MAX_MESSAGE_BYTES, open_channel
from kvplane_core.face.state import digest
from kvplane_service.config import Config
from kvplane_service.process.app import App
from kvplane_service.registry import Registration, Registry
from kvplane_service.replicas.host import ReplicaHost
from tests.client.loop_thread import shared_loop
from tests.client.mini_engine import HYBRID
from tests.service.inprocess import InProcessTransport


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
    """A whole service, on the shared loop.

    Attributes:
        address: where it listens.
    """

    def __init__(self, config: Config) -> None:
        self._loop = shared_loop()
        self._app = self._loop.make(App, config)
        self.address = self._loop.do(self._app.start)

    def drain(self) -> None:
        """As at SIGTERM; returns when all sessions have left."""
        self._loop.do(self._app.drain)

    def stop(self) -> None:
        """At once."""
        self._loop.do(self._app.stop)


class GrpcWorld:
    """A service behind gRPC."""

    replica = "small"

    def __init__(self, listen: str, session_socket: str = "") -> None:
        """Sessions on `transport` use the session socket, if there is one."""
        self.service = ServiceThread(Config(listen=listen, session_socket=session_socket))
        self._channel = open_channel(self.service.address)
        self._socket = SessionSocket(session_socket, PLAIN, MAX_MESSAGE_BYTES) if session_socket else None
        self.client = Client(self._channel)
        self.client.register_replica(self.replica, HYBRID)

    def transport(self) -> SessionTransport:
        """A transport of its own for each session."""
        return GrpcTransport(self._channel, session_socket=self._socket)

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
