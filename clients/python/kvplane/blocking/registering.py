"""Registers the replica of an engine that starts, also if its pool or its tiers have another size than before."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from kvplane.base.errors import AlreadyExists, Unavailable
from kvplane.base.groups import Medium, ReplicaSpec
from kvplane.v1 import allocation_pb2
from kvplane.wire import decode_spec

if TYPE_CHECKING:
    from kvplane.blocking.client import Client

# No stream writes the replica.
_FREE = (
    allocation_pb2.REPLICA_STATE_IDLE,
    allocation_pb2.REPLICA_STATE_LAPSED,
    allocation_pb2.REPLICA_STATE_RECOVERING,
)
_log = logging.getLogger("kvplane.registering")


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a service also learns of an engine.

    Attributes:
        model_name: for operators.
        namespace: digest of what gives the bytes of its tiers their meaning, for replicas that read each other; b"" =
            no other reads them.
        num_ranks: ranks of the engine.
    """

    model_name: str = ""
    namespace: bytes = b""
    num_ranks: int = 1


def register_engine(client: Client, name: str, spec: ReplicaSpec, info: EngineInfo) -> None:
    """Register a replica. If it exists and only its number of blocks (and the watermark, a part of them) or its tiers
    differ, it is replaced: an engine that measures its free memory finds another number in each life, and its cache
    starts empty.

    The epoch of the description guards the removal: a session that opens meanwhile keeps the replica.

    Raises:
        AlreadyExists: a replica of this name has other settings, or workers.
        Unavailable: a session of the replica with the other number is open; try again when it has ended.
    """
    namespace = info.namespace or (name.encode() if spec.tiers else b"")
    known = {"num_ranks": info.num_ranks, "namespace_digest": namespace, "model_name": info.model_name}
    register = partial(client.register_replica, name, spec, **known)  # type: ignore[arg-type]
    try:
        register()
    except AlreadyExists:
        found = client.describe_replica(name)
        registered = decode_spec(found.spec)
        sizes = {"num_blocks": spec.num_blocks, "watermark_blocks": spec.watermark_blocks, "tiers": spec.tiers}
        has_workers = found.workers and spec.pool is Medium.DEVICE  # else they are of the engine's own processes
        if has_workers or replace(registered, **sizes).normalized != spec.normalized:  # type: ignore[arg-type]
            raise
        if found.state not in _FREE:
            raise Unavailable(
                f"a session of {name} with {registered.num_blocks} blocks is open, this engine has {spec.num_blocks}",
                field="replica",
                remedy="end the other engine, or give this one a name of its own",
            ) from None
        client.deregister_replica(name, found.epoch)
        register()
        _log.warning("%s had %d blocks and slots, and has %d now", name, registered.num_stamps, spec.num_stamps)
