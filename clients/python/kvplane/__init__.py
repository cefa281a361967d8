"""kvplane: the client of a control plane for the KV cache of LLM inference engines.

    with kvplane.connect("127.0.0.1:7070") as client:
        client.register_replica("engine-0", spec)
        with client.session("engine-0") as session:
            answer = session.apply(part)

The public names are those of `kvplane.api`; `kvplane.aio` has the same for asyncio. They are loaded on first use, so
that a program that imports only `kvplane.base` does not load gRPC.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvplane.api import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        """A module of this package, or a public name of `kvplane.api`."""
        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module 'kvplane' has no attribute {name!r}")
        if find_spec(f"kvplane.{name}") is not None:
            return import_module(f"kvplane.{name}")
        value = globals()[name] = getattr(import_module("kvplane.api"), name)
        return value
