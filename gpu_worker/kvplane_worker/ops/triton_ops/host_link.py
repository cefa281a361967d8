"""Between pages on a device and staging on the host: gathered by few multiprocessors, carried by the copy engine.

Small fragments are what makes the link slow: each is a transfer of its own. So the fragments of many blocks are
gathered into one buffer on the device, many times faster than the link carries them, while the copy engine carries
another:

    kernels      | gather 0 | gather 1 |      | gather 2 |
    copy engine             | copy 0        | copy 1       | copy 2 ...

Every fragment size then costs what a large copy costs. Pinned staging is copied at the link's speed without waiting;
other host memory is right too, only slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from kvplane_worker.ops.interface import GroupPages
from kvplane_worker.ops.triton_ops.kernels.moves import GATHER, SCATTER

# Two of them. Large enough that a copy takes hundreds of microseconds, beside which its start is nothing.
BUFFER_BYTES = 16 << 20
BUFFERS = 2

Stage = Callable[[int, GroupPages, Sequence[int], Tensor], None]


class HostLink:
    """Moves blocks of a device to and from rows on the host, in order with the current stream.

    Attributes:
        device: the pages'.
        stage: gathers into, or scatters from, rows on the device.
        buffer_bytes: of each buffer on the device; at least one block is moved at a time.
    """

    def __init__(self, device: torch.device, stage: Stage, buffer_bytes: int = BUFFER_BYTES) -> None:
        self.device = device
        self.buffer_bytes = buffer_bytes
        self._stage = stage
        self._lanes: CudaLanes | OneLane = CudaLanes(device) if device.type == "cuda" else OneLane()
        self._buffers: list[Tensor] = []

    def save(self, group: GroupPages, blocks: Sequence[int], staging: Tensor) -> None:
        """Copy blocks into rows of host memory. Pinned rows are there when the current stream has come so far."""
        for turn, (some, rows) in enumerate(self._pieces(group, blocks, staging)):
            buffer = self._buffer(turn, rows)
            with self._lanes.kernels(turn):
                self._stage(int(GATHER), group, some, buffer)
            with self._lanes.copies(turn):
                rows.copy_(buffer, non_blocking=True)
        self._lanes.join()

    def load(self, group: GroupPages, blocks: Sequence[int], staging: Tensor) -> None:
        """The reverse of `save`. Pinned rows may change once the current stream has come so far."""
        self._lanes.fork()
        for turn, (some, rows) in enumerate(self._pieces(group, blocks, staging)):
            buffer = self._buffer(turn, rows)
            with self._lanes.copies(turn):
                buffer.copy_(rows, non_blocking=True)
            with self._lanes.kernels(turn):
                self._stage(int(SCATTER), group, some, buffer)
        self._lanes.join()

    def _pieces(
        self, group: GroupPages, blocks: Sequence[int], staging: Tensor
    ) -> Iterator[tuple[Sequence[int], Tensor]]:
        """Blocks that fill a buffer, and their rows."""
        at_once = max(1, self.buffer_bytes // max(1, group.bytes_per_block))
        for start in range(0, len(blocks), at_once):
            yield blocks[start : start + at_once], staging[start : start + at_once]

    def _buffer(self, turn: int, rows: Tensor) -> Tensor:
        """The buffer whose turn it is, as rows; made larger when a block is larger than ever before."""
        needed = rows.shape[0] * rows.shape[1]
        if not self._buffers or self._buffers[0].numel() < needed:
            size = max(self.buffer_bytes, needed)
            self._lanes.join()
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(BUFFERS)]
        return self._buffers[turn % BUFFERS][:needed].view(rows.shape)


class OneLane:
    """Kernels and copies one after the other: the host itself does both."""

    def kernels(self, turn: int) -> AbstractContextManager[None]:
        """See `CudaLanes`; here nothing is under way."""
        return nullcontext()

    copies = kernels

    def fork(self) -> None:
        """See `CudaLanes`."""

    join = fork


class CudaLanes:
    """Kernels on the current stream, copies on another; a buffer is in the hands of one of them at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied = [torch.cuda.Event() for _ in range(BUFFERS)]  # type: ignore[no-untyped-call]
        self._used = [torch.cuda.Event() for _ in range(BUFFERS)]  # type: ignore[no-untyped-call]

    @contextmanager
    def kernels(self, turn: int) -> Iterator[None]:
        """Within, kernels may use the buffer of this turn: they wait for its last copy."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._copied[turn % BUFFERS])
        yield
        self._used[turn % BUFFERS].record(stream)

    @contextmanager
    def copies(self, turn: int) -> Iterator[None]:
        """Within, copies may use the buffer of this turn, on their own stream: they wait for the last kernel on it."""
        self._copies.wait_event(self._used[turn % BUFFERS])
        with torch.cuda.stream(self._copies):
            yield
        self._copied[turn % BUFFERS].record(self._copies)

    def fork(self) -> None:
        """Let copies wait for what the current stream has been given so far: it may fill the host's rows."""
        self._copies.wait_stream(torch.cuda.current_stream(self._device))

    def join(self) -> None:
        """Let what the current stream does next wait for all copies."""
        torch.cuda.current_stream(self._device).wait_stream(self._copies)
