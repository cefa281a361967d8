"""The two streams of a host link, one for kernels and one for copies, and how each waits for the other."""

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
    """The interface that runs kernels and copies which share two buffers. At any time either kernels or copies use a
    buffer.
    """

    def kernels(self, turn: int) -> AbstractContextManager[None]:
        """Return a context in which kernels may use the buffer of this turn: the kernels wait for the last copy of the
        buffer.
        """

    def copies(self, turn: int) -> AbstractContextManager[None]:
        """Return a context in which copies may use the buffer of this turn, on the copies' own stream: the copies wait
        for the last kernel of the buffer.
        """

    def copy_stream(self, staging: Tensor) -> AbstractContextManager[int]:
        """Return a context that yields a stream for copies between pages and `staging`.

        The copies run after the work already on the current stream, and before its later work. `staging` is not freed
        until the copies are complete.
        """

    def fork(self) -> None:
        """Let copies wait for the work already on the current stream, which may fill the rows on the host."""

    def join(self) -> None:
        """Let later work of the current stream wait for all copies."""

    def keep(self, tensor: Tensor) -> None:
        """Let the memory of a tensor of the copies' stream be used again only after the work already on the current
        stream.
        """

    def wait(self) -> None:
        """Wait until the current stream has finished its work."""


def lanes_of(device: torch.device) -> Lanes:
    """Return the implementation for a device."""
    return CudaLanes(device) if device.type == "cuda" else OneLane()


class OneLane:
    """The implementation for the host, where kernels and copies are synchronous."""

    def kernels(self, turn: int) -> AbstractContextManager[None]:
        """Return a context that does nothing, since nothing is asynchronous here."""
        return nullcontext()

    copies = kernels

    def copy_stream(self, staging: Tensor) -> AbstractContextManager[int]:
        """Return a context that yields the default stream, 0."""
        return nullcontext(0)

    def fork(self) -> None:
        """Do nothing: there is nothing to wait for."""

    join = wait = fork

    def keep(self, tensor: Tensor) -> None:
        """Do nothing: the work has ended."""


class CudaLanes:
    """The implementation for CUDA: kernels run on the current stream, copies on a second one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied = [torch.cuda.Event() for _ in range(BUFFERS)]  # type: ignore[no-untyped-call]
        self._used = [torch.cuda.Event() for _ in range(BUFFERS)]  # type: ignore[no-untyped-call]
        self._kept: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    @contextmanager
    def kernels(self, turn: int) -> Iterator[None]:
        """Return a context in which kernels wait for the buffer's last copy; see `Lanes.kernels`."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._copied[turn % BUFFERS])
        yield
        self._used[turn % BUFFERS].record(stream)

    @contextmanager
    def copies(self, turn: int) -> Iterator[None]:
        """Return a context in which copies wait for the buffer's last kernel; see `Lanes.copies`."""
        self._copies.wait_event(self._used[turn % BUFFERS])
        with torch.cuda.stream(self._copies):
            yield
        self._copied[turn % BUFFERS].record(self._copies)

    @contextmanager
    def copy_stream(self, staging: Tensor) -> Iterator[int]:
        """Return a context that yields the stream for copies to and from `staging`; see `Lanes.copy_stream`.

        PyTorch does not track these copies: without a reference to `staging`, it would reuse the freed pinned memory.
        """
        self.fork()
        with torch.cuda.device(self._device):
            yield self._copies.cuda_stream
        self._keep(staging)
        self.join()

    def fork(self) -> None:
        """Let copies wait for the work on the current stream."""
        self._copies.wait_stream(torch.cuda.current_stream(self._device))

    def join(self) -> None:
        """Let later work of the current stream wait for all copies."""
        torch.cuda.current_stream(self._device).wait_stream(self._copies)

    def keep(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor until the current stream has used it; see `Lanes.keep`."""
        tensor.record_stream(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Wait until the current stream has finished its work."""
        torch.cuda.current_stream(self._device).synchronize()

    def _keep(self, staging: Tensor) -> None:
        """Keep a reference to `staging` until the copies so far are complete. Drops references whose copies are
        complete; waits if `MAX_KEPT` references are kept.
        """
        while self._kept:
            first = self._kept[0][0]
            if len(self._kept) < MAX_KEPT and not first.query():  # type: ignore[no-untyped-call]
                break
            first.synchronize()
            self._kept.popleft()
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._copies)
        self._kept.append((done, staging))
