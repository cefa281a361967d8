"""How a worker reads the host tiers of peers, and lends its own."""

from __future__ import annotations

from enum import Enum


class PeerTransport(Enum):
    """The ways of a worker. The value is the name on the command line."""

    SHARED_MEMORY = "shared-memory"  # of peers on this host
    NIXL = "nixl"  # of peers on other hosts too, over the network; they can read this one
    NIXL_ONLY = "nixl-only"  # also of peers on this host
