"""The asyncio client: the methods of `kvplane.Client` as coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Unpack
from weakref import WeakSet

import grpc
import grpc.aio

from kvplane import wire
from kvplane.aio.session import Session
from kvplane.aio.transport import GrpcTransport
from kvplane.aio.unary import Answer, UnaryCalls
from kvplane.base.errors import FailedPrecondition, InvalidArgument, KvplaneError, Unavailable
from kvplane.base.events import EventBatch
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
from kvplane.v1 import events_pb2_grpc


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


class Client(UnaryCalls):
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
