"""Threads for what blocks or takes long: each resource has a few of its own, so that none waits for another one.

The threads are daemons, and end when they have had nothing to do for a while: a call that hangs keeps neither its
neighbours nor the end of the process waiting.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent import futures
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from kvplane.base.errors import Unavailable

_MAX_WAITING = 1024  # as many as a service has replicas by default: all may come at once after a restart
_IDLE_S = 10.0
_SWITCH_S = 0.001

_T = TypeVar("_T")


class Busy(Unavailable):
    """Too many calls wait for a part of the service, which is named. Clients try again by themselves."""

    reason = "BUSY"


def share_interpreter() -> None:
    """For a whole process: a thread that works lets the event loop in after a millisecond, in place of five."""
    sys.setswitchinterval(_SWITCH_S)


class Offload(Protocol):
    """Runs a blocking call beside the event loop."""

    def __call__(self, call: Callable[[], _T], /) -> Awaitable[_T]:
        """Its outcome."""
        ...


class Executor:
    """Implements Offload for one resource. Create it anywhere; call it on an event loop."""

    def __init__(self, resource: str, threads: int = 1, max_waiting: int = _MAX_WAITING) -> None:
        """`threads` calls run at a time, and `max_waiting` more wait."""
        self._resource = resource
        self._most = threads + max_waiting
        self._threads = _Threads(f"kvplane {resource}", threads)

    async def __call__(self, call: Callable[[], _T], /) -> _T:
        """The outcome of the call. A caller that is cancelled leaves a call that runs already to its thread.

        Raises:
            Busy: too many calls wait.
        """
        pending = self._threads.pending
        if pending >= self._most:
            raise Busy(
                f"{pending} calls wait for {self._resource}", remedy="try again in a moment, with fewer calls at a time"
            )
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


class _Threads(futures.Executor):
    """As ThreadPoolExecutor, but the interpreter does not wait for the threads when it ends.

    Attributes:
        pending: calls that run or wait.
    """

    def __init__(self, name: str, most: int) -> None:
        self.pending = 0
        self._name = name
        self._most = most
        self._num_threads = 0
        self._lock = threading.Lock()
        self._calls: SimpleQueue[tuple[futures.Future[Any], Callable[[], Any]]] = SimpleQueue()

    def submit(self, call: Callable[..., _T], /, *args: object, **kwargs: object) -> futures.Future[_T]:
        """See concurrent.futures.Executor."""
        future: futures.Future[_T] = futures.Future()
        with self._lock:
            self._calls.put((future, lambda: call(*args, **kwargs)))
            self.pending += 1
            if self._num_threads < min(self._most, self.pending):
                self._num_threads += 1
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return future

    def _run(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Run one call; False when there was none for a while, and this thread shall end."""
        try:
            future, call = self._calls.get(timeout=_IDLE_S)
        except Empty:
            with self._lock:
                ends = self._calls.empty()
                self._num_threads -= ends
                return not ends
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(call())
        except BaseException as error:  # the caller's to judge, as with any executor
            future.set_exception(error)
        finally:
            with self._lock:
                self.pending -= 1
        return True
