"""Run blocking or long calls on threads. Each resource has its own threads, so a resource that hangs delays no other
one.

The threads are daemon threads and end when idle, so a call that hangs does not delay the exit of the process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent import futures
from typing import Any, Protocol, TypeVar

from kvplane_service.runtime.rota import OWNER, Places, Rota

_MAX_WAITING = 1024  # the default of max_replicas: after a restart the engines of all replicas may call at once
_IDLE_S = 10.0

_T = TypeVar("_T")


class Offload(Protocol):
    """Runs a blocking call on a thread."""

    def __call__(self, call: Callable[[], _T], /) -> Awaitable[_T]:
        """Run the call, and return its result or raise its exception."""


class Executor:
    """An Offload for one resource. It may be created outside of an event loop, but must be called on one. The owners of
    the calls are served in turn, see `rota`.
    """

    def __init__(self, resource: str, threads: int = 1, max_waiting: int = _MAX_WAITING) -> None:
        """At most `threads` calls run at a time, and at most `max_waiting` further calls of an owner wait."""
        self._threads = _Threads(resource, threads, max_waiting, self._owner)

    async def __call__(self, call: Callable[[], _T], /) -> _T:
        """Run the call on a thread, and return its result or raise its exception. Cancelling the caller does not stop a
        call that already runs.

        Raises:
            Busy: `max_waiting` calls of the owner already wait.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _owner(self) -> str:
        return OWNER.get()


class InOrder(Executor):
    """An Executor for a resource of the service: all calls run in their order, not by owner."""

    def _owner(self) -> str:
        return ""


class _Threads(futures.Executor):
    """Threads that the interpreter does not join at exit, with a queue of calls."""

    def __init__(self, resource: str, most: int, max_waiting: int, owner: Callable[[], str]) -> None:
        """`owner` returns the owner of the call that is queued now."""
        self._name = f"kvplane {resource}"
        self._most, self._owner = most, owner
        self._num_threads = self._num_idle = 0
        self._places = Places(resource, most + max_waiting)
        self._calls = Rota[tuple[str, futures.Future[Any], Callable[[], Any]]]()
        self._changed = threading.Condition()  # guards all of them

    def submit(self, call: Callable[..., _T], /, *args: object, **kwargs: object) -> futures.Future[_T]:
        """Queue a call for the threads and return its future (see concurrent.futures.Executor.submit). Raises Busy."""
        future: futures.Future[_T] = futures.Future()
        owner = self._owner()
        with self._changed:
            self._places.take(owner)
            self._calls.put(owner, (owner, future, lambda: call(*args, **kwargs)))
            if self._num_idle >= len(self._calls):
                self._changed.notify()
            elif self._num_threads < self._most:
                self._num_threads += 1
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return future

    def _run(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Run one call. Returns False if no call has arrived for _IDLE_S seconds, so that the thread ends."""
        with self._changed:
            self._num_idle += 1
            is_there = self._changed.wait_for(lambda: len(self._calls) > 0, _IDLE_S)
            self._num_idle -= 1
            if not is_there:
                self._num_threads -= 1
                return False
            owner, future, call = self._calls.take()
        is_wanted, result, raised = future.set_running_or_notify_cancel(), None, None
        try:
            result = call() if is_wanted else None
        except BaseException as error:  # raised in the caller, as with every executor
            raised = error
        with self._changed:
            self._places.leave(owner)  # before the caller knows: it may call again at once
        if raised is not None:
            future.set_exception(raised)
        elif is_wanted:
            future.set_result(result)
        return True
