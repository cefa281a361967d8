"""What the asyncio client does in another way than the blocking one: it opens sessions, and ends streams."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import grpc.aio

from kvplane.aio.session import Session
from kvplane.aio.transport import GrpcTransport
from kvplane.base.errors import InvalidArgument
from kvplane.sansio.owners import Owners
from kvplane.session.options import SessionOptions, first_request, revival_of, timeouts
from kvplane.session.reopening import Revival


class Sessions:
    """The sessions of one client."""

    def __init__(
        self,
        owners: Owners[grpc.aio.Channel],
        max_message_bytes: int,
        pause: Callable[[float], Awaitable[object]] | None,
    ) -> None:
        self._owners, self._max_message_bytes, self._pause = owners, max_message_bytes, pause
        self._transports: WeakSet[GrpcTransport] = WeakSet()

    async def open(self, replica: str, revive: Callable[[], Revival] | None, options: SessionOptions) -> Session:
        """Open a session; see `Client.session`."""
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
        retry, revived = options.get("retry"), revival_of(revive, options)
        return await Session(transport, request, retry=retry, pause=self._pause, revive=revived).open()

    def abort(self) -> None:
        """Abort the sessions: grpc.aio leaves their streams open when it closes a channel."""
        for transport in self._transports:
            transport.abort()


@contextmanager
def ending(stream: Any) -> Iterator[None]:  # noqa: ANN401
    """Cancel a stream at the end of the `with` block."""
    try:
        yield
    finally:
        stream.cancel()
