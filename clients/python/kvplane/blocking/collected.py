"""Cancel the gRPC calls of objects that are garbage collected, on a thread.

The collector runs on any thread, at any allocation, also where that thread holds a lock of gRPC. `cancel` of a call
takes locks, so it could wait there indefinitely; to put the call into a SimpleQueue waits for nothing.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Protocol


class _Call(Protocol):
    def cancel(self) -> object: ...


_calls: SimpleQueue[_Call] = SimpleQueue()
_starting = threading.Lock()
_threads: list[threading.Thread] = []


def prepare() -> None:
    """Start the thread, if it does not run. Call it before a call that `cancel_later` may get: a finalizer must not
    start a thread.
    """
    with _starting:
        if not any(one.is_alive() for one in _threads):  # a fork leaves no thread
            _threads[:] = [threading.Thread(target=_run, name="kvplane-collected", daemon=True)]
            _threads[0].start()


def cancel_later(call: _Call) -> None:
    """Cancel a call on the thread. Takes no lock."""
    _calls.put(call)


def _run() -> None:
    while True:
        _calls.get().cancel()
