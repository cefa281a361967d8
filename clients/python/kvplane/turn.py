"""Whose turn it is to use a session's transport: one caller, or the heartbeat between calls."""

from __future__ import annotations

import threading
from types import TracebackType

from kvplane.base.errors import FailedPrecondition, KvplaneError


class Turn:
    """A context manager around each call of a session.

    Two threads in calls at once are refused, because the numbers of their steps would mean nothing. The
        heartbeat
    is waited for: it holds the transport for a moment, longer only while it opens a broken stream again.

    Attributes:
        ended: why the session is over; raised to every later caller.
    """

    def __init__(self) -> None:
        self.ended: KvplaneError | None = None
        self._caller = threading.Lock()
        self._transport = threading.Lock()

    def __enter__(self) -> None:
        if not self._caller.acquire(blocking=False):
            raise FailedPrecondition(
                "another thread is using this session", remedy="open a session, and use it from one thread"
            )
        self._transport.acquire()
        if self.ended is not None:
            self._release()
            raise self.ended.with_traceback(None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def try_between_calls(self) -> bool:
        """Take the transport when no call is under way and the session is not over; `leave` gives it back."""
        if not self._transport.acquire(blocking=False):
            return False
        if self.ended is not None:
            self._transport.release()
            return False
        return True

    def wait(self) -> None:
        """Take the transport when the call under way is done, also of a session that is over."""
        self._transport.acquire()

    def leave(self) -> None:
        """Give the transport back after `wait` or a successful `try_between_calls`."""
        self._transport.release()

    def _release(self) -> None:
        self._transport.release()
        self._caller.release()
