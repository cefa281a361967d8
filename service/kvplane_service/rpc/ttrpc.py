"""Serve sessions on a Unix socket by ttrpc, next to gRPC: the same streams, behind the same gate, without HTTP/2.

A connection carries one session. As with gRPC, nothing of a client is buffered beyond _UNREAD_BYTES before the call is
admitted and reads, and a client that does not read delays its own stream alone.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import stat
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import NoReturn, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from kvplane.base.errors import DeadlineExceeded, InvalidArgument, KvplaneError, LimitExceeded, NotFound
from kvplane.rpc.peers import peer_of
from kvplane.rpc.status import DETAILS_KEY, encode_status
from kvplane.v1.ttrpc_pb2 import TtrpcRequest, TtrpcResponse
from kvplane.wire.ttrpc import DATA, HEADER, NO_DATA, REMOTE_CLOSED, REMOTE_OPEN, REQUEST, RESPONSE, frame
from kvplane_service.auth.gate import CALL
from kvplane_service.auth.quotas import READS_AT_ONCE
from kvplane_service.config import Config
from kvplane_service.rpc.methods import MESSAGE_TIMEOUT_S, Context, ServedStream
from kvplane_service.rpc.ports import check_free, not_free
from kvplane_service.runtime.rota import OWNER

_UNREAD_BYTES = 64 << 10
_MAX_REQUEST_BYTES = 16 << 10  # of the frame that begins a stream, before the call is admitted
_UNSENT_BYTES = 64 << 10  # answers that wait for the client; above it the stream waits
_BACKLOG = 512  # connections that wait to be accepted
_WATCH_S = 1.0  # between two looks at a client of which nothing is read
_LAST_S = 1.0  # time for the last bytes to be written when a stream ends


class _Aborted(Exception):
    """Ends a call: as in gRPC, `abort_with_status` does not return.

    Attributes:
        status: the google.rpc.Status, serialized.
    """

    def __init__(self, status: bytes) -> None:
        self.status = status


class TtrpcServer:
    """Serves stream methods on a Unix socket. Create it inside the running event loop.

    Attributes:
        methods: the stream methods by their path, "/service/method".
        open: the connections.
        arriving: by owner, lets READS_AT_ONCE long messages arrive at a time.
    """

    def __init__(self, methods: Mapping[str, ServedStream], config: Config) -> None:
        self.methods = methods
        self.open: set[_Connection] = set()
        self.arriving = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(READS_AT_ONCE))
        self._config = config
        self._server: asyncio.Server | None = None
        self._file: tuple[int, int] | None = None  # device and inode of the socket's file

    async def start(self) -> None:
        """Start serving. Raises Unavailable if another process listens on the socket, or it cannot be created."""
        path = self._config.session_socket
        check_free(f"unix:{path}", "session_socket")
        try:
            listening = _bound(path)
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(self._connection, sock=listening, backlog=_BACKLOG)
        except OSError as error:
            raise not_free(f"unix:{path}", error.strerror or str(error), "session_socket") from None
        self._file = _file_at(path)

    async def stop(self, grace_s: float) -> None:
        """Accept no more connections, wait at most `grace_s` seconds until the open ones have ended, and end the
        others.
        """
        if self._server is None:
            return
        self._server.close()
        if _file_at(self._config.session_socket) == self._file:  # or another service listens there now
            with suppress(OSError):  # it was removed by hand, or its directory is not writable any more
                os.unlink(self._config.session_socket)
        tasks = [one.task for one in self.open if one.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        for one in list(self.open):
            one.end()

    def _connection(self) -> _Connection:
        return _Connection(self, self._config.max_message_bytes, self._config.max_connections)


def _bound(path: str) -> socket.socket:
    """Return a socket at the path, instead of one on which no process listens. Its user may connect, and who can write
    to the directory and so could replace the file; the umask has no say.
    """
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        os.fchmod(listening.fileno(), 0o600)  # so that the file has no more from its first moment on
        listening.bind(path)
        file, directory = os.stat(path), os.stat(os.path.dirname(path) or ".")
        shared = 0 if directory.st_mode & stat.S_ISVTX else directory.st_mode
        of_group = 0o060 if shared & stat.S_IWGRP and file.st_gid == directory.st_gid else 0
        os.chmod(path, 0o600 | of_group | (0o006 if shared & stat.S_IWOTH else 0))
    except OSError:
        listening.close()
        raise
    return listening


def _file_at(path: str) -> tuple[int, int] | None:
    with suppress(OSError):
        found = os.stat(path)
        return found.st_dev, found.st_ino
    return None


class _Connection(asyncio.Protocol):
    """One connection and its call, of which it is the context: the part of grpc.aio.ServicerContext that methods use.

    Attributes:
        task: serves the call; None before the call has begun.
    """

    def __init__(self, server: TtrpcServer, max_message_bytes: int, max_connections: int) -> None:
        self.task: asyncio.Task[None] | None = None
        self._server = server
        self._max_message_bytes = max_message_bytes
        self._max_connections = max_connections
        self._loop = asyncio.get_running_loop()
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._received = bytearray()
        self._reader: asyncio.Future[None] | None = None  # set while the call waits for a message
        self._is_paused = self._is_closed_by_client = self._has_ended = False
        self._is_lost = False
        self._watching: asyncio.TimerHandle | None = None
        self._stream = 0
        self._metadata: tuple[tuple[str, str], ...] = ()

    # ---- of asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the frame that begins the call."""
        self._transport = cast(asyncio.Transport, transport)
        if len(self._server.open) >= self._max_connections:
            self._transport.abort()
            return
        self._server.open.add(self)
        self._transport.set_write_buffer_limits(_UNSENT_BYTES)
        self._silent = self._loop.call_later(MESSAGE_TIMEOUT_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        """Keep the bytes until the call reads them; read no more while there are enough."""
        self._received += data
        if self.task is None:
            self._begin()
        if self._reader is not None:
            if not self._reader.done():
                self._reader.set_result(None)
        elif len(self._received) > _UNREAD_BYTES and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
            self._watching = self._watching or self._loop.call_later(_WATCH_S, self._watch)

    def eof_received(self) -> bool:
        """End the stream of a client that sends no more, once the call has read what it sent; or the call, if the
        client is gone.
        """
        self._has_ended = True
        if self.task is None or self._is_hung_up():
            return False
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        return True

    def connection_lost(self, error: Exception | None) -> None:
        """Cancel the call, as gRPC does if its client is gone."""
        self._is_lost = True
        if self not in self._server.open:
            return
        self._silent.cancel()
        self._server.open.discard(self)
        self._may_write.set()
        if self.task is not None:
            self.task.cancel()

    def pause_writing(self) -> None:
        """Let writers wait for the client."""
        self._may_write.clear()

    def resume_writing(self) -> None:
        """Let writers continue."""
        self._may_write.set()

    # ---- of grpc.aio.ServicerContext

    async def read(self) -> object:
        """Return the next message of the client; EOF if it sends no more.

        Raises:
            DeadlineExceeded: a part of the message does not arrive.
            LimitExceeded: the message is longer than `max_message_bytes`.
            InvalidArgument: the frame is none of a stream's data.
        """
        has_waited = False
        while not self._is_closed_by_client:
            while not (self._received or self._has_ended):
                await self._more()
                has_waited = True
            if not self._has_frame() and not self._has_ended:
                await self._rest()
                has_waited = True
            if not self._has_frame():
                break
            if not has_waited:
                await asyncio.sleep(0)  # other connections are served between two messages
            flags, data = self._take()
            self._is_closed_by_client = bool(flags & REMOTE_CLOSED)
            if not flags & NO_DATA:
                return data
        return grpc.aio.EOF

    async def _rest(self) -> None:
        """Wait for the rest of a message that has begun. Few long ones of an owner arrive at a time, since each takes
        its length in memory. Raises DeadlineExceeded after MESSAGE_TIMEOUT_S seconds in which it is read.
        """
        async with self._begun():
            while len(self._received) < HEADER.size and not self._has_ended:
                await self._more()
        if self._has_frame() or self._has_ended:
            return
        async with AsyncExitStack() as held:
            if HEADER.unpack_from(self._received)[0] > _UNREAD_BYTES:
                await held.enter_async_context(self._server.arriving[OWNER.get()])
            await held.enter_async_context(self._begun())
            while not (self._has_frame() or self._has_ended):
                await self._more()

    @asynccontextmanager
    async def _begun(self) -> AsyncIterator[None]:
        """Limit the time in which a message arrives, and count what arrived of one that is given up."""
        try:
            async with asyncio.timeout(MESSAGE_TIMEOUT_S):
                yield
        except TimeoutError:
            CALL.get().owe(len(self._received))
            raise DeadlineExceeded(
                f"a message did not arrive within {MESSAGE_TIMEOUT_S:g} s of its first byte",
                remedy="send each message as a whole",
            ) from None

    async def _more(self) -> None:
        """Wait until more has arrived, or nothing more will."""
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        self._reader = self._loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    async def write(self, message: bytes) -> None:
        """Send a message, and wait until the client has read most of those before. A client that is gone gets none."""
        if self._is_lost:
            return
        self._transport.write(frame(DATA, message, stream=self._stream))
        if not self._may_write.is_set():
            await self._may_write.wait()

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata with which the client began the call."""
        return self._metadata

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        """Return no certificates: a Unix socket has no TLS."""
        return {}

    def peer(self) -> str:
        """Return the process of the client, as the kernel names it."""
        client = peer_of(self._transport.get_extra_info("socket"))
        return f"unix:pid={client.pid},uid={client.uid}"

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        """End the call with a status that has details."""
        raise _Aborted(cast(bytes, dict(status.trailing_metadata)[DETAILS_KEY]))

    # ---- the call

    def end(self) -> None:
        """Break the connection."""
        self._transport.abort()

    def _begin(self) -> None:
        """Begin the call if the frame for it is here."""
        try:
            if not self._has_frame(REQUEST, _MAX_REQUEST_BYTES):
                return
            flags, data = self._take()
            serve = self._called(flags, data)
        except KvplaneError as error:
            self._received.clear()
            self._end_with(encode_status(error).SerializeToString())
            return
        self._silent.cancel()
        self.task = self._loop.create_task(self._serve(serve))

    def _called(self, flags: int, data: bytes) -> ServedStream:
        """Return the method that a request calls."""
        try:
            request = TtrpcRequest.FromString(data)
        except DecodeError:
            raise InvalidArgument("the request is no TtrpcRequest", remedy="see ttrpc.proto") from None
        self._metadata = tuple((one.key.lower(), one.value) for one in request.metadata)
        path = f"/{request.service}/{request.method}"
        if path not in self._server.methods:
            served = ", ".join(self._server.methods)
            raise NotFound(f"{path[:200]} is not served on this socket", remedy=f"call it by gRPC; here is {served}")
        if flags != REMOTE_OPEN or request.payload:
            raise InvalidArgument(
                f"{path} was called without a stream", remedy="set the flag `remote open`, and send messages as data"
            )
        return self._server.methods[path]

    async def _serve(self, serve: ServedStream) -> None:
        status = b""
        try:
            await serve(None, cast(Context, self))
        except _Aborted as aborted:
            status = aborted.status
        except asyncio.CancelledError:
            self.end()
            raise
        self._end_with(status)

    def _end_with(self, status: bytes) -> None:
        """Send the status, empty for OK, and close the connection."""
        self._received = bytearray()
        if self._is_lost:
            return
        response = TtrpcResponse(status=status).SerializeToString()
        self._transport.write(frame(RESPONSE, response, stream=self._stream))
        self._transport.close()
        self._silent.cancel()
        self._silent = self._loop.call_later(_LAST_S, self._transport.abort)  # of a client that does not read

    def _watch(self) -> None:
        """Break the connection if its client is gone, which is not seen otherwise while nothing is read."""
        self._watching = None
        if self._is_lost or not self._is_paused:
            return
        if self._is_hung_up():
            self.end()
        else:
            self._watching = self._loop.call_later(_WATCH_S, self._watch)

    def _is_hung_up(self) -> bool:
        """Return whether the client has closed its end for both directions."""
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), 0)
        return any(event & select.POLLHUP for _, event in poll.poll(0))

    def _has_frame(self, kind: int = DATA, max_bytes: int = 0) -> bool:
        """Return whether a whole frame has arrived. Raises as `read` for one that is refused."""
        if len(self._received) < HEADER.size:
            return False
        length, stream, given, _ = HEADER.unpack_from(self._received)
        if self.task is None:
            self._stream = stream
        limit = max_bytes or self._max_message_bytes
        if given != kind or stream != self._stream or stream % 2 == 0:
            expected = "an odd stream" if self.task is None else f"stream {self._stream}"
            raise InvalidArgument(
                f"a frame of kind {given} on stream {stream}, expected kind {kind} on {expected}",
                remedy="open a connection for each session",
            )
        if length > limit:
            raise LimitExceeded(
                f"the message has {length} bytes, the maximum is {limit}",
                remedy="send the step in several parts, or hashes instead of tokens",
            )
        return len(self._received) - HEADER.size >= int(length)

    def _take(self) -> tuple[int, bytes]:
        """Return flags and data of the frame that has arrived."""
        length, _, _, flags = HEADER.unpack_from(self._received)
        end = HEADER.size + length
        data = bytes(memoryview(self._received)[HEADER.size : end])
        del self._received[:end]
        return flags, data
