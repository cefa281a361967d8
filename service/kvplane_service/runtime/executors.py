"""Threads for blocking or long calls. Each resource has its own, so that a resource that hangs delays no other one.

The threads are daemons and exit when idle, so that a call that hangs does not delay the exit of the process.
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

_MAX_WAITING = 1024  # the default of max_replicas: after a restart all may call at once
_IDLE_S = 10.0
_SWITCH_S = 0.001

_T = TypeVar("_T")


class Busy(Unavailable):
    """Too many calls wait for a resource of the service, which the message names. Clients retry automatically."""

    reason = "BUSY"


def share_interpreter() -> None:
    """Let the event loop preempt a working thread after 1 ms instead of 5 ms. Affects the whole process."""
    sys.setswitchinterval(_SWITCH_S)


class Offload(Protocol):
    """Runs a blocking call on a thread."""

    def __call__(self, call: Callable[[], _T], /) -> Awaitable[_T]:
        """The result of the call, or its exception."""
        ...


class Executor:
    """Implements Offload for one resource. Can be created outside of an event loop; call it on one."""

    def __init__(self, resource: str, threads: int = 1, max_waiting: int = _MAX_WAITING) -> None:
        """At most `threads` calls run and `max_waiting` more wait."""
        self._resource = resource
        self._most = threads + max_waiting
        self._threads = _Threads(f"kvplane {resource}", threads)

    async def __call__(self, call: Callable[[], _T], /) -> _T:
        """The result of the call, or its exception. Cancelling the caller does not stop a call that already runs.

        Raises:
            Busy: too many calls wait.
        """
        pending = self._threads.pending
        if pending >= self._most:
            raise Busy(
                f"{pending} calls wait for {self._resource}", remedy="retry with fewer concurrent calls"
            )
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


class _Threads(futures.Executor):
    """As ThreadPoolExecutor, but the interpreter does not join the threads at exit.

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
        """Run one call. Returns False when the thread has been idle long enough to exit."""
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
