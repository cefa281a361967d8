"""Run engines in threads, so that the main thread is free to draw their progress and to receive Ctrl-C. `Pace` limits
the virtual time of a run to a multiple of real time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from kvplane.base.errors import InvalidArgument, KvplaneError
from kvplane_tools.replay.plan import NS_PER_SECOND
from kvplane_tools.replay.run import ReplayRun


class Pace:
    """Limits the virtual clock to `speed` times real time. Decisions do not depend on it.

    Args:
        speed: virtual seconds per real second; 0 = as fast as possible.
        now_s, sleep: clock and sleep function, in seconds; replaced by tests.
    """

    def __init__(
        self,
        speed: float,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if speed < 0:
            raise InvalidArgument(f"it is {speed}", field="--speed", remedy="use 0 or more")
        self._speed = speed
        self._now_s = now_s
        self._sleep = sleep
        self._started_s = now_s()

    def hold(self, clock_ns: int) -> None:
        """Sleep until real time has caught up with the virtual time `clock_ns` (nanoseconds)."""
        if self._speed:
            due_s = self._started_s + clock_ns / NS_PER_SECOND / self._speed
            self._sleep(max(0.0, due_s - self._now_s()))


class EngineThread(threading.Thread):
    """A thread that runs one replay until the replay ends or is stopped between two steps.

    Attributes:
        error: the error that ended the replay early, None if there was none.
    """

    def __init__(self, replay: ReplayRun, stop: threading.Event, after_step: Callable[[], None]) -> None:
        """`stop` ends the replay when set; `after_step` is called in the thread after each step."""
        super().__init__(name=f"kvplane-engine-{replay.names[0]}")
        self.error: KvplaneError | AssertionError | None = None
        self._replay = replay
        self._stop_event = stop
        self._after_step = after_step

    def run(self) -> None:
        """Run the replay (body of the thread). An error is stored for the main thread and stops the other engines."""
        try:
            self._replay.run(self._may_continue)
        except (KvplaneError, AssertionError) as error:
            self.error = error
            self._stop_event.set()

    def _may_continue(self) -> bool:
        self._after_step()
        return not self._stop_event.is_set()


class Engines:
    """The running engine threads of several replays."""

    def __init__(self, threads: Sequence[EngineThread]) -> None:
        self._threads = threads

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds, and return True if all threads have ended. Raises the error that ended one
        of them.
        """
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout_s)
                break
        if any(thread.is_alive() for thread in self._threads):
            return False
        for thread in self._threads:
            if thread.error is not None:
                raise thread.error
        return True


@contextmanager
def running(runs: Sequence[ReplayRun], after_step: Callable[[ReplayRun], None]) -> Iterator[Engines]:
    """Run the engines in threads during the block. At the end of the block, also after an error, stop and join all
    threads.
    """
    stop = threading.Event()
    threads = [EngineThread(run, stop, partial(after_step, run)) for run in runs]
    try:
        for thread in threads:
            thread.start()
        yield Engines(threads)
    finally:
        stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
