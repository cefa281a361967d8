"""The stream of a blocking session over a Unix socket of the service, by ttrpc.

The engine's thread writes and reads the socket itself: no thread of gRPC, no queue and no HTTP/2 is between engine and
service. Nothing here blocks but `receive` and `exhaust`, which have a timeout.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from weakref import WeakSet, finalize

from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from kvplane.base.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    KvplaneError,
    LimitExceeded,
    PermissionDenied,
    Unavailable,
)
from kvplane.base.step import StepResult
from kvplane.rpc.access import PLAIN, Access
from kvplane.rpc.channel import MAX_MESSAGE_BYTES
from kvplane.rpc.status import error_of_status
from kvplane.v1.ttrpc_pb2 import TtrpcMetadata, TtrpcRequest, TtrpcResponse
from kvplane.wire import stream as stream_messages
from kvplane.wire.ttrpc import DATA, FIRST_STREAM, HEADER, NO_DATA, REMOTE_CLOSED, REMOTE_OPEN, REQUEST, RESPONSE, frame

_CHUNK = 64 << 10  # bytes that one read takes at most
_MAX_PATH = 107  # bytes of the path of a Unix socket, on Linux
_MAX_POLL_S = 3600.0
_READS_OF_CHECK = 64


@dataclass(frozen=True, slots=True)
class SessionSocket:
    """The Unix socket on which a service of this machine serves sessions (its setting `session_socket`).

    Attributes:
        path: of the socket.
        access: the token; a Unix socket has no TLS.
        max_answer_bytes: largest message that is received, in bytes.
    """

    path: str
    access: Access = PLAIN
    max_answer_bytes: int = MAX_MESSAGE_BYTES

    def __post_init__(self) -> None:
        """Raise InvalidArgument if there can be no socket of this path."""
        with suppress(UnicodeEncodeError):
            if "\0" not in self.path and len(os.fsencode(self.path)) <= _MAX_PATH:
                return
        raise InvalidArgument(
            f"{self.path[:200]!r} is not the path of a Unix socket",
            field="session_socket",
            remedy=f"give a path of at most {_MAX_PATH} bytes",
        )

    def connect(self) -> socket.socket:
        """Return a connected socket that does not block.

        Raises:
            PermissionDenied: this process may not use the socket.
            Unavailable: no service listens, too many connections wait, or this process has too many open files.
        """
        try:
            connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            with ExitStack() as stack:
                stack.callback(connected.close)
                connected.connect(self.path)
                stack.pop_all()
        except PermissionError as error:
            raise PermissionDenied(
                f"cannot connect to {self.path}: {error.strerror}",
                field="session_socket",
                remedy="let the user of this process write to the socket and enter its directory",
            ) from None
        except OSError as error:
            raise Unavailable(
                f"cannot connect to {self.path}: {error.strerror}",
                field="session_socket",
                remedy="run the service on this machine with `session_socket` set to this path",
            ) from None
        return connected


class TtrpcStream:
    """One stream, which is a connection. A stream that is garbage collected ends itself."""

    def __init__(self, at: SessionSocket) -> None:
        """Begin the stream. Raises as `SessionSocket.connect`, and as `Access.metadata`."""
        metadata = at.access.metadata() if at.access.token else ()
        self._socket = at.connect()
        _streams.add(self)
        self._ending = finalize(self, self._socket.close)
        self._ending.atexit = False  # the end of the process ends the stream too
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._max_answer_bytes = at.max_answer_bytes
        self._unsent = bytearray()  # what the socket's buffer had no room for
        self._chunk = memoryview(bytearray(_CHUNK))
        self._rest = bytearray()  # the begin of a frame
        self._arrived: deque[bytes] = deque()
        self._early: stream_messages.Taken | None = None  # taken by `ready`, for `receive`
        self._end: KvplaneError | None = None  # behind what has arrived
        _, service, method = stream_messages.SESSION.split("/")
        pairs = [TtrpcMetadata(key=key, value=value) for key, value in metadata]
        request = TtrpcRequest(service=service, method=method, metadata=pairs)
        self._write(frame(REQUEST, request.SerializeToString(), REMOTE_OPEN))

    def send(self, message: stream_messages.Sent) -> None:
        """Write a message, without waiting: what the socket does not take now is written by the next call of any
        method.
        """
        self._write(frame(DATA, stream_messages.serialized(message)))

    def receive(self, timeout_s: float) -> stream_messages.Taken:
        """Return the next answer. If the stream has ended, raise the error with which it ended.

        After `timeout_s` seconds, cuts the stream and raises DeadlineExceeded.
        """
        if self._early is not None:
            answer, self._early = self._early, None
            return answer
        if not self._arrived and self._end is None:
            self._wait(timeout_s)
        return self._take()

    def ready(self) -> StepResult | None:
        """Return the next answer if it is here and a result; None otherwise. Does not wait, and raises nothing."""
        if self._early is not None:
            return None
        if not self._arrived:
            self._flush()
            self._read()
            if not self._arrived:
                return None
        try:
            answer = self._take()
        except KvplaneError:
            return None  # `receive` raises it
        if isinstance(answer, StepResult):
            return answer
        self._early = answer
        return None

    def check(self) -> None:
        """Raise the error with which the stream ended; do nothing if it is open. Reads what has arrived, so that the
        service can write on while the engine does not call `receive`.
        """
        self._flush()
        for _ in range(_READS_OF_CHECK):
            if self._end is not None or not self._read():
                break
        if self._end is not None:
            raise self._ended_with(self._end)

    def cut(self) -> None:
        """End the stream; a call that waits returns. Any thread may call this method."""
        with suppress(OSError):  # it is not connected any more
            self._socket.shutdown(socket.SHUT_RDWR)

    def _write(self, raw: bytes) -> None:
        if self._unsent:
            self._unsent += raw
            self._flush()
            return
        try:
            sent = self._socket.send(raw)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # it is broken: `receive` raises why
        if sent < len(raw):
            self._unsent += raw[sent:]
            self._poll.modify(self._socket, select.POLLIN | select.POLLOUT)

    def _flush(self) -> None:
        if not self._unsent:
            return
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()
        if not self._unsent:
            self._poll.modify(self._socket, select.POLLIN)

    def _wait(self, timeout_s: float) -> None:
        """Wait until an answer has arrived or the stream has ended."""
        deadline_s = time.monotonic() + timeout_s
        left_s = timeout_s
        while True:
            self._poll.poll(1000 * min(max(0.0, left_s), _MAX_POLL_S))
            self._flush()
            self._read()
            if self._arrived or self._end is not None:
                return
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                self._end = DeadlineExceeded(
                    f"the service did not answer within {timeout_s} s",
                    remedy="open the session again, or raise the timeout",
                )
                self.cut()
                return

    def _read(self) -> bool:
        """Take what has arrived, without waiting. Returns whether there may be more."""
        try:
            received = self._socket.recv_into(self._chunk)
        except BlockingIOError:
            return False
        except OSError:
            received = 0
        if not received:
            self._ends_with(Unavailable("the session's connection ended", remedy="open the session again"))
            return False
        self._rest += self._chunk[:received]
        while self._end is None and self._next_frame():
            pass
        return True

    def _next_frame(self) -> bool:
        """Take the next frame if it has arrived whole."""
        if len(self._rest) < HEADER.size:
            return False
        length, stream, kind, flags = HEADER.unpack_from(self._rest)
        if length > self._max_answer_bytes:
            self._ends_with(
                LimitExceeded(
                    f"the service's message has {length} bytes, the maximum is {self._max_answer_bytes}",
                    remedy="raise max_message_bytes of the client",
                )
            )
            return False
        end = HEADER.size + length
        if len(self._rest) < end:
            return False
        data = bytes(memoryview(self._rest)[HEADER.size : end])
        del self._rest[:end]
        if kind == RESPONSE:
            self._ends_with(_reason(data))
        elif kind == DATA and stream == FIRST_STREAM:
            if not flags & NO_DATA:
                self._arrived.append(data)
            if flags & REMOTE_CLOSED:
                self._ends_with(_ended())
        else:
            self._ends_with(stream_messages.reader_failed(ValueError(f"frame of kind {kind} on stream {stream}")))
        return True

    def _take(self) -> stream_messages.Taken:
        if not self._arrived:
            assert self._end is not None, "`_wait` returns with an answer or an end"
            raise self._ended_with(self._end)
        try:
            return stream_messages.taken(self._arrived.popleft())
        except DecodeError as error:
            self._arrived.clear()
            self._end = stream_messages.reader_failed(error)
            self.cut()
            raise self._ended_with(self._end) from error

    def _ended_with(self, end: KvplaneError) -> KvplaneError:
        """Close the connection, and return an equal error to raise: a traceback keeps what it passed."""
        self._unsent.clear()
        self._socket.close()
        return type(end)(end.message, field=end.field, remedy=end.remedy, metadata=end.metadata)

    def _ends_with(self, end: KvplaneError) -> None:
        """Keep why the stream ended: the first reason counts."""
        self._end = self._end or end


_streams: WeakSet[TtrpcStream] = WeakSet()


def _close_in_child() -> None:
    """Close the connections of this process's parent: one that the child kept open would outlive the engine."""
    for stream in list(_streams):
        stream._socket.close()


os.register_at_fork(after_in_child=_close_in_child)


def _ended() -> KvplaneError:
    return Unavailable("the service ended the session's stream", remedy="open the session again")


def _reason(response: bytes) -> KvplaneError:
    """Return why the service ended the stream."""
    try:
        status = status_pb2.Status.FromString(TtrpcResponse.FromString(response).status)
    except DecodeError:
        return InternalError("the service ended the session with a malformed status", remedy="report this bug")
    return error_of_status(status) if status.code else _ended()
