"""The blocking client: replicas, sessions, events, and unary calls.

Every call has a deadline. All calls but `deregister_replica` are idempotent (mutations carry an op_id) and are retried
when the service is unreachable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Self, TypeVar, Unpack, cast

import grpc
from google.protobuf.message import Message

from kvplane import wire
from kvplane.base.errors import FailedPrecondition, KvplaneError, Unavailable
from kvplane.base.events import EventBatch
from kvplane.base.groups import ReplicaSpec
from kvplane.base.requests import HERE, Allocate, At, Commit, Content, Ending
from kvplane.base.sources import LayerSource, ModelSource
from kvplane.blocking.session import Session
from kvplane.blocking.transport import GrpcTransport
from kvplane.rpc.access import Access, Tls, Token
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
    """A client of the service at an address. Connects with its first call.

    Args:
        address: "host:port", "dns:///host:port" or "unix:/path"; or several, separated by commas: when a service is
            unreachable or drains, the client uses the next one, which redirects it to the owner of a replica.
        tls: None = plain text.
        token: identifies the client; a Path names a file that is read for each call. Requires TLS, except to this
            machine.
        timeout_s: deadline of each unary call, in seconds.
        max_message_bytes: largest message, in each direction.
        retry: of unary calls, when the service is unreachable.

    Raises:
        InvalidArgument, NotFound: unusable address, TLS files or token.
    """
    reach = partial(open_channel, access=Access(tls, token), max_message_bytes=max_message_bytes)
    owners = Owners.at(address, reach)
    return Client(owners, timeout_s=timeout_s, max_message_bytes=max_message_bytes, retry=retry)


class Client:
    """A client of the service behind a channel, which the client closes. Thread-safe.

    Answers are protobuf messages of `kvplane.v1`. Every call raises KvplaneError: the service's refusal, Unavailable
    when it is unreachable, DeadlineExceeded when the deadline passes.
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
        """`reach` opens a channel to the owner of a replica, so that the client can follow redirections. An `Owners`
        has its own.
        """
        self._owners = channel if isinstance(channel, Owners) else Owners(channel, reach)
        self._closed = False
        self._timeout_s = timeout_s
        self._max_message_bytes = max_message_bytes
        self._retry = retry

    def close(self) -> None:
        """Close the channels, and with them all open sessions and subscriptions."""
        self._closed = True
        for channel in self._owners.close():
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- replicas

    def register_replica(
        self,
        replica: str,
        source: ReplicaSpec | ModelSource | LayerSource,
        *,
        num_ranks: int = 1,
        namespace_digest: bytes = b"",
    ) -> allocation_pb2.RegisterReplicaResponse:
        """Create a replica. Repeated with equal arguments it returns the existing one.

        Args:
            replica: name, 1 to 128 characters of [a-zA-Z0-9._/-].
            source: the groups, or a model or layers from which the service plans them.
            num_ranks: ranks of the engine; all have equal plans.
            namespace_digest: digest of everything that makes cached bytes incompatible.

        Raises:
            AlreadyExists: a replica of this name has other arguments.
        """
        return self._do(calls.register_replica(replica, source, num_ranks, namespace_digest))

    def deregister_replica(self, replica: str, epoch: int | None = None) -> None:
        """Remove a replica. With `epoch`, only if that is its current epoch."""
        self._do(calls.deregister_replica(replica, epoch))

    def describe_replica(self, replica: str) -> allocation_pb2.DescribeReplicaResponse:
        """State and counters of a replica."""
        return self._do(calls.describe_replica(replica))

    def list_replicas(self, page_size: int = 100) -> Iterator[allocation_pb2.ReplicaSummary]:
        """All replicas, ordered by name; pages are fetched lazily."""
        token = ""
        while True:
            page = self._do(calls.list_replicas(page_size, token))
            yield from page.replicas
            token = page.next_page_token
            if not token:
                return

    # ---- an engine's session

    def session(
        self, replica: str, revive: Callable[[], Revival] | None = None, **options: Unpack[SessionOptions]
    ) -> Session:
        """Open a session, which survives broken streams; see Session and SessionOptions.

        Args:
            replica: its name.
            revive: returns the engine's requests and memory, now and after each restart of the service; see Revival.
                With the stamps of the page memory, cached prefixes hit again after a restart. None: the session
                records the requests itself; after a restart they are preempted and the cache is lost (see
                KnownRequests for when this is impossible, so that the session ends).
            options: see SessionOptions.
        """
        self._require_open()
        request = first_request(replica, revive, options)
        open_s, step_s = timeouts(options)
        transport = GrpcTransport(self._owners, open_s, self._max_message_bytes, step_s)
        return Session(transport, request, retry=options.get("retry"), revive=revival_of(revive, options))

    def lasting_session(
        self, replica: str, revive: Callable[[], Revival], **options: Unpack[SessionOptions]
    ) -> Session:
        """The former name of `session` with a `revive`."""
        return self.session(replica, revive, **options)

    # ---- requests, without a session

    def find_cache_hit(
        self, replica: str, what: Content | str, *, with_blocks: bool = False
    ) -> allocation_pb2.FindCacheHitResponse:
        """The length of the cached prefix of content, or of a known request. Changes no state, not even LRU order."""
        return self._do(calls.find_cache_hit(replica, what, with_blocks))

    def allocate_slots(self, replica: str, request: Allocate, at: At = HERE) -> allocation_pb2.AllocateSlotsResponse:
        """Allocate blocks for a request's next tokens."""
        return self._do(calls.allocate_slots(replica, request, at))

    def commit_blocks(self, replica: str, commit: Commit, at: At = HERE) -> allocation_pb2.CommitBlocksResponse:
        """Append tokens to a request and register full blocks in the prefix cache."""
        return self._do(calls.commit_blocks(replica, commit, at))

    def free(
        self, replica: str, request_id: str, ending: Ending = Ending.FREE, *, fence_seq: int = 0, at: At = HERE
    ) -> allocation_pb2.FreeResponse:
        """End or preempt a request. Its blocks return once step `fence_seq` was executed, 0 = immediately."""
        return self._do(calls.free(replica, request_id, ending, fence_seq, at))

    def evict_blocks(self, replica: str, block_ids: Sequence[int], at: At = HERE) -> allocation_pb2.EvictBlocksResponse:
        """Evict blocks from the prefix cache: drop their keys, in order."""
        return self._do(calls.evict_blocks(replica, block_ids, at))

    def reset_prefix_cache(self, replica: str, at: At = HERE) -> allocation_pb2.ResetPrefixCacheResponse:
        """Drop every key of the prefix cache. Nothing changes while a block is in use."""
        return self._do(calls.reset_prefix_cache(replica, at))

    # ---- inspection

    def snapshot(self, replica: str, *, summary: bool = False) -> admin_pb2.SnapshotResponse:
        """The allocator's state, after a check of its invariants. `summary`: only digest and counts."""
        return self._do(calls.snapshot(replica, summary))

    def status(self) -> admin_pb2.StatusResponse:
        """Version, replicas and telemetry of the service."""
        return self._do(calls.status())

    def drain(self) -> None:
        """Drain the service, as SIGTERM does. Returns immediately."""
        self._do(calls.drain())

    def explain(self, replica: str, what: Content | str) -> admin_pb2.ExplainResponse:
        """Explain the prefix-cache hit length that content would have now, or that a request had at its admission."""
        return self._do(calls.explain(replica, what))

    def subscribe(self, replica: str, after_seq: int | None = None) -> Iterator[EventBatch]:
        """Subscribe to batches of cache events: an endless iterator.

        After a broken stream it continues after the last batch. Batches that the service no longer has, and a change of
        service, show as a gap. Close the iterator to unsubscribe.

        Args:
            replica: its name.
            after_seq: last batch already known; None = only batches from now on; 0 = all retained batches.
        """
        feed = Feed(self._owners, self._retry, after_seq)
        while True:
            self._require_open()
            request = calls.subscription(replica, feed.seek())
            stream = events_pb2_grpc.EventsStub(feed.channel).Subscribe(request)
            failed: KvplaneError = Unavailable("the service ended the stream")
            try:
                for message in stream:
                    yield feed.take(wire.decode_batch(message))
            except grpc.RpcError:
                failed = error_of_rpc(stream)
            finally:
                stream.cancel()
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
