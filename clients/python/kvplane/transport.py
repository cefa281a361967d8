"""A session over gRPC: one bidirectional stream, driven by the blocking stub.

The stub's own thread takes requests from a SimpleQueue; the caller's thread reads answers. That is the
fastest way in Python to drive a stream from a blocking loop, and the only one that needs no event loop in the
engine.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import grpc

from kvplane.base.errors import FailedPrecondition, KvplaneError, Moved, Unavailable
from kvplane.base.session import Opened, OpenRequest
from kvplane.base.step import Step, StepResult
from kvplane.channel import MAX_MESSAGE_BYTES
from kvplane.owners import Owners
from kvplane.status import error_of_rpc
from kvplane.v1.allocation_pb2 import SessionRequest, SessionResponse
from kvplane.v1.allocation_pb2_grpc import AllocationStub
from kvplane.wire import stream as stream_messages

OPEN_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0


class GrpcTransport:
    """Carries one session over a channel, which it does not close. Implements SessionTransport."""

    def __init__(
        self,
        channel: grpc.Channel | Owners[grpc.Channel],
        open_timeout_s: float = OPEN_TIMEOUT_S,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """`max_message_bytes`: larger steps are refused here, for the service would end the stream."""
        self._owners = channel if isinstance(channel, Owners) else Owners(channel)
        self._stubs: dict[grpc.Channel, AllocationStub] = {}
        self._channel = self._owners.present  # of the stream
        self._stub(self._channel)
        self._open_timeout_s = open_timeout_s
        self._max_message_bytes = max_message_bytes
        self._stream: _Stream | None = None
        self.draining = self.can_move = False

    def open(self, request: OpenRequest) -> Opened:
        """Open a stream; raises Unavailable after `open_timeout_s`, or the service's refusal.

        After Unavailable the next attempt asks the next address of the list.
        """
        message = stream_messages.open_message(request)
        channel, hops = self._owners.present, 0
        while True:
            try:
                opened = self._open_at(self._stub(channel), message)
            except Moved as moved:
                hops += 1
                channel = self._owners.after(moved, hops)
            except Unavailable:
                self._owners.instead_of(channel)
                raise
            else:
                self._channel, self.can_move = channel, self._owners.has_other_than(channel)
                return opened

    def _stub(self, channel: grpc.Channel) -> AllocationStub:
        """Made once, while the channel is open: gRPC crashes where it is made on a closed one."""
        if channel not in self._stubs:
            self._stubs[channel] = AllocationStub(channel)
        return self._stubs[channel]

    def _open_at(self, stub: AllocationStub, message: SessionRequest) -> Opened:
        self._drop()
        self.draining = False
        self._stream = stream = _Stream(stub)
        try:
            stream.send(message)
            with stream.cut_after(self._open_timeout_s):
                return stream_messages.opened_of(stream.receive())
        except KvplaneError:
            self._drop()
            raise

    def send(self, step: Step) -> None:
        """Hand the step to the stream.

        InvalidArgument: it holds a value that cannot be sent. LimitExceeded: it is too large.
        """
        message = stream_messages.step_message(step, self._max_message_bytes)
        if self._stream is not None:
            self._stream.send(message)

    def receive(self) -> StepResult | KvplaneError:
        """Wait for the next answer."""
        stream = self._require_stream()
        while True:
            with moving_is_breaking():
                answer = stream_messages.answer_of(stream.receive())
            if answer is not None:
                return answer
            self.draining = True

    def heartbeat(self) -> None:
        """Keep the lease; raises what ended the stream when it has ended."""
        stream = self._require_stream()
        with moving_is_breaking():
            stream.check()
        stream.send(stream_messages.heartbeat_message())

    def close(self) -> None:
        """Say goodbye, and wait a moment for the answer: then the service has freed the requests.

        Who opens again after a service announced that it goes asks the next address of the list.
        """
        if self.draining:
            self._owners.instead_of(self._channel)
        stream, self._stream = self._stream, None
        if stream is None:
            return
        stream.send(stream_messages.close_message())
        with stream.cut_after(CLOSE_TIMEOUT_S):
            stream.exhaust()

    def _require_stream(self) -> _Stream:
        if self._stream is None:
            raise Unavailable("no stream is open")
        return self._stream

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cut()


@contextmanager
def moving_is_breaking() -> Iterator[None]:
    """An open stream whose replica another service took is broken; whoever opens it again is told where to go."""
    try:
        yield
    except Moved as moved:
        raise Unavailable(moved.message) from moved


class _Stream:
    """One gRPC stream; FailedPrecondition when its channel is closed."""

    def __init__(self, stub: AllocationStub) -> None:
        self._requests: SimpleQueue[SessionRequest | None] = SimpleQueue()
        try:
            self._call = stub.Session(iter(self._requests.get, None))
        except ValueError as error:
            raise FailedPrecondition("the channel is closed", remedy="connect again") from error
        self._late = ""

    def send(self, message: SessionRequest) -> None:
        """Queue a message."""
        self._requests.put(message)

    def receive(self) -> SessionResponse:
        """The next message; raises what ended the stream."""
        message = None
        try:
            message = next(self._call)
        except (StopIteration, grpc.RpcError):
            raise self._end() from None
        finally:
            if message is None:  # after Ctrl-C the read goes on inside gRPC, and a second one beside it is an error
                self.cut()
        return message

    def check(self) -> None:
        """Raise what ended the stream, if it has ended."""
        if not self._call.is_active():
            raise self._end()

    def exhaust(self) -> None:
        """Read to the end, whatever it is, and let the sending thread go."""
        try:
            for _ in self._call:
                pass
        except grpc.RpcError:
            return  # the stream was broken or cut: there is nobody to say goodbye to
        finally:
            self._requests.put(None)

    def cut(self) -> None:
        """End the stream now, and let the sending thread go."""
        self._call.cancel()
        self._requests.put(None)

    @contextmanager
    def cut_after(self, seconds: float) -> Iterator[None]:
        """Cut the stream when the block takes longer."""
        timer = threading.Timer(seconds, self._cut_late, (seconds,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _cut_late(self, seconds: float) -> None:
        self._late = f"no answer within {seconds} s"
        self.cut()

    def _end(self) -> KvplaneError:
        if self._late:
            return Unavailable(self._late)
        if self._call.code() is grpc.StatusCode.OK:
            return Unavailable("the service ended the stream")
        return error_of_rpc(self._call)
