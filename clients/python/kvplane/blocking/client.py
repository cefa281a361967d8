"""The blocking client: replicas, sessions, events, and unary calls.

Every call has a deadline. A call that may be repeated without harm is retried while the service is unreachable. Only
`deregister_replica` may not be repeated; calls that change a replica carry an op_id, by which the service detects a
repetition.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Self, Unpack, cast

import grpc

from kvplane import wire
from kvplane.base.errors import FailedPrecondition, KvplaneError, Unavailable
from kvplane.base.events import EventBatch
from kvplane.blocking import collected
from kvplane.blocking.session import Session
from kvplane.blocking.transport import GrpcTransport
from kvplane.blocking.ttrpc import SessionSocket
from kvplane.blocking.unary import Answer, UnaryCalls
from kvplane.rpc.access import Access, Tls, Token, access_of
from kvplane.rpc.channel import MAX_MESSAGE_BYTES, open_channel
from kvplane.rpc.status import RpcOutcome, error_of_rpc
from kvplane.sansio.driver import Pause, drive
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
    """Return a client of the service at `address`. The client connects with its first call.

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
    reach = partial(open_channel, access=Access(tls, token), max_message_bytes=max_message_bytes)
    owners = Owners.at(address, reach)
    return Client(owners, timeout_s=timeout_s, max_message_bytes=max_message_bytes, retry=retry)


class Client(UnaryCalls):
    """A client of one service, over a gRPC channel that the client itself closes. Thread-safe.

    Answers are protobuf messages of `kvplane.v1`. Every call may raise KvplaneError: the service's refusal, Unavailable
    if the service is unreachable, or DeadlineExceeded if the deadline passes.
    """

    def __init__(
        self,
        channel: grpc.Channel | Owners[grpc.Channel],
        *,
        timeout_s: float = TIMEOUT_S,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        retry: RetryPolicy = UNARY_RETRY,
        reach: Callable[[str], grpc.Channel] | None = None,
    ) -> None:
        """Create a client on a gRPC channel. `reach` is a function that opens a channel to an address.

        With `reach`, the client follows the redirections of a service to the owner of a replica. An `Owners` has its
        own function for that.
        """
        self._owners = channel if isinstance(channel, Owners) else Owners(channel, reach)
        self._closed = False
        self._timeout_s = timeout_s
        self._max_message_bytes = max_message_bytes
        self._retry = retry

    def close(self) -> None:
        """Close the gRPC channels. This ends every open session and every subscription of the client."""
        self._closed = True
        for channel in self._owners.close():
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def session(
        self, replica: str, revive: Callable[[], Revival] | None = None, **options: Unpack[SessionOptions]
    ) -> Session:
        """Open a session, which survives broken streams; see Session and SessionOptions.

        Args:
            replica: name of the replica.
            revive: a function that returns the engine's requests and its page memory; called now and after each restart
                of the service; see Revival. With the stamps of the page memory (the version numbers of the pages'
                contents), prefixes that were cached before a restart are hits after the restart. None: the session
                records the requests itself; after a restart they are preempted and the prefix cache is empty (where
                this is impossible, see KnownRequests, the session ends).
            options: see SessionOptions.
        """
        self._require_open()
        request = first_request(replica, revive, options)
        open_s, step_s = timeouts(options)
        path, access = options.get("session_socket", ""), access_of(self._owners.first)
        local = SessionSocket(path, access, self._max_message_bytes) if path else None
        transport = GrpcTransport(self._owners, open_s, self._max_message_bytes, step_s, local)
        return Session(transport, request, retry=options.get("retry"), revive=revival_of(revive, options))

    def lasting_session(
        self, replica: str, revive: Callable[[], Revival], **options: Unpack[SessionOptions]
    ) -> Session:
        """Open a session that survives a restart of the service. `session` with the argument `revive` replaces this
        method.
        """
        return self.session(replica, revive, **options)

    def subscribe(
        self, replica: str, after_seq: int | None = None, *, entries: bool = False, digest_period_s: int = 0
    ) -> Iterator[EventBatch]:
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
        collected.prepare()
        while True:
            self._require_open()
            request = calls.subscription(replica, feed.seek(), entries, digest_period_s)
            stream = events_pb2_grpc.EventsStub(feed.channel).Subscribe(request)
            failed: KvplaneError = Unavailable("the service ended the stream")
            try:
                for message in stream:
                    yield feed.take(wire.decode_batch(message))
            except grpc.RpcError:
                failed = error_of_rpc(stream)
            finally:  # also when the generator is garbage collected
                collected.cancel_later(stream)
            self._wait(feed.broken(failed))

    def _do(self, call: Call[Answer]) -> Answer:
        self._require_open()
        return drive(asked(self._owners, call, self._retry), self._act)

    def _act(self, action: Ask[grpc.Channel] | Pause) -> object:
        if isinstance(action, Pause):
            self._wait(action.seconds)
            return None
        call = action.call
        method = action.channel.unary_unary(
            call.path,
            request_serializer=type(call.request).SerializeToString,
            response_deserializer=call.answer_type.FromString,
        )
        try:
            timeout_s = call.timeout_s or self._timeout_s
            return method(call.request, timeout=timeout_s, metadata=trace_metadata())
        except grpc.RpcError as outcome:
            raise error_of_rpc(cast(RpcOutcome, outcome)) from None

    def _wait(self, seconds: float) -> None:
        (self._retry.sleep or time.sleep)(seconds)

    def _require_open(self) -> None:
        # Checked here because gRPC 1.71 crashes the process when a stub is created on a closed channel.
        if self._closed:
            raise FailedPrecondition("the client is closed", remedy="connect again")
