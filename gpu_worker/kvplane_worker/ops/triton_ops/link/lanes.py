"""Two lanes of a device, kernels and copies, and what each waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

# One is filled while the other is carried.
BUFFERS = 2
# Staging buffers whose copies are under way.
MAX_KEPT = 64


class Lanes(Protocol):
    """Where kernels and copies run; buffers take turns, and one is in the hands of one lane at a time."""

    def kernels(self, turn: int) -> AbstractContextManager[None]:
        """Within, kernels may use the buffer of this turn: they wait for its last copy."""

    def copies(self, turn: int) -> AbstractContextManager[None]:
        """Within, copies may use the buffer of this turn, on their own stream: they wait for the last kernel on it."""

    def aside(self, staging: Tensor) -> AbstractContextManager[int]:
        """Within, copies between pages and `staging` may begin on the stream that is given, in order with the current
        one on both sides. The memory of `staging` is kept until they are done.
        """

    def fork(self) -> None:
        """Let copies wait for what the current stream has been given so far: it may fill the host's rows."""

    def join(self) -> None:
        """Let what the current stream does next wait for all copies."""

    def wait(self) -> None:
        """Return when the current stream has done all that it was given."""


def lanes_of(device: torch.device) -> Lanes:
    """The lanes of a device."""
    return CudaLanes(device) if device.type == "cuda" else OneLane()


class OneLane:
    """Kernels and copies one after the other: the host itself does both."""

    def kernels(self, turn: int) -> AbstractContextManager[None]:
        """See `Lanes`; here nothing is under way."""
        return nullcontext()

    copies = kernels

    def aside(self, staging: Tensor) -> AbstractContextManager[int]:
        """See `Lanes`."""
        return nullcontext(0)

    def fork(self) -> None:
        """See `Lanes`."""

    join = wait = fork


class CudaLanes:
    """Kernels on the current stream, copies on another."""

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
    def aside(self, staging: Tensor) -> Iterator[int]:
        """See `Lanes`. Torch does not know of these copies: it would give freed pinned memory to the next who asks."""
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
        """Hold the staging until the copies so far are done, and let go of what is done; wait where there is much."""
        while self._kept:
            first = self._kept[0][0]
            if len(self._kept) < MAX_KEPT and not first.query():  # type: ignore[no-untyped-call]
                break
            first.synchronize()
            self._kept.popleft()
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._copies)
        self._kept.append((done, staging))
