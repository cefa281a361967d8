"""The gRPC transport of a blocking session: one bidirectional stream of the blocking stub.

gRPC's sender thread reads requests from a SimpleQueue, and the caller's thread reads answers. Of the ways to use a
stream from a blocking loop in Python this is the fastest, and the engine needs no event loop.
"""

from __future__ import annotations

import time
from queue import SimpleQueue

import grpc

from kvplane.base.errors import DeadlineExceeded, FailedPrecondition, KvplaneError, Unavailable
from kvplane.base.session import CLOSE_TIMEOUT_S, OPEN_TIMEOUT_S, STEP_TIMEOUT_S, Opened, OpenRequest
from kvplane.base.step import Step, StepResult
from kvplane.blocking.watchdog import NEVER, WATCHDOG
from kvplane.rpc.channel import MAX_MESSAGE_BYTES
from kvplane.rpc.status import error_of_rpc
from kvplane.sansio.owners import Owners, Route, moving_is_breaking
from kvplane.v1.allocation_pb2 import SessionRequest, SessionResponse
from kvplane.v1.allocation_pb2_grpc import AllocationStub
from kvplane.wire import stream as stream_messages


class GrpcTransport:
    """Carry the messages of one session over a gRPC channel, which the transport does not close. Implements
    SessionTransport.
    """

    def __init__(
        self,
        channel: grpc.Channel | Owners[grpc.Channel],
        open_timeout_s: float = OPEN_TIMEOUT_S,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        step_timeout_s: float = STEP_TIMEOUT_S,
    ) -> None:
        """Create a transport without a stream. `send` refuses steps above `max_message_bytes` bytes, since the service
        ends a stream on which a larger message arrives.
        """
        self._owners = channel if isinstance(channel, Owners) else Owners(channel)
        self._stubs: dict[grpc.Channel, AllocationStub] = {}
        self._channel = self._owners.present  # of the stream
        self._stub(self._channel)
        self._open_timeout_s, self._step_timeout_s = open_timeout_s, step_timeout_s
        self._max_message_bytes = max_message_bytes
        self._stream: _Stream | None = None
        self._is_aborted = False
        self.draining = self.can_move = False

    def open(self, request: OpenRequest) -> Opened:
        """Open a stream and return the service's first answer.

        Raises:
            Unavailable: no service was reached; the next `open` tries the next address of the list.
            DeadlineExceeded: no answer within `open_timeout_s` seconds; the next `open` tries the next address of the
                list.
            KvplaneError: the service refused the session.
        """
        message = stream_messages.open_message(request)
        route = Route(self._owners)
        while True:
            try:
                opened = self._open_at(self._stub(route.channel), message)
            except KvplaneError as failed:
                route.after(failed)
            else:
                self._channel, self.can_move = route.channel, self._owners.has_other_than(route.channel)
                return opened

    def _stub(self, channel: grpc.Channel) -> AllocationStub:
        """Return the gRPC stub of a channel. The stub is created while the channel is open, since gRPC crashes if the
        channel is closed.
        """
        if channel not in self._stubs:
            self._stubs[channel] = AllocationStub(channel)
        return self._stubs[channel]

    def _open_at(self, stub: AllocationStub, message: SessionRequest) -> Opened:
        self._drop()
        self.draining = False
        self._stream = stream = _Stream(stub)
        if self._is_aborted:  # read after the assignment, so that either `abort` or this line ends the stream
            self._drop()
        stream.send(message)
        try:
            return stream_messages.opened_of(stream.receive(self._open_timeout_s))
        except KvplaneError:
            self._drop()
            raise

    def send(self, step: Step) -> None:
        """Write a step to the stream, without waiting.

        Raises:
            InvalidArgument: a value of the step cannot be encoded.
            LimitExceeded: the encoded step is larger than `max_message_bytes`.
        """
        message = stream_messages.step_message(step, self._max_message_bytes)
        if self._stream is not None:
            self._stream.send(message)

    def receive(self) -> StepResult | KvplaneError:
        """Wait for the next answer: the result of a step, or the refusal of a step.

        Raises:
            DeadlineExceeded: no answer within `step_timeout_s` seconds; the stream is then cancelled.
        """
        stream = self._require_stream()
        while True:
            with moving_is_breaking():
                answer = stream_messages.answer_of(stream.receive(self._step_timeout_s))
            if answer is not None:
                return answer
            self.draining = True

    def heartbeat(self) -> None:
        """Send a heartbeat. If the stream has ended, raise the error with which it ended."""
        stream = self._require_stream()
        with moving_is_breaking():
            stream.check()
        stream.send(stream_messages.heartbeat_message())

    def close(self) -> None:
        """Close the stream and wait up to two seconds until the service has ended it. A service that has ended the
        stream has freed the session's requests.

        If the service drains, the next `open` uses the next address of the list.
        """
        if self.draining:
            self._owners.instead_of(self._channel)
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.send(stream_messages.close_message())
            stream.exhaust(CLOSE_TIMEOUT_S)

    def abort(self) -> None:
        """Cancel the stream and refuse to open another stream. Any thread may call this method."""
        self._is_aborted = True
        self._drop()

    def _require_stream(self) -> _Stream:
        if self._stream is None:
            raise Unavailable("the session has no open stream", remedy="open the session again")
        return self._stream

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cut()


class _Stream:
    """One gRPC stream; the watchdog cancels a read that takes too long. The constructor raises FailedPrecondition if
    the channel is closed.
    """

    def __init__(self, stub: AllocationStub) -> None:
        self._requests: SimpleQueue[SessionRequest | None] = SimpleQueue()
        try:
            self._call = stub.Session(iter(self._requests.get, None))
        except ValueError as error:
            raise FailedPrecondition("the gRPC channel is closed", remedy="connect again") from error
        self.deadline_s, self._timeout_s = NEVER, NEVER
        self._is_late = False
        WATCHDOG.watch(self)

    def send(self, message: SessionRequest) -> None:
        """Put a message into the queue from which gRPC sends."""
        self._requests.put(message)

    def receive(self, timeout_s: float) -> SessionResponse:
        """Return the next message. If the stream has ended, raise the error with which it ended.

        After `timeout_s` seconds, cancels the stream and raises DeadlineExceeded.
        """
        message = None
        self._wait(timeout_s)
        try:
            message = next(self._call)
        except (StopIteration, grpc.RpcError):
            raise self._end() from None
        finally:
            self.deadline_s = NEVER
            if message is None:  # after Ctrl-C gRPC still reads, and a second concurrent read is an error
                self.cut()
        return message

    def check(self) -> None:
        """Raise the error with which the stream ended; do nothing if it is open."""
        if not self._call.is_active():
            raise self._end()

    def exhaust(self, timeout_s: float) -> None:
        """Read until the stream ends or `timeout_s` seconds have passed, then stop gRPC's sender thread."""
        self._wait(timeout_s)
        try:
            for _ in self._call:
                pass
        except grpc.RpcError:
            return  # the stream is broken or cancelled already
        finally:
            self.cut()

    def cut(self) -> None:
        """Cancel the stream and stop gRPC's sender thread."""
        WATCHDOG.forget(self)
        self._call.cancel()
        self._requests.put(None)

    def is_late(self) -> None:
        """Cancel the stream. The watchdog calls this method when the deadline of a read has passed."""
        self._is_late = True
        self.cut()

    def _wait(self, timeout_s: float) -> None:
        self._timeout_s, self.deadline_s = timeout_s, time.monotonic() + timeout_s

    def _end(self) -> KvplaneError:
        if self._is_late:
            return DeadlineExceeded(
                f"the service did not answer within {self._timeout_s} s",
                remedy="open the session again, or raise the timeout",
            )
        if self._call.code() is grpc.StatusCode.OK:
            return Unavailable("the service ended the session's stream", remedy="open the session again")
        return error_of_rpc(self._call)
