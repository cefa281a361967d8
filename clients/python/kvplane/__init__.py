"""kvplane: the control plane of the KV cache of LLM inference engines, as an engine sees it.

    with kvplane.connect("127.0.0.1:7070") as client:
        client.register_replica("engine-0", spec)
        with client.session("engine-0") as session:
            answer = session.apply(part)

The public names are those of `kvplane.api`; asyncio programs find the same in `kvplane.aio`. They are loaded
when the first of them is used, so that who imports only the leaf `kvplane.base` does not wait for gRPC.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvplane.api import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        """A module of this package, or a name of the public face."""
        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module 'kvplane' has no attribute {name!r}")
        if find_spec(f"kvplane.{name}") is not None:
            return import_module(f"kvplane.{name}")
        value = globals()[name] = getattr(import_module("kvplane.api"), name)
        return value
