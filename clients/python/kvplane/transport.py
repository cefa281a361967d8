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

from kvplane import wire
from kvplane.base.errors import FailedPrecondition, InternalError, KvplaneError, LimitExceeded, Unavailable
from kvplane.base.session import Opened, OpenRequest
from kvplane.base.step import Step, StepResult
from kvplane.channel import MAX_MESSAGE_BYTES
from kvplane.status import error_of_rpc
from kvplane.v1.allocation_pb2 import Heartbeat, SessionClose, SessionRequest, SessionResponse
from kvplane.v1.allocation_pb2_grpc import AllocationStub

OPEN_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0
_NO_STREAM = "no stream is open"


class GrpcTransport:
    """Carries one session over a channel, which it does not close. Implements SessionTransport."""

    def __init__(
        self,
        channel: grpc.Channel,
        open_timeout_s: float = OPEN_TIMEOUT_S,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """`max_message_bytes`: larger steps are refused here, for the service would end the stream."""
        self._stub = AllocationStub(channel)
        self._open_timeout_s = open_timeout_s
        self._max_message_bytes = max_message_bytes
        self._stream: _Stream | None = None

    def open(self, request: OpenRequest) -> Opened:
        """Open a stream; raises Unavailable after `open_timeout_s`, or the service's refusal."""
        message = SessionRequest(open=wire.encode_open(request))
        self._drop()
        self._stream = stream = _Stream(self._stub)
        try:
            stream.send(message)
            with stream.cut_after(self._open_timeout_s):
                response = stream.receive()
            if response.WhichOneof("kind") != "opened":
                raise InternalError("the service answered the open of a session by something else")
            return wire.decode_opened(response.opened)
        except KvplaneError:
            self._drop()
            raise

    def send(self, step: Step) -> None:
        """Hand the step to the stream.

        InvalidArgument: it holds a value that cannot be sent. LimitExceeded: it is too large.
        """
        message = SessionRequest(step=wire.encode_step(step))
        size = message.ByteSize()
        if size > self._max_message_bytes:
            raise LimitExceeded(
                f"step {step.seq} takes {size} bytes, a message at most {self._max_message_bytes}",
                remedy="send it in several parts, or hashes in place of tokens",
            )
        if self._stream is not None:
            self._stream.send(message)

    def receive(self) -> StepResult | KvplaneError:
        """Wait for the next answer."""
        if self._stream is None:
            raise Unavailable(_NO_STREAM)
        while True:
            response = self._stream.receive()
            kind = response.WhichOneof("kind")
            if kind == "result":
                return wire.decode_result(response.result)
            if kind == "error":
                return wire.decode_step_error(response.error)
            if kind != "draining":  # which only announces the end that is to come
                raise InternalError(f"the service sent {kind!r} in place of an answer")

    def heartbeat(self) -> None:
        """Keep the lease; raises what ended the stream when it has ended."""
        stream = self._stream
        if stream is None:
            raise Unavailable(_NO_STREAM)
        stream.check()
        stream.send(SessionRequest(heartbeat=Heartbeat()))

    def close(self) -> None:
        """Say goodbye, and wait a moment for the answer: then the service has freed the requests."""
        stream, self._stream = self._stream, None
        if stream is None:
            return
        stream.send(SessionRequest(close=SessionClose()))
        with stream.cut_after(CLOSE_TIMEOUT_S):
            stream.exhaust()

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cut()


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
        try:
            return next(self._call)
        except (StopIteration, grpc.RpcError):
            raise self._end() from None

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
