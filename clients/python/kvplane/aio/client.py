"""The asyncio client: the methods of `kvplane.Client` as coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TypeVar, Unpack
from weakref import WeakSet

import grpc
import grpc.aio
from google.protobuf.message import Message

from kvplane import wire
from kvplane.aio.session import Session
from kvplane.aio.transport import GrpcTransport
from kvplane.base.errors import FailedPrecondition, InvalidArgument, KvplaneError, Unavailable
from kvplane.base.events import EventBatch
from kvplane.base.groups import ReplicaSpec
from kvplane.base.requests import HERE, Allocate, At, Commit, Content, Ending
from kvplane.base.sources import LayerSource, ModelSource
from kvplane.rpc.access import Access, Tls, Token
from kvplane.rpc.channel import MAX_MESSAGE_BYTES, open_aio_channel
from kvplane.rpc.status import error_of_rpc
from kvplane.sansio.driver import Pause, drive_async
from kvplane.sansio.owners import Owners
from kvplane.sansio.retry import RetryPolicy
from kvplane.sansio.tracing import trace_metadata
from kvplane.session.options import SessionOptions, first_request, revival_of, timeouts
from kvplane.session.reopening import Revival
from kvplane.unary import calls
from kvplane.unary.calls import Call
from kvplane.unary.retrying import TIMEOUT_S, UNARY_RETRY, Ask, asked
from kvplane.unary.subscription import Feed
from kvplane.v1 import admin_pb2, allocation_pb2, events_pb2_grpc

Answer = TypeVar("Answer", bound=Message)


def connect(
    address: str,
    *,
    tls: Tls | None = None,
    token: Token = "",
    timeout_s: float = TIMEOUT_S,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    retry: RetryPolicy = UNARY_RETRY,
) -> Client:
    """Return a client of the service at `address`. Call it while the event loop runs. See `kvplane.connect`."""
    reach = partial(open_aio_channel, access=Access(tls, token), max_message_bytes=max_message_bytes)
    owners = Owners.at(address, reach)
    return Client(owners, timeout_s=timeout_s, max_message_bytes=max_message_bytes, retry=retry)


class Client:
    """A client of one service, over a gRPC channel that the client itself closes. Its methods behave as the methods of
    the same name of `kvplane.Client`.

    The argument `pause` is a coroutine function that waits for a number of seconds; it replaces `retry.sleep`.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel | Owners[grpc.aio.Channel],
        *,
        timeout_s: float = TIMEOUT_S,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        retry: RetryPolicy = UNARY_RETRY,
        pause: Callable[[float], Awaitable[None]] | None = None,
        reach: Callable[[str], grpc.aio.Channel] | None = None,
    ) -> None:
        self._owners = channel if isinstance(channel, Owners) else Owners(channel, reach)
        self._transports: WeakSet[GrpcTransport] = WeakSet()
        self._closed = False
        self._timeout_s = timeout_s
        self._max_message_bytes = max_message_bytes
        self._retry = retry
        self._pause = pause

    async def close(self) -> None:
        """Close the gRPC channels. This ends every open session and every subscription of the client."""
        self._closed = True
        for transport in self._transports:  # grpc.aio leaves them open when it closes a channel
            transport.abort()
        for channel in self._owners.close():
            await channel.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def register_replica(
        self,
        replica: str,
        source: ReplicaSpec | ModelSource | LayerSource,
        *,
        num_ranks: int = 1,
        namespace_digest: bytes = b"",
    ) -> allocation_pb2.RegisterReplicaResponse:
        """Create a replica on the service; see `kvplane.Client.register_replica`."""
        answer = await self._do(calls.register_replica(replica, source, num_ranks, namespace_digest))
        calls.check_policy(source, answer)
        return answer

    async def deregister_replica(self, replica: str, epoch: int | None = None) -> None:
        """Remove a replica. If `epoch` is given and differs from the replica's current epoch, the service refuses."""
        await self._do(calls.deregister_replica(replica, epoch))

    async def describe_replica(self, replica: str) -> allocation_pb2.DescribeReplicaResponse:
        """Return the state and the counters of a replica."""
        return await self._do(calls.describe_replica(replica))

    async def list_replicas(self, page_size: int = 100) -> AsyncIterator[allocation_pb2.ReplicaSummary]:
        """Yield a summary of every replica, ordered by name. The client requests `page_size` summaries at a time, on
        demand.
        """
        token = ""
        while True:
            page = await self._do(calls.list_replicas(page_size, token))
            for summary in page.replicas:
                yield summary
            token = page.next_page_token
            if not token:
                return

    async def session(
        self, replica: str, revive: Callable[[], Revival] | None = None, **options: Unpack[SessionOptions]
    ) -> Session:
        """Open a session; see `kvplane.Client.session`."""
        self._require_open()
        request = first_request(replica, revive, options)
        if options.get("session_socket"):
            raise InvalidArgument(
                "the asyncio client has no session socket",
                field="session_socket",
                remedy="omit it, or use kvplane.connect in a thread",
            )
        open_s, step_s = timeouts(options)
        transport = GrpcTransport(self._owners, open_s, self._max_message_bytes, step_s)
        self._transports.add(transport)
        session = Session(
            transport, request, retry=options.get("retry"), pause=self._pause, revive=revival_of(revive, options)
        )
        return await session.open()

    async def lasting_session(
        self, replica: str, revive: Callable[[], Revival], **options: Unpack[SessionOptions]
    ) -> Session:
        """Open a session that survives a restart of the service. `session` with the argument `revive` replaces this
        method.
        """
        return await self.session(replica, revive, **options)

    async def find_cache_hit(
        self, replica: str, what: Content | str, *, with_blocks: bool = False
    ) -> allocation_pb2.FindCacheHitResponse:
        """Return how many leading tokens of a prompt, or of a request that the service knows, are cached. Changes no
        state, not even LRU order.
        """
        return await self._do(calls.find_cache_hit(replica, what, with_blocks))

    async def allocate_slots(
        self, replica: str, request: Allocate, at: At = HERE
    ) -> allocation_pb2.AllocateSlotsResponse:
        """Allocate KV cache blocks for the next tokens of a request."""
        return await self._do(calls.allocate_slots(replica, request, at))

    async def commit_blocks(self, replica: str, commit: Commit, at: At = HERE) -> allocation_pb2.CommitBlocksResponse:
        """Append tokens to a request and register full blocks in the prefix cache."""
        return await self._do(calls.commit_blocks(replica, commit, at))

    async def free(
        self, replica: str, request_id: str, ending: Ending = Ending.FREE, *, fence_seq: int = 0, at: At = HERE
    ) -> allocation_pb2.FreeResponse:
        """End or preempt a request. Its blocks return to the pool once the step with number `fence_seq` is executed; 0
        = immediately.
        """
        return await self._do(calls.free(replica, request_id, ending, fence_seq, at))

    async def evict_blocks(
        self, replica: str, block_ids: Sequence[int], at: At = HERE
    ) -> allocation_pb2.EvictBlocksResponse:
        """Remove the prefix cache keys of the given blocks, in this order, so that no later request has a cache hit on
        these blocks.
        """
        return await self._do(calls.evict_blocks(replica, block_ids, at))

    async def prefetch(
        self, replica: str, content: Content, *, within_s: float = 0.0, at: At = HERE
    ) -> allocation_pb2.PrefetchResponse:
        """Copy what only the disk has of a prompt's longest hit to the host tier, for a request that will come. It is
        left out if it would take longer than `within_s` seconds; 0 = at any time.
        """
        return await self._do(calls.prefetch(replica, content, within_s, at))

    async def retain(
        self, replica: str, content: Content, *, ttl_s: float, priority: int = 0, at: At = HERE
    ) -> allocation_pb2.RetainResponse:
        """Let the blocks of a cached prefix be evicted after all that are not retained, for `ttl_s` seconds, 7 days at
        most; those of lower `priority` (0 to 100) first. Nothing is held. 0 seconds release the prefix.
        """
        return await self._do(calls.retain(replica, content, ttl_s, priority, at))

    async def reset_prefix_cache(self, replica: str, at: At = HERE) -> allocation_pb2.ResetPrefixCacheResponse:
        """Remove every key of the prefix cache. Does nothing while a request holds a block; the answer states whether
        the keys were removed.
        """
        return await self._do(calls.reset_prefix_cache(replica, at))

    async def snapshot(self, replica: str, *, summary: bool = False) -> admin_pb2.SnapshotResponse:
        """Check the invariants of the replica's allocator and return its state; with `summary`, only the state's digest
        and counts.
        """
        return await self._do(calls.snapshot(replica, summary))

    async def status(self) -> admin_pb2.StatusResponse:
        """Return the version of the service, its replicas and the state of its telemetry."""
        return await self._do(calls.status())

    async def drain(self) -> None:
        """Ask the service to drain: it finishes the running calls and exits, as after SIGTERM. This call returns before
        the service has exited.
        """
        await self._do(calls.drain())

    async def list_requests(self, replica: str, limit: int = 0) -> admin_pb2.ListRequestsResponse:
        """Return the requests of a replica that hold the most blocks, at most `limit` (0 = 100)."""
        return await self._do(calls.list_requests(replica, limit))

    async def explain(self, replica: str, what: Content | str | int) -> admin_pb2.ExplainResponse:
        """Explain how many leading tokens of a prompt would be a cache hit now, or how many were a hit when the given
        request was admitted.
        """
        return await self._do(calls.explain(replica, what))

    async def subscribe(
        self, replica: str, after_seq: int | None = None, *, entries: bool = False, digest_period_s: int = 0
    ) -> AsyncIterator[EventBatch]:
        """Yield the batches of cache events of a replica; see `kvplane.Client.subscribe`."""
        feed = Feed(self._owners, self._retry, after_seq)
        while True:
            self._require_open()
            request = calls.subscription(replica, feed.seek(), entries, digest_period_s)
            stream = events_pb2_grpc.EventsStub(feed.channel).Subscribe(request)
            failed: KvplaneError = Unavailable("the service ended the stream")
            try:
                async for message in stream:
                    yield feed.take(wire.decode_batch(message))
            except grpc.aio.AioRpcError as outcome:
                failed = error_of_rpc(outcome)
            finally:
                stream.cancel()
            await self._wait(feed.broken(failed))

    async def _do(self, call: Call[Answer]) -> Answer:
        self._require_open()
        return await drive_async(asked(self._owners, call, self._retry), self._act)

    async def _act(self, action: Ask[grpc.aio.Channel] | Pause) -> object:
        if isinstance(action, Pause):
            await self._wait(action.seconds)
            return None
        call = action.call
        method = action.channel.unary_unary(
            call.path,
            request_serializer=type(call.request).SerializeToString,
            response_deserializer=call.answer_type.FromString,
        )
        try:
            timeout_s = call.timeout_s or self._timeout_s
            return await method(call.request, timeout=timeout_s, metadata=trace_metadata())
        except grpc.aio.AioRpcError as outcome:
            raise error_of_rpc(outcome) from None

    async def _wait(self, seconds: float) -> None:
        await (self._pause or asyncio.sleep)(seconds)

    def _require_open(self) -> None:
        if self._closed:
            raise FailedPrecondition("the client is closed", remedy="connect again")
