"""An event loop with virtual time, and processes that can die or pause at any await.

When every task waits for a timer, the clock jumps to it. So a run is a function of its seed. A process is the set of
tasks that were started in it; when it dies, they stop without running `finally` or `except`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar, copy_context
from inspect import CORO_CREATED, getcoroutinestate
from random import Random
from typing import Any

NS_PER_S = 1_000_000_000
_THREAD_S = 0.002  # maximum duration of work on a thread


class Killed(BaseException):
    """The running process dies here."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Jumps to the next timer. Work for threads runs on this loop, a little later."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self._now_s = 0.0
        self._rng = rng
        self._selector = self
        self.set_task_factory(_make_task)

    def time(self) -> float:
        return self._now_s

    def clock_ns(self) -> int:
        """The clock that the product is given."""
        return int(self._now_s * NS_PER_S)

    def select(self, timeout_s: float | None) -> list[Any]:
        """Replaces waiting for sockets."""
        if timeout_s is None:
            raise RuntimeError("everything waits, and no timer will wake it")
        self._now_s += timeout_s
        return []

    def _check_closed(self) -> None:
        """Ignores calls of garbage-collected tasks of dead processes."""

    def _process_events(self, event_list: list[Any]) -> None:
        assert not event_list

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Implements `asyncio.to_thread`."""
        del executor
        outcome = self.create_future()

        def run() -> None:
            if outcome.cancelled():
                return
            try:
                outcome.set_result(func(*args))
            except Exception as error:
                outcome.set_exception(error)

        self.call_later(self._rng.uniform(0, _THREAD_S), run)
        return outcome


class Process:
    """Tasks that run, pause and die together.

    Attributes:
        crash_in: awaits until it dies; -1 = never.
        bugs: unexpected exceptions of its tasks.
    """

    def __init__(self, name: str, pid: int) -> None:
        self.name, self.pid = name, pid
        self.alive = True
        self.crash_in = -1
        self.bugs: list[BaseException] = []
        self.on_death: list[Callable[[], None]] = []
        self._paused: list[asyncio.Future[None]] | None = None  # tasks that wait for its end
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._graves: list[Any] = []  # coroutines that never continue: closing them would run their `finally` blocks

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task in this process."""
        context = copy_context()
        context.run(_HERE.set, self)
        task = asyncio.get_running_loop().create_task(work, context=context)
        task.add_done_callback(self._note_bug)
        return task

    def kill(self) -> None:
        """SIGKILL."""
        if not self.alive:
            return
        self.alive = False
        self.resume()
        for task in list(self._tasks):
            task.cancel()
        for act in self.on_death:
            act()

    def die_here(self) -> None:
        """Crash in the middle of a function."""
        self.kill()
        raise Killed

    def has_exited(self) -> bool:
        """See kvplane_worker.lending.writer.Watched."""
        return not self.alive

    def close(self) -> None:
        """See kvplane_worker.lending.writer.Watched."""

    @property
    def paused(self) -> bool:
        return self._paused is not None

    def pause(self) -> None:
        """SIGSTOP."""
        if self.alive and self._paused is None:
            self._paused = []

    def resume(self) -> None:
        """SIGCONT."""
        waiting, self._paused = self._paused, None
        for one in waiting or ():
            if not one.done():
                one.set_result(None)

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """A task was started in this process."""
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    def bury(self, work: Any) -> None:
        """Keep a coroutine that never continues; one that has not started is closed."""
        if getcoroutinestate(work) == CORO_CREATED:
            work.close()
        self._graves.append(work)

    def waits_for(self) -> asyncio.Future[None] | None:
        """The future that a task must wait for before it continues; may kill the process."""
        if self.crash_in >= 0:
            self.crash_in -= 1
            if self.crash_in < 0:
                self.kill()
        if self._paused is None:
            return None
        waiting = asyncio.get_running_loop().create_future()
        self._paused.append(waiting)
        return waiting

    def _note_bug(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task.exception() is not None and self.alive:
            self.bugs.append(task.exception())  # type: ignore[arg-type]


_HERE: ContextVar[Process | None] = ContextVar("process", default=None)


def this_process() -> Process:
    """The process that is running."""
    process = _HERE.get()
    assert process is not None
    return process


class _Mortal(Coroutine[Any, Any, Any]):
    """A coroutine that continues only while its process runs."""

    def __init__(self, work: Any, process: Process) -> None:
        self._work, self._process = work, process
        self._late: tuple[Any, ...] = ()  # thrown while the process was paused

    def send(self, value: Any) -> Any:
        late, self._late = self._late, ()
        return self.throw(*late) if late else self._go_on(self._work.send, value)

    def throw(self, *error: Any) -> Any:
        return self._go_on(self._work.throw, *error)

    def close(self) -> None:
        self._process.bury(self._work)

    def __await__(self) -> Generator[Any, Any, Any]:
        raise AssertionError("only its task awaits it")

    def _go_on(self, act: Callable[..., Any], *given: Any) -> Any:
        process = self._process
        if process.alive:
            waits_for = process.waits_for()
            if waits_for is not None:
                self._late = given if act == self._work.throw else ()
                waits_for._asyncio_future_blocking = True
                return waits_for
        if process.alive:
            try:
                outcome = act(*given)
            except Killed:
                outcome = None
            if process.alive:
                return outcome
        process.bury(self._work)
        raise asyncio.CancelledError


def _make_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    context = options.get("context")
    process = context.get(_HERE) if context is not None else _HERE.get()
    if process is None:
        return asyncio.Task(work, loop=loop, **options)
    task: asyncio.Task[Any] = asyncio.Task(_Mortal(work, process), loop=loop, **options)
    process.adopt(task)
    return task
