"""The buffered route: kernels on few multiprocessors gather fragments into buffers, and a copy engine copies the
buffers.

Two buffers alternate. While the copy engine copies one, a kernel gathers the fragments of many blocks into the other,
many times faster than the link:

    kernels      | gather 0 | gather 1 |      | gather 2 |
    copy engine             | copy 0        | copy 1       | copy 2 ...

So fragments of any size are copied at the speed of large copies. Pinned staging is copied asynchronously; other host
memory works too, but slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from kvplane_kernels.interface import GroupPages
from kvplane_kernels.triton_ops.kernels.moves import GATHER, SCATTER
from kvplane_kernels.triton_ops.link.lanes import BUFFERS, Lanes
from kvplane_kernels.triton_ops.moves import on_device

# Bytes of each buffer: a copy takes hundreds of microseconds, so that the cost of its start is negligible.
BUFFER_BYTES = 16 << 20

# (operation, group, block ids on the device, rows on the device)
Stage = Callable[[int, GroupPages, Tensor, Tensor], None]


class BufferRoute:
    """Copy blocks of a device to and from rows on the host, in order with the current stream.

    Attributes:
        device: device of the pages.
        buffer_bytes: bytes of each buffer on the device; at least one block is copied at a time.
    """

    def __init__(self, device: torch.device, stage: Stage, lanes: Lanes, buffer_bytes: int = BUFFER_BYTES) -> None:
        self.device = device
        self.buffer_bytes = buffer_bytes
        self._stage = stage
        self._lanes = lanes
        self._buffers: list[Tensor] = []

    def save(self, group: GroupPages, blocks: Sequence[int], staging: Tensor) -> None:
        """Copy blocks into rows of host memory, uint8 [len(blocks), bytes per block].

        Rows in pinned memory are complete once the current stream has completed this call's work.
        """
        for turn, (some, rows) in enumerate(self._pieces(group, blocks, staging)):
            buffer = self._buffer(turn, rows)
            with self._lanes.kernels(turn):
                self._stage(int(GATHER), group, on_device(some, self.device), buffer)
            with self._lanes.copies(turn):
                rows.copy_(buffer, non_blocking=True)
        self._lanes.join()

    def load(self, group: GroupPages, blocks: Sequence[int], staging: Tensor) -> None:
        """Copy rows of host memory, uint8 [len(blocks), bytes per block], into blocks.

        Rows in pinned memory may change once the current stream has completed this call's work.
        """
        self._lanes.fork()
        for turn, (some, rows) in enumerate(self._pieces(group, blocks, staging)):
            buffer = self._buffer(turn, rows)
            # The ids go before the rows: on the kernels' stream they would wait for the next rows, as the same engine
            # copies them. The kernel's stream keeps their memory.
            with self._lanes.copies(turn):
                ids = on_device(some, self.device)
                buffer.copy_(rows, non_blocking=True)
            with self._lanes.kernels(turn):
                self._stage(int(SCATTER), group, ids, buffer)
                self._lanes.keep(ids)
        self._lanes.join()

    def _pieces(
        self, group: GroupPages, blocks: Sequence[int], staging: Tensor
    ) -> Iterator[tuple[Sequence[int], Tensor]]:
        """Yield blocks and rows in pieces that fit into a buffer."""
        at_once = max(1, self.buffer_bytes // max(1, group.bytes_per_block))
        for start in range(0, len(blocks), at_once):
            yield blocks[start : start + at_once], staging[start : start + at_once]

    def _buffer(self, turn: int, rows: Tensor) -> Tensor:
        """Return the buffer of this turn, as rows. Buffers are allocated again if a piece is larger."""
        needed = rows.shape[0] * rows.shape[1]
        if not self._buffers or self._buffers[0].numel() < needed:
            size = max(self.buffer_bytes, needed)
            self._lanes.join()
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(BUFFERS)]
        return self._buffers[turn % BUFFERS][:needed].view(rows.shape)
