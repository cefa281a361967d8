"""The transport of a blocking session: one bidirectional stream of the blocking stub of gRPC, or one of ttrpc.

gRPC's sender thread takes requests from a SimpleQueue. A reader thread always has a read under way, so that an answer
is taken when it arrives, also while the engine does something else. gRPC's own thread decodes it and puts it into a
second SimpleQueue, from which the engine's thread takes it: a waiting engine is woken directly, not by the reader.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeAlias
from weakref import finalize

import grpc

from kvplane.base.errors import DeadlineExceeded, FailedPrecondition, KvplaneError, Moved, Unavailable
from kvplane.base.session import CLOSE_TIMEOUT_S, OPEN_TIMEOUT_S, STEP_TIMEOUT_S, Opened, OpenRequest
from kvplane.base.step import Step, StepResult
from kvplane.blocking import collected
from kvplane.blocking.ttrpc import SessionSocket, TtrpcStream
from kvplane.rpc.channel import MAX_MESSAGE_BYTES
from kvplane.rpc.status import error_of_rpc
from kvplane.sansio.owners import Owners, Route, moving_is_breaking
from kvplane.v1.allocation_pb2 import SessionRequest
from kvplane.wire import stream as stream_messages

if TYPE_CHECKING:
    _Call: TypeAlias = grpc._CallIterator[bool]


def _nothing() -> None:
    """Look for an answer without a stream."""


class GrpcTransport:
    """Carry the messages of one session over a gRPC channel, which the transport does not close, or over the session
    socket of a service. Implements SessionTransport.
    """

    ready: Callable[[], StepResult | None] = staticmethod(_nothing)  # of the stream: see _Stream.ready

    def __init__(
        self,
        channel: grpc.Channel | Owners[grpc.Channel],
        open_timeout_s: float = OPEN_TIMEOUT_S,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        step_timeout_s: float = STEP_TIMEOUT_S,
        session_socket: SessionSocket | None = None,
    ) -> None:
        """Create a transport without a stream. `send` refuses steps above `max_message_bytes` bytes, since the service
        ends a stream on which a larger message arrives. `session_socket` belongs to the first service of the channels,
        and takes the place of its channel.
        """
        self._owners = channel if isinstance(channel, Owners) else Owners(channel)
        self._channel = self._owners.present  # of the stream
        self._open_timeout_s, self._step_timeout_s = open_timeout_s, step_timeout_s
        self._max_message_bytes = max_message_bytes
        self._session_socket = session_socket
        self._stream: _Stream | TtrpcStream | None = None
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
                opened = self._open_at(route.channel, message)
            except KvplaneError as failed:
                route.after(failed)
            else:
                self._channel, self.can_move = route.channel, self._owners.has_other_than(route.channel)
                return opened

    def _open_at(self, channel: grpc.Channel, message: SessionRequest) -> Opened:
        self._drop()
        self.draining = False
        local = self._session_socket if channel is self._owners.first else None
        self._stream = stream = TtrpcStream(local) if local is not None else _Stream(channel)
        self.ready = stream.ready
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
            try:
                taken = stream.receive(self._step_timeout_s)
            except Moved:
                with moving_is_breaking():
                    raise
            if isinstance(taken, StepResult):
                return taken
            answer = stream_messages.answer_of(taken)
            if answer is not None:
                return answer
            self.draining = True

    def heartbeat(self, waiting_requests: int | None = None) -> None:
        """Send a heartbeat, with the number of waiting requests. If the stream has ended, raise the error with which it
        ended.
        """
        stream = self._require_stream()
        with moving_is_breaking():
            stream.check()
        stream.send(stream_messages.heartbeat_message(waiting_requests))

    def close(self) -> None:
        """Close the stream and wait up to two seconds until the service has ended it. A service that has ended the
        stream has freed the session's requests.

        If the service drains, the next `open` uses the next address of the list.
        """
        if self.draining:
            self._owners.instead_of(self._channel)
        stream, self._stream, self.ready = self._stream, None, _nothing
        if stream is not None:
            stream.send(stream_messages.close_message())
            _exhaust(stream, CLOSE_TIMEOUT_S)

    def abort(self) -> None:
        """Cancel the stream and refuse to open another stream. Any thread may call this method."""
        self._is_aborted = True
        self._drop()

    def _require_stream(self) -> _Stream | TtrpcStream:
        if self._stream is None:
            raise Unavailable("the session has no open stream", remedy="open the session again")
        return self._stream

    def _drop(self) -> None:
        stream, self._stream, self.ready = self._stream, None, _nothing
        if stream is not None:
            stream.cut()


def _exhaust(stream: _Stream | TtrpcStream, timeout_s: float) -> None:
    """Read until the stream ends or `timeout_s` seconds have passed, then cut it."""
    deadline_s = time.monotonic() + timeout_s
    try:
        while True:
            stream.receive(max(0.0, deadline_s - time.monotonic()))
    except KvplaneError:
        return  # it has ended, is broken or is late
    finally:
        stream.cut()


class _End:
    """The last thing that the reader of a stream puts behind the answers.

    Attributes:
        bug: the exception with which the reader failed; None if the stream has ended, as streams do.
    """

    def __init__(self, bug: Exception | None) -> None:
        self.bug = bug


class _Stream:
    """One gRPC stream, with its reader thread. A stream that is garbage collected ends itself.

    Attributes:
        send: puts a message into the queue from which gRPC sends.
    """

    def __init__(self, channel: grpc.Channel) -> None:
        """Start the stream. Raises FailedPrecondition if the channel is closed."""
        self._requests: SimpleQueue[stream_messages.Sent | None] = SimpleQueue()
        self.send: Callable[[stream_messages.Sent], None] = self._requests.put
        self._answers: SimpleQueue[stream_messages.Taken | _End] = SimpleQueue()
        # Not the generated stub: gRPC 1.71 crashes if one is made for a channel that is closed.
        method = channel.stream_stream(stream_messages.SESSION, stream_messages.serialized, _taking(self._answers))
        try:
            self._call = method(iter(self._requests.get, None))
        except ValueError as error:
            raise FailedPrecondition("the gRPC channel is closed", remedy="connect again") from error
        collected.prepare()
        self._ending = finalize(self, _cut_later, self._call, self._requests)
        self._ending.atexit = False  # the end of the process ends the stream too
        self._early: stream_messages.Taken | _End | None = None  # taken by `ready`, for `receive`
        self._late_s: float | None = None  # timeout of a read that took too long
        facts = (self._call, self._answers)
        threading.Thread(target=_read_on, args=facts, name="kvplane-answers", daemon=True).start()

    def receive(self, timeout_s: float) -> stream_messages.Taken:
        """Return the next answer. If the stream has ended, raise the error with which it ended.

        After `timeout_s` seconds, cancels the stream and raises DeadlineExceeded.
        """
        answer, self._early = self._early, None
        try:
            answer = answer or self._answers.get(timeout=timeout_s)
        except Empty:
            self._late_s = timeout_s
            self.cut()
            raise self._error() from None
        if isinstance(answer, _End):
            self._answers.put(answer)  # for the next call
            if answer.bug is not None:
                raise stream_messages.reader_failed(answer.bug)
            raise self._error()
        return answer

    def ready(self) -> StepResult | None:
        """Return the next answer if it is here and a result; None otherwise. Does not wait, and raises nothing."""
        if self._early is not None:
            return None
        try:
            answer = self._answers.get_nowait()
        except Empty:
            return None
        if isinstance(answer, StepResult):
            return answer
        self._early = answer
        return None

    def check(self) -> None:
        """Raise the error with which the stream ended; do nothing if it is open."""
        if not self._call.is_active():
            raise self._error()

    def cut(self) -> None:
        """Cancel the stream and stop the reader and gRPC's sender thread. Any thread may call this method."""
        if self._ending.detach() is not None:
            self._call.cancel()
            self._requests.put(None)

    def _error(self) -> KvplaneError:
        if self._late_s is not None:
            return DeadlineExceeded(
                f"the service did not answer within {self._late_s} s",
                remedy="open the session again, or raise the timeout",
            )
        if self._call.code() is grpc.StatusCode.OK:
            return Unavailable("the service ended the session's stream", remedy="open the session again")
        return error_of_rpc(self._call)


def _taking(answers: SimpleQueue[stream_messages.Taken | _End]) -> Callable[[bytes], bool]:
    """Return what gRPC calls with each message, on its own thread: it decodes the message and hands it over.

    The function must not refer to the stream, which could not be garbage collected otherwise.
    """

    def take(raw: bytes) -> bool:
        answers.put(stream_messages.taken(raw))
        return True

    return take


def _read_on(call: _Call, answers: SimpleQueue[stream_messages.Taken | _End]) -> None:
    """Have gRPC read until the stream ends; then put the end behind the answers."""
    bug: Exception | None = None
    try:
        for _ in call:  # the messages went to `_taking`
            pass
    except grpc.RpcError:
        pass  # the call knows its outcome
    except Exception as error:
        bug = error
    finally:
        call.cancel()  # so that it has an outcome, whatever happened here
        answers.put(_End(bug))


def _cut_later(call: _Call, requests: SimpleQueue[stream_messages.Sent | None]) -> None:
    """End a stream that is garbage collected, without a lock."""
    collected.cancel_later(call)
    requests.put(None)
