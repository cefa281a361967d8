"""The Workers service (plan.proto)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import nullcontext

from google.protobuf.message import Message

from kvplane import wire
from kvplane.base.errors import InvalidArgument
from kvplane.base.worker import Renewal
from kvplane.v1 import plan_pb2 as pb
from kvplane_service.auth.visible import VisibleReplicas
from kvplane_service.registry import NAMESPACE_BYTES
from kvplane_service.replicas.peer_watch import BEAT_S, LOOK_S, PeerWatch


class WorkersServicer:
    """Registers workers (the processes that hold the pages of a rank), renews the leases of workers, and removes
    workers.
    """

    def __init__(self, registry: VisibleReplicas) -> None:
        self._registry = registry

    async def RegisterWorker(self, request: pb.RegisterWorkerRequest, _: bytes) -> Message:  # noqa: N802
        """Register the worker of one rank of a replica, and return the worker's assignment: memory layout and lease."""
        entry, worker = self._registry.get(request.replica), wire.decode_worker(request.worker)
        assignment = entry.workers.register(worker)
        entry.host.observe_owner_epoch(worker.owner_epoch)
        return wire.encode_assignment(assignment)

    async def RenewWorker(self, request: pb.RenewWorkerRequest, _: bytes) -> Message:  # noqa: N802
        """Renew the lease of a registered worker."""
        entry, worker = self._registry.get(request.replica), wire.decode_worker(request.worker)
        entry.workers.renew(worker)
        entry.host.observe_owner_epoch(worker.owner_epoch)
        peers = entry.namespace.arenas(entry.host.name, worker.rank) if entry.namespace is not None else ()
        return wire.encode_renewal(Renewal(entry.workers.lease_ms, tuple(peers)))

    async def DeregisterWorker(self, request: pb.DeregisterWorkerRequest, _: bytes) -> Message:  # noqa: N802
        """Remove a worker from its replica."""
        self._registry.get(request.replica).workers.leave(request.worker_id)
        return pb.DeregisterWorkerResponse()

    async def WatchPeers(self, request: pb.WatchPeersRequest) -> AsyncGenerator[Message]:  # noqa: N802
        """Stream what the host tiers of the replicas of a namespace hold, to another service. The first message is
        empty, and one every BEAT_S: they say that the service answers.
        """
        if len(request.namespace) != NAMESPACE_BYTES:
            remedy = f"give the {NAMESPACE_BYTES} bytes of RegisterWorkerResponse.namespace"
            raise InvalidArgument(f"{len(request.namespace)} bytes", field="namespace", remedy=remedy)
        yield pb.WatchPeersResponse()
        sent, beat_s = PeerWatch(), time.monotonic()
        while True:
            namespace = self._registry.namespace(request.namespace)
            with namespace.watched(sent) if namespace is not None else nullcontext():
                while namespace is self._registry.namespace(request.namespace):
                    for news in namespace.news(sent) if namespace is not None else sent.news({}):
                        yield wire.encode_news(news)
                    if time.monotonic() - beat_s > BEAT_S:
                        beat_s = time.monotonic()
                        yield pb.WatchPeersResponse()
                    await asyncio.sleep(LOOK_S)
