"""An event loop in its own thread, and blocking wrappers of the objects on it.

All of gRPC's asyncio in a process should live on one loop: on several it works, but floods the log with errors of
its poller. So tests share one.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

_T = TypeVar("_T")
LIMIT_S = 20.0  # of everything that a test waits for


class LoopThread:
    """Runs coroutines for other threads."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def do(self, act: Callable[..., Awaitable[_T]], *args: object, **facts: object) -> _T:
        """Call a function on the loop and wait for what it awaits."""

        async def run() -> _T:
            return await act(*args, **facts)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(LIMIT_S)

    def make(self, kind: Callable[..., _T], *args: object, **facts: object) -> _T:
        """Call a plain function on the loop."""

        async def run() -> _T:
            return kind(*args, **facts)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(LIMIT_S)


@functools.cache
def shared_loop() -> LoopThread:
    """The loop of this process; it stays until the end."""
    return LoopThread()


def on_shared_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Turn an asynchronous test into one that pytest runs as any other."""

    @functools.wraps(test)
    def run(*args: object, **fixtures: object) -> None:
        shared_loop().do(test, *args, **fixtures)

    return run


class Blocking:
    """Something of asyncio with blocking methods; its plain attributes are passed on."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._loop = shared_loop()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if inspect.iscoroutinefunction(value):
            return lambda *args, **facts: self._loop.do(value, *args, **facts)
        return value

    def __enter__(self) -> Blocking:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Awaited:
    """Something blocking, but quick, with methods that are awaited; what it says of itself is not."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if not callable(method):
            return method

        async def call(*args: object, **facts: object) -> Any:
            return method(*args, **facts)

        return call
