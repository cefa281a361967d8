"""Services for tests of sessions, each with one small replica."""

from __future__ import annotations

from kvplane_service.config import Config
from kvplane_service.host import ReplicaHost
from kvplane_service.registry import Registration, Registry

from kvplane.base.session import SessionTransport
from kvplane_service.core.inspect import digest
from kvplane_service.inprocess import InProcessTransport
from tests.client.mini_engine import HYBRID


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
