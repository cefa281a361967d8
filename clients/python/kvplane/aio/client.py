"""The client of a service: replicas, sessions, events, and unary calls, as coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Self, Unpack, cast

import grpc
import grpc.aio

from kvplane import wire
from kvplane.aio.opening import Sessions, ending
from kvplane.aio.session import Session
from kvplane.aio.unary import UnaryCalls
from kvplane.base.errors import FailedPrecondition, KvplaneError, Unavailable
from kvplane.base.events import EventBatch
from kvplane.base.trace import trace_metadata
from kvplane.rpc.access import Access, Tls, Token
from kvplane.rpc.channel import MAX_MESSAGE_BYTES, open_aio_channel
from kvplane.rpc.status import RpcOutcome, error_of_rpc
from kvplane.sansio.driver import Pause, drive_async
from kvplane.sansio.owners import Owners
from kvplane.sansio.retry import RetryPolicy
from kvplane.session.options import SessionOptions
from kvplane.session.reopening import Revival
from kvplane.unary import calls
from kvplane.unary.calls import Answer, Call
from kvplane.unary.retrying import TIMEOUT_S, UNARY_RETRY, Ask, asked
from kvplane.unary.subscription import Feed
from kvplane.v1 import allocation_pb2, events_pb2_grpc


def connect(
    address: str,
    *,
    tls: Tls | None = None,
    token: Token = "",
    timeout_s: float = TIMEOUT_S,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    retry: RetryPolicy = UNARY_RETRY,
) -> Client:
    """Return a client of the service at `address`. Call it while the event loop runs.

    Args:
        address: "host:port", "dns:///host:port" or "unix:/path"; or several of them, separated by commas. If a service
            is unreachable or drains, the client uses the next service, which redirects the client to the owner of a
            replica. Redirections are followed to the hosts of the list, and to hosts below a suffix that the list ends
            with: "kvplane:7070,*.kvplane-headless".
        tls: certificates; None = plain text.
        token: text that identifies the client; a Path names a file with that text, which is read for each call.
            Requires TLS, except for a service on this machine.
        timeout_s: deadline of each unary call, in seconds.
        max_message_bytes: largest message that is sent or received, in bytes.
        retry: how unary calls are retried while the service is unreachable.

    Raises:
        InvalidArgument: the address, a TLS file or the token is malformed.
        NotFound: a TLS file or the token's file cannot be read.
    """
    reach = partial(open_aio_channel, access=Access(tls, token), max_message_bytes=max_message_bytes)
    owners = Owners.at(address, reach)
    return Client(owners, timeout_s=timeout_s, max_message_bytes=max_message_bytes, retry=retry)


class Client(UnaryCalls):
    """A client of one service, over a gRPC channel that the client itself closes. One event loop may use it.

    Every call has a deadline. A call that may be repeated without harm is retried while the service is unreachable.
    Only `deregister_replica` may not be repeated; calls that change a replica carry an op_id, by which the service
    detects a repetition.

    Answers are protobuf messages of `kvplane.v1`. Every call may raise KvplaneError: the service's refusal, Unavailable
    if the service is unreachable, or DeadlineExceeded if the deadline passes.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel | Owners[grpc.aio.Channel],
        *,
        timeout_s: float = TIMEOUT_S,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        retry: RetryPolicy = UNARY_RETRY,
        pause: Callable[[float], Awaitable[object]] | None = None,
        reach: Callable[[str], grpc.aio.Channel] | None = None,
    ) -> None:
        """Create a client on a gRPC channel. `reach` is a function that opens a channel to an address.

        With `reach`, the client follows the redirections of a service to the owner of a replica. An `Owners` has its
        own function for that. `pause` is a coroutine function that waits for a number of seconds, instead of
        `retry.sleep`.
        """
        self._owners = channel if isinstance(channel, Owners) else Owners(channel, reach)
        self._sessions = Sessions(self._owners, max_message_bytes, pause)
        self._closed = False
        self._timeout_s = timeout_s
        self._retry = retry
        self._wait = pause or asyncio.sleep

    async def close(self) -> None:
        """Close the gRPC channels. This ends every open session and every subscription of the client."""
        self._closed = True
        self._sessions.abort()
        for channel in self._owners.close():
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def session(
        self, replica: str, revive: Callable[[], Revival] | None = None, **options: Unpack[SessionOptions]
    ) -> Session:
        """Open a session, which survives broken streams; see Session and SessionOptions.

        Args:
            replica: name of the replica.
            revive: a function that returns the engine's requests and its page memory; called now and after each restart
                of the service; see Revival. With the stamps of the page memory, prefixes that were cached before a
                restart are hits after the restart. None: the session records the requests itself; after a restart they
                are preempted and the prefix cache is empty (where this is impossible, see KnownRequests, the session
                ends).
            options: see SessionOptions.
        """
        self._require_open()
        return await self._sessions.open(replica, revive, options)

    async def lasting_session(
        self, replica: str, revive: Callable[[], Revival], **options: Unpack[SessionOptions]
    ) -> Session:
        """Open a session that survives a restart of the service. `session` with the argument `revive` replaces this
        method.
        """
        return await self.session(replica, revive, **options)

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

    async def subscribe(
        self, replica: str, after_seq: int | None = None, *, entries: bool = False, digest_period_s: int = 0
    ) -> AsyncIterator[EventBatch]:
        """Yield the batches of cache events of a replica, without end. Close the iterator to unsubscribe.

        After a broken stream, the subscription continues after the last batch that was received. If batches were lost,
        because the service no longer has them or another service took over, the next batch has `gap` set.

        Args:
            replica: name of the replica.
            after_seq: number of the last batch that the caller has; None = only batches from now on; 0 = all batches
                that the service still has.
            entries: where a gap would be, begin with what the replica has: a batch with `gap`, then batches with seq 0
                that store its published keys, until one has another number.
            digest_period_s: seconds between batches with `digests`; 0 = none.
        """
        feed = Feed(self._owners, self._retry, after_seq)
        while True:
            self._require_open()
            request = calls.subscription(replica, feed.seek(), entries, digest_period_s)
            stream = events_pb2_grpc.EventsStub(feed.channel).Subscribe(request)
            failed: KvplaneError = Unavailable("the service ended the stream")
            with ending(stream):
                try:
                    async for message in stream:
                        yield feed.take(wire.decode_batch(message))
                except grpc.RpcError as outcome:
                    failed = error_of_rpc(cast(RpcOutcome, outcome))
            await self._wait(feed.broken(failed))

    async def _do(self, call: Call[Answer]) -> Answer:
        self._require_open()
        return await drive_async(asked(self._owners, call, self._retry), self._act)

    async def _act(self, action: Ask[grpc.aio.Channel] | Pause) -> object:
        if isinstance(action, Pause):
            return await self._wait(action.seconds)
        call = action.call
        method = action.channel.unary_unary(
            call.path,
            request_serializer=type(call.request).SerializeToString,
            response_deserializer=call.answer_type.FromString,
        )
        try:
            timeout_s = call.timeout_s or self._timeout_s
            return await method(call.request, timeout=timeout_s, metadata=trace_metadata())
        except grpc.RpcError as outcome:
            raise error_of_rpc(cast(RpcOutcome, outcome)) from None

    def _require_open(self) -> None:
        # Checked here because gRPC 1.71 crashes the process when a stub is created on a closed channel.
        if self._closed:
            raise FailedPrecondition("the client is closed", remedy="connect again")
