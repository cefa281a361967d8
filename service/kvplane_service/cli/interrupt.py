"""Ctrl-C: SIGINT ends a command as KeyboardInterrupt, at a place where an exception does no harm."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from kvplane_service.cli.options import INTERRUPTED

# Seconds: that a command may take to clean up; after which a second Ctrl-C ends it at once (before, it is the same one,
# which a parent process forwarded); between two attempts to raise the exception.
LIMIT_S = 10.0
SECOND_S = 1.0
RETRY_S = 0.01

# The functions of gRPC that wait in the calling thread, and leave nothing half done when an exception ends them.
_GRPC_WAITS = {"_wait_once", "_blocking"}


class Interrupt:
    """Handler of SIGINT: raises KeyboardInterrupt once, and ends the process LIMIT_S seconds later in any case.

    Python discards an exception in a finalizer (`__del__`). Between two statements of gRPC it leaves a channel that
    never closes. In both places the handler runs again RETRY_S seconds later. A second SIGINT ends the process at once.

    The handler uses timers of the kernel and of C only: a thread takes a lock of `threading` when it starts, which the
    interrupted code may hold. The timer of C ends a process that executes no Python code any more (exit code 1).
    """

    def __init__(self) -> None:
        self._end = 0.0  # on time.monotonic(); 0 = no SIGINT yet
        self._raised = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT, or SIGALRM of the own timer."""
        now = time.monotonic()
        if not self._end:
            self._end = now + LIMIT_S
            signal.signal(signal.SIGALRM, self)
            faulthandler.dump_traceback_later(LIMIT_S + 1, exit=True, file=2)
        elif now >= self._end or (number == signal.SIGINT and now >= self._end - LIMIT_S + SECOND_S):
            os._exit(INTERRUPTED)
        if self._raised:
            return
        self._raised = may_raise(frame)
        signal.setitimer(signal.ITIMER_REAL, LIMIT_S if self._raised else RETRY_S)
        if self._raised:
            raise KeyboardInterrupt


def may_raise(frame: FrameType | None) -> bool:
    """Whether an exception in this frame of the main thread is neither discarded nor leaves gRPC half done."""
    grpc_function = None  # the innermost one
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return False
        if grpc_function is None and str(frame.f_globals.get("__name__")).partition(".")[0] == "grpc":
            grpc_function = frame.f_code.co_name
        frame = frame.f_back
    return grpc_function is None or grpc_function in _GRPC_WAITS


@contextmanager
def handled() -> Iterator[None]:
    """Handle SIGINT in the block, unless the parent process lets it be ignored."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, Interrupt())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
