"""A service with authentication, and clients of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from kvplane.rpc.access import Access, Tls
from kvplane.rpc.channel import open_channel
from kvplane.v1 import events_pb2_grpc
from kvplane.v1.admin_pb2_grpc import AdminStub
from kvplane.v1.allocation_pb2_grpc import AllocationStub
from kvplane_service.auth.tokens import line_of
from kvplane_service.config import Config
from tests.service.rig import Service, running

OWNERS: dict[str, dict[str, Any]] = {
    "acme": {"replicas": ["r", "acme/*"], "domains": ["", "gold", "acme-*"]},
    "rival": {"domains": [""]},
    "operator": {"scopes": ["read", "events", "admin"], "every_replica": True},
}


def replace(path: Path, text: str) -> None:
    """Replace a file in one step, as docs/operating/access.md asks: a service that polls it never reads a part."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)


class Guard:
    """The files of who may call, in a folder. A token of each owner is `token-OWNER`."""

    def __init__(self, folder: Path, owners: dict[str, dict[str, Any]] | None = None) -> None:
        self.owners_file, self.tokens_file, self.audit_file = folder / "owners", folder / "tokens", folder / "audit"
        self.write_owners(owners or OWNERS)
        self.write_tokens(*(owners or OWNERS))

    def write_owners(self, owners: dict[str, dict[str, Any]]) -> None:
        replace(self.owners_file, yaml.safe_dump(owners))

    def write_tokens(self, *names: str) -> None:
        replace(self.tokens_file, "".join(f"{line_of(f'token-{name}', name)}\n" for name in names))

    def config(self, **more: Any) -> Config:
        files = {"auth_owners": str(self.owners_file), "auth_tokens": str(self.tokens_file)}
        return Config(**{"listen": "127.0.0.1:0", "audit_log": str(self.audit_file), **files, **more})


class Caller(Service):
    """The service as seen with a token."""

    def __init__(self, service: Service, token: str, tls: Tls | None = None) -> None:
        super().__init__(service.app, service.address, service.loop)
        self.channel.close()
        self.channel = open_channel(service.address, Access(tls, token))
        self.allocation = AllocationStub(self.channel)
        self.events = events_pb2_grpc.EventsStub(self.channel)
        self.admin = AdminStub(self.channel)


class World:
    """A guarded service and its callers."""

    def __init__(self, service: Service, guard: Guard) -> None:
        self.service = service
        self.guard = guard
        self.acme, self.rival, self.operator = (Caller(service, f"token-{name}") for name in OWNERS)

    def close(self) -> None:
        for caller in (self.acme, self.rival, self.operator):
            caller.channel.close()


@contextmanager
def guarded(folder: Path, clock: Callable[[], int] | None = None, **more: Any) -> Iterator[World]:
    """A service with the owners above."""
    guard = Guard(folder)
    with running(guard.config(**more), clock) as service:
        world = World(service, guard)
        try:
            yield world
        finally:
            world.close()
