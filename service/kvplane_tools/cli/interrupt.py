"""Ctrl-C and SIGTERM end a command as KeyboardInterrupt, at a place where an exception does no harm."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from kvplane_tools.cli.options import FAILED, INTERRUPTED

# Seconds: that a command may take to clean up; after which a second Ctrl-C ends it at once (before, it is the same one,
# which a parent process forwarded); between two attempts to raise the exception.
LIMIT_S = 10.0
SECOND_S = 1.0
RETRY_S = 0.01

# The functions of gRPC that wait in the calling thread, and leave nothing half done when an exception ends them.
_GRPC_WAITS = {"_wait_once", "_blocking"}


class Interrupt:
    """Handler of SIGINT and SIGTERM: raises KeyboardInterrupt once, and ends the process LIMIT_S seconds later anyway.

    Between two statements of gRPC an exception leaves a channel that never closes: the handler runs again RETRY_S
    seconds later. It does so too where Python discards the exception, as in the finalizer of an object or a generator.
    A second signal ends the process at once.

    The handler uses timers of the kernel and of C only: a thread takes a lock of `threading` when it starts, which the
    interrupted code may hold. The timer of C ends a process that executes no Python code any more (exit code 1).
    """

    def __init__(self) -> None:
        self._end = 0.0  # on time.monotonic(); 0 = no signal yet
        self._raised = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT, SIGTERM, or SIGALRM of the own timer."""
        now = time.monotonic()
        if not self._end:
            self._end = now + LIMIT_S
            signal.signal(signal.SIGALRM, self)
            faulthandler.dump_traceback_later(LIMIT_S + 1, exit=True, file=2)
        elif now >= self._end or (number != signal.SIGALRM and now >= self._end - LIMIT_S + SECOND_S):
            os._exit(INTERRUPTED)
        if self._raised:
            return
        self._raised = may_raise(frame)
        signal.setitimer(signal.ITIMER_REAL, max(self._end - now, RETRY_S) if self._raised else RETRY_S)
        if self._raised:
            raise KeyboardInterrupt

    def leave(self, code: int) -> None:
        """End the process if a signal has come. It skips Python's own end, which stops the threads of gRPC anywhere: a
        lock that one of them holds would block the finalizer of a call forever.
        """
        if self._end:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):  # the reader has gone, or the stream is closed
                    stream.flush()
            os._exit(code)

    def discarded(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Handle an exception that Python discards (`sys.unraisablehook`): raise the KeyboardInterrupt again."""
        if unraisable.exc_type is KeyboardInterrupt and self._end:
            self._raised = False
            signal.setitimer(signal.ITIMER_REAL, RETRY_S)
        else:
            sys.__unraisablehook__(unraisable)


def may_raise(frame: FrameType | None) -> bool:
    """Whether an exception in this frame of the main thread leaves no function of gRPC half done."""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] == "grpc":
            return frame.f_code.co_name in _GRPC_WAITS
        frame = frame.f_back
    return True


@contextmanager
def handled() -> Iterator[None]:
    """Handle SIGINT and SIGTERM in the block, unless the parent process lets SIGINT be ignored. A block that ends by
    SystemExit after a signal ends the process at once.
    """
    before, hook = signal.getsignal(signal.SIGINT), sys.unraisablehook
    if before is not signal.default_int_handler:
        yield
        return
    interrupt = Interrupt()
    signal.signal(signal.SIGINT, interrupt)
    terminate = signal.signal(signal.SIGTERM, interrupt)
    sys.unraisablehook = interrupt.discarded
    try:
        yield
    except SystemExit as end:
        interrupt.leave(end.code if isinstance(end.code, int) else FAILED)
        raise
    finally:
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGTERM, terminate)
        sys.unraisablehook = hook
        # At its end Python gives signals their default action, by which a late SIGALRM would kill the process.
        signal.setitimer(signal.ITIMER_REAL, 0)
