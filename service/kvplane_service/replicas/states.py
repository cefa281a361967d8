"""The states of a replica, and a replica in its first epoch."""

from __future__ import annotations

from enum import Enum

from kvplane.base.groups import ReplicaSpec
from kvplane_core.face import loader
from kvplane_core.face.interface import ReplicaCore

FIRST_EPOCH = 1


class ReplicaState(Enum):
    """States of a replica: they decide whether the newest session, unary calls or no client may change it."""

    IDLE = "idle"  # no session: unary calls
    LIVE = "live"  # the session
    LAPSED = "lapsed"  # the session, whose lease expired or which lags; its entries are withdrawn from subscribers
    RECOVERING = "recovering"  # none: stored entries wait for the stamps of an engine
    OPENING = "opening"  # none: the engine life of a session is beginning
    DIVERGED = "diverged"  # the session of a mirror, whose state the service does not have


def new_replica(spec: ReplicaSpec) -> ReplicaCore:
    """Make a replica in its first epoch. May be called on a thread, since a large pool takes long to build."""
    replica = loader.new_replica(spec)
    replica.begin_epoch(FIRST_EPOCH)
    return replica
