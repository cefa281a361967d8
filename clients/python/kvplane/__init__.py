"""kvplane: the client of the service that manages the KV cache blocks of LLM inference engines.

    with kvplane.connect("127.0.0.1:7070") as client:
        client.register_replica("engine-0", spec)
        with client.session("engine-0") as session:
            answer = session.apply(part)

`kvplane.api` lists the public names, and `kvplane.aio` has the same client for asyncio. A public name is imported when
it is first used, so that a program that imports only `kvplane.base` does not load gRPC.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvplane.api import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        """Import and return a module of this package, or a public name of `kvplane.api`, on first use."""
        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module 'kvplane' has no attribute {name!r}")
        if find_spec(f"kvplane.{name}") is not None:
            return import_module(f"kvplane.{name}")
        value = globals()[name] = getattr(import_module("kvplane.api"), name)
        return value
