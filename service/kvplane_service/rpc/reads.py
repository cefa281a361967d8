"""Run long reads of a replica's state on a thread, while the replica does not change and others are served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

from kvplane_service.replicas.host import ReplicaHost
from kvplane_service.runtime.executors import Executor
from kvplane_service.runtime.slices import Turns

_T = TypeVar("_T")


class LongReads:
    """Runs long reads of all replicas of a service on one thread.

    A thread that reads a replica delays the steps of the replica's engine, so it must not wait for long work of other
    replicas. Therefore these reads have their own thread, and each waits for this thread before it blocks its replica.
    A running read takes the thread until the read ends, even if its caller is cancelled. A read that waits for its
    replica does not take the thread. A read that waits for the thread ends if its caller is cancelled.
    """

    def __init__(self, resource: str, max_waiting: int) -> None:
        """At most `max_waiting` reads wait; `resource` is their name in errors."""
        self._turns = Turns(resource, max_waiting)
        self._offload = Executor(resource)

    async def run(self, host: ReplicaHost, begin: Callable[[], Callable[[], _T]]) -> _T:
        """Call `begin` on the event loop when the replica is idle, run what it returns on the thread, and return the
        result.

        Raises Busy if too many reads wait, and what `begin` and the read raise.
        """
        with self._turns.place():
            await self._turns.begin(host.steps)
            return await host.steps.aside(self._begun(begin))  # begins before anything else: nothing is awaited

    def _begun(self, begin: Callable[[], Callable[[], _T]]) -> asyncio.Future[_T]:
        """Start the read on the thread and return its future, which releases the lock for the thread when the read
        ends. Raises what `begin` raises.
        """
        with ExitStack() as raising:
            raising.callback(self._turns.end)
            work = asyncio.ensure_future(self._offload(begin()))
            raising.pop_all()
        work.add_done_callback(lambda _: self._turns.end())
        return work
