"""The two streams of a host link, for kernels and for copies, and how they wait for each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

# One is filled while the other is copied.
BUFFERS = 2
# Most staging buffers that are kept until their copies are done.
MAX_KEPT = 64


class Lanes(Protocol):
    """Runs kernels and copies. Buffers alternate; a buffer is used by one of the two at a time."""

    def kernels(self, turn: int) -> AbstractContextManager[None]:
        """A context in which kernels may use the buffer of this turn: they wait for its last copy."""

    def copies(self, turn: int) -> AbstractContextManager[None]:
        """A context in which copies may use the buffer of this turn, on their own stream: they wait for its last
        kernel.
        """

    def copy_stream(self, staging: Tensor) -> AbstractContextManager[int]:
        """A context that yields a stream for copies between pages and `staging`. The copies run after the work already
        on the current stream, and before its later work. `staging` is kept alive until they are done.
        """

    def fork(self) -> None:
        """Let copies wait for the work already on the current stream, which may fill the rows on the host."""

    def join(self) -> None:
        """Let later work of the current stream wait for all copies."""

    def wait(self) -> None:
        """Wait until the current stream has finished its work."""


def lanes_of(device: torch.device) -> Lanes:
    """The lanes of a device."""
    return CudaLanes(device) if device.type == "cuda" else OneLane()


class OneLane:
    """Synchronous: kernels and copies both run on the host."""

    def kernels(self, turn: int) -> AbstractContextManager[None]:
        """See `Lanes`; nothing is asynchronous here."""
        return nullcontext()

    copies = kernels

    def copy_stream(self, staging: Tensor) -> AbstractContextManager[int]:
        """See `Lanes`."""
        return nullcontext(0)

    def fork(self) -> None:
        """See `Lanes`."""

    join = wait = fork


class CudaLanes:
    """Kernels run on the current stream, copies on a second one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied = [torch.cuda.Event() for _ in range(BUFFERS)]  # type: ignore[no-untyped-call]
        self._used = [torch.cuda.Event() for _ in range(BUFFERS)]  # type: ignore[no-untyped-call]
        self._kept: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    @contextmanager
    def kernels(self, turn: int) -> Iterator[None]:
        """See `Lanes`."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._copied[turn % BUFFERS])
        yield
        self._used[turn % BUFFERS].record(stream)

    @contextmanager
    def copies(self, turn: int) -> Iterator[None]:
        """See `Lanes`."""
        self._copies.wait_event(self._used[turn % BUFFERS])
        with torch.cuda.stream(self._copies):
            yield
        self._copied[turn % BUFFERS].record(self._copies)

    @contextmanager
    def copy_stream(self, staging: Tensor) -> Iterator[int]:
        """See `Lanes`.
        PyTorch does not track these copies: without the reference, it would reuse freed pinned memory.
        """
        self.fork()
        with torch.cuda.device(self._device):
            yield self._copies.cuda_stream
        self._keep(staging)
        self.join()

    def fork(self) -> None:
        """See `Lanes`."""
        self._copies.wait_stream(torch.cuda.current_stream(self._device))

    def join(self) -> None:
        """See `Lanes`."""
        torch.cuda.current_stream(self._device).wait_stream(self._copies)

    def wait(self) -> None:
        """See `Lanes`."""
        torch.cuda.current_stream(self._device).synchronize()

    def _keep(self, staging: Tensor) -> None:
        """Keep a reference to staging until the copies so far are done. Drops finished ones; waits above `MAX_KEPT`."""
        while self._kept:
            first = self._kept[0][0]
            if len(self._kept) < MAX_KEPT and not first.query():  # type: ignore[no-untyped-call]
                break
            first.synchronize()
            self._kept.popleft()
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._copies)
        self._kept.append((done, staging))
