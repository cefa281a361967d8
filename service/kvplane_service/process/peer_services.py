"""Follows other services: what the replicas there hold in host memory, those here may load.

One stream for each namespace that has a reader here, to each service of `peer_services`. While a stream is broken, or
silent for SILENT_S, the replicas of that service are no peers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from kvplane import wire
from kvplane.base.errors import InvalidArgument, KvplaneError, Unavailable
from kvplane.rpc.access import Access, Tls
from kvplane.rpc.channel import open_aio_channel
from kvplane.rpc.status import error_of_rpc
from kvplane.v1 import plan_pb2 as pb
from kvplane.v1.plan_pb2_grpc import WorkersStub
from kvplane_service.config import Config
from kvplane_service.registry import Registry
from kvplane_service.replicas.peer_watch import SILENT_S
from kvplane_service.replicas.peers import Namespace

if TYPE_CHECKING:
    from kvplane.v1.plan_pb2_grpc import WorkersAsyncStub

LOOK_S = 0.5  # between two looks for namespaces that have got or lost their readers
RETRY_S = 1.0
FORGET_S = 60.0  # that a stream lasts, after which an earlier problem with it is over

_log = logging.getLogger(__name__)


def access_of(config: Config) -> Access:
    """Return TLS and token of the calls to other services."""
    cert, key = (config.tls_cert, config.tls_key) if config.tls_client_auth == "require" else ("", "")
    tls = Tls(config.peer_services_ca, cert, key) if config.peer_services_ca else None
    return Access(tls, Path(config.peer_services_token) if config.peer_services_token else "")


class PeerServices:
    """The services that are followed."""

    def __init__(self, registry: Registry, config: Config) -> None:
        """Raise InvalidArgument if a token would cross the network in plain text."""
        self._registry, self._access = registry, access_of(config)
        self._addresses = tuple(dict.fromkeys(one for one in config.peer_services.replace(" ", "").split(",") if one))
        for address in self._addresses:
            try:
                self._access.check(address)
            except InvalidArgument as error:
                raise InvalidArgument(error.message, field="peer_services_ca", remedy="set peer_services_ca") from None
            registry.peer_services[address] = False

    def __bool__(self) -> bool:
        return bool(self._addresses)

    async def run(self) -> None:
        """Follow all services until the task is cancelled."""
        async with asyncio.TaskGroup() as group:
            for address in self._addresses:
                group.create_task(self._follow_service(address))

    async def _follow_service(self, address: str) -> None:
        """Follow every namespace that has a reader here, each by a stream of its own."""
        streams = dict[bytes, asyncio.Task[None]]()
        link = _Link(self._registry, self._access, address)
        async with asyncio.TaskGroup() as group:
            while True:
                wanted = {digest for digest, one in self._registry.namespaces.items() if one.has_readers}
                for digest in streams.keys() - wanted:
                    streams.pop(digest).cancel()
                for digest in wanted - streams.keys():
                    streams[digest] = group.create_task(link.follow(digest))
                await asyncio.sleep(LOOK_S)


class _Link:
    """The streams from one service, and the last problem with it."""

    def __init__(self, registry: Registry, access: Access, address: str) -> None:
        self._registry, self._access, self._address = registry, access, address
        self._problem, self._num_open = "", 0

    async def follow(self, digest: bytes) -> None:
        """Follow one namespace; try again while the service does not answer, or says what cannot be."""
        while True:
            namespace = self._registry.namespaces.get(digest)
            if namespace is not None and namespace.has_readers:
                try:
                    await self._follow(digest, namespace)
                except grpc.aio.AioRpcError as error:
                    self._log(error_of_rpc(error))
                except KvplaneError as error:
                    self._log(error)
                finally:
                    namespace.forget(self._address)
            await asyncio.sleep(RETRY_S)

    async def _follow(self, digest: bytes, namespace: Namespace) -> None:
        channel = open_aio_channel(self._address, self._access)
        try:
            await self._take(WorkersStub(channel), digest, namespace)
        finally:
            await channel.close()

    async def _take(self, stub: WorkersAsyncStub, digest: bytes, namespace: Namespace) -> None:
        """Apply what the service says, until the stream ends or the namespace here is another one."""
        stream = aiter(stub.WatchPeers(pb.WatchPeersRequest(namespace=digest)))
        if await _next(stream) is None:
            return
        self._count(1)
        began_s = time.monotonic()
        try:
            while (message := await _next(stream)) is not None:
                if self._registry.namespaces.get(digest) is not namespace:
                    return
                if message.ByteSize():  # else it only says that the service answers
                    namespace.apply(self._address, wire.decode_news(message, namespace.digest_size))
        finally:
            self._count(-1)
            if time.monotonic() - began_s > FORGET_S:
                self._problem = ""  # the next one is logged, also if it is equal

    def _count(self, change: int) -> None:
        """Count the open streams."""
        self._num_open += change
        self._registry.peer_services[self._address] = self._num_open > 0

    def _log(self, error: KvplaneError) -> None:
        """Log a problem once, not at each try."""
        problem = f"{error.reason}: {error}"
        if problem != self._problem:
            _log.warning("the peers of %s are not known: %s", self._address, error)
        self._problem = problem


async def _next(stream: AsyncIterator[pb.WatchPeersResponse]) -> pb.WatchPeersResponse | None:
    """Return the next message, None at the end. Raises Unavailable if none comes for SILENT_S."""
    try:
        async with asyncio.timeout(SILENT_S):
            return await anext(stream, None)
    except TimeoutError:
        raise Unavailable(f"nothing was said for {SILENT_S:.0f} s", remedy="see whether that service hangs") from None
