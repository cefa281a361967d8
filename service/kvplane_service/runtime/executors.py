"""Run blocking or long calls on threads. Each resource has its own threads, so a resource that hangs delays no other
one.

The threads are daemon threads and end when idle, so a call that hangs does not delay the exit of the process.
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

_MAX_WAITING = 1024  # the default of max_replicas: after a restart the engines of all replicas may call at once
_IDLE_S = 10.0
_SWITCH_S = 0.001

_T = TypeVar("_T")


class Busy(Unavailable):
    """Too many calls wait for the resource that the message names. Client libraries retry automatically."""

    reason = "BUSY"


def share_interpreter() -> None:
    """Set the interpreter's thread switch interval to 1 ms instead of 5 ms, so that the event loop gets the interpreter
    sooner while a thread computes. Affects the whole process.
    """
    sys.setswitchinterval(_SWITCH_S)


class Offload(Protocol):
    """Runs a blocking call on a thread."""

    def __call__(self, call: Callable[[], _T], /) -> Awaitable[_T]:
        """Run the call, and return its result or raise its exception."""
        ...


class Executor:
    """An Offload for one resource. It may be created outside of an event loop, but must be called on one."""

    def __init__(self, resource: str, threads: int = 1, max_waiting: int = _MAX_WAITING) -> None:
        """At most `threads` calls run at a time, and at most `max_waiting` further calls wait."""
        self._resource = resource
        self._most = threads + max_waiting
        self._threads = _Threads(f"kvplane {resource}", threads)

    async def __call__(self, call: Callable[[], _T], /) -> _T:
        """Run the call on a thread, and return its result or raise its exception. Cancelling the caller does not stop a
        call that already runs.

        Raises:
            Busy: `max_waiting` calls already wait.
        """
        pending = self._threads.pending
        if pending >= self._most:
            raise Busy(
                f"{pending} calls run or wait for {self._resource}, the most allowed",
                remedy="retry with fewer concurrent calls",
            )
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


class _Threads(futures.Executor):
    """A ThreadPoolExecutor whose threads the interpreter does not join at exit.

    Attributes:
        pending: number of calls that run or wait.
    """

    def __init__(self, name: str, most: int) -> None:
        self.pending = 0
        self._name = name
        self._most = most
        self._num_threads = 0
        self._lock = threading.Lock()
        self._calls: SimpleQueue[tuple[futures.Future[Any], Callable[[], Any]]] = SimpleQueue()

    def submit(self, call: Callable[..., _T], /, *args: object, **kwargs: object) -> futures.Future[_T]:
        """Queue a call for the threads and return its future (see concurrent.futures.Executor.submit)."""
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
        """Run one call. Returns False if no call has arrived for _IDLE_S seconds, so that the thread ends."""
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
        except BaseException as error:  # raised in the caller, as with every executor
            future.set_exception(error)
        finally:
            with self._lock:
                self.pending -= 1
        return True
