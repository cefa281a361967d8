"""Engines in threads, so that the main thread is free to show what they do and to take Ctrl-C."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from kvplane.base.errors import KvplaneError
from kvplane_replay.run import ReplayRun


class EngineThread(threading.Thread):
    """Drives one run to its end, or to the end of the step in which it is told to stop.

    Attributes:
        error: what ended it early; None when nothing did.
    """

    def __init__(self, replay: ReplayRun, stop: threading.Event, after_step: Callable[[], None]) -> None:
        """`after_step` is called in the thread, between steps."""
        super().__init__(name=f"kvplane-engine-{replay.names[0]}")
        self.error: KvplaneError | AssertionError | None = None
        self._replay = replay
        self._asked_to_stop = stop
        self._after_step = after_step

    def run(self) -> None:
        """What the thread does. A failure is kept for the main thread and stops the others too."""
        try:
            self._replay.run(self._goes_on)
        except (KvplaneError, AssertionError) as error:
            self.error = error
            self._asked_to_stop.set()

    def _goes_on(self) -> bool:
        self._after_step()
        return not self._asked_to_stop.is_set()


class Engines:
    """The threads of some runs."""

    def __init__(self, threads: Sequence[EngineThread]) -> None:
        self._threads = threads

    def wait(self, timeout_s: float) -> bool:
        """Whether all have ended, after waiting for so long; raises what ended one of them early."""
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
    """The engines of these runs, under way; all have ended when the block is left, however it is left."""
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
