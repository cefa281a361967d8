"""The route by buffers: fragments are gathered on the device by few multiprocessors, and carried by a copy engine.

The fragments of many blocks are gathered into one buffer, many times faster than the link carries them, while the copy
engine carries another:

    kernels      | gather 0 | gather 1 |      | gather 2 |
    copy engine             | copy 0        | copy 1       | copy 2 ...

Every fragment size then costs what a large copy costs. Pinned staging is copied at the link's speed without waiting;
other host memory is right too, only slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from kvplane_worker.ops.interface import GroupPages
from kvplane_worker.ops.triton_ops.kernels.moves import GATHER, SCATTER
from kvplane_worker.ops.triton_ops.link.lanes import BUFFERS, Lanes

# Each. Large enough that a copy takes hundreds of microseconds, beside which its start is nothing.
BUFFER_BYTES = 16 << 20

Stage = Callable[[int, GroupPages, Sequence[int], Tensor], None]


class BufferRoute:
    """Moves blocks of a device to and from rows on the host, in order with the current stream.

    Attributes:
        device: the pages'.
        stage: gathers into, or scatters from, rows on the device.
        lanes: of the device.
        buffer_bytes: of each buffer on the device; at least one block is moved at a time.
    """

    def __init__(self, device: torch.device, stage: Stage, lanes: Lanes, buffer_bytes: int = BUFFER_BYTES) -> None:
        self.device = device
        self.buffer_bytes = buffer_bytes
        self._stage = stage
        self._lanes = lanes
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
