"""What the blocking client does in another way than the asyncio one: it opens sessions, and ends streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from kvplane.blocking import collected
from kvplane.blocking.session import Session
from kvplane.blocking.transport import GrpcTransport
from kvplane.blocking.ttrpc import SessionSocket
from kvplane.rpc.access import access_of
from kvplane.sansio.owners import Owners
from kvplane.session.options import SessionOptions, first_request, revival_of, timeouts
from kvplane.session.reopening import Revival


class Sessions:
    """The sessions of one client."""

    def __init__(self, owners: Owners[grpc.Channel], max_message_bytes: int) -> None:
        self._owners, self._max_message_bytes = owners, max_message_bytes

    def open(self, replica: str, revive: Callable[[], Revival] | None, options: SessionOptions) -> Session:
        """Open a session; see `Client.session`."""
        request = first_request(replica, revive, options)
        open_s, step_s = timeouts(options)
        path, access = options.get("session_socket", ""), access_of(self._owners.first)
        local = SessionSocket(path, access, self._max_message_bytes) if path else None
        transport = GrpcTransport(self._owners, open_s, self._max_message_bytes, step_s, local)
        return Session(transport, request, retry=options.get("retry"), revive=revival_of(revive, options))

    def abort(self) -> None:
        """Do nothing: gRPC ends the streams of a channel that is closed."""


@contextmanager
def ending(stream: Any) -> Iterator[None]:  # noqa: ANN401
    """Cancel a stream at the end of the `with` block, also where that is because a generator is garbage collected."""
    collected.prepare()
    try:
        yield
    finally:
        collected.cancel_later(stream)
