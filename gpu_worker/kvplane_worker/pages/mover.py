"""Zeroing and copying of whole pages by a backend. Implements `kvplane.rank.PageMover`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvplane_kernels.interface import PageOps
from kvplane_worker.pages.buffers import PageBuffers


@dataclass(frozen=True, slots=True)
class DeviceMoves:
    """The zeroing and copying that was queued on a CUDA stream before `event`. Implements `kvplane.rank.Moves`."""

    event: torch.cuda.Event

    def have_ended(self) -> bool:
        """Return whether the device has completed the work, without waiting."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until the device has completed the work."""
        self.event.synchronize()


@dataclass(frozen=True, slots=True)
class PageMover:
    """Zero and copy whole blocks of a rank's groups.

    On a GPU, calls are queued on PyTorch's current stream of the pages' device. Launches must use the same stream, so
    that the launches run after the calls.
    """

    buffers: PageBuffers
    ops: PageOps

    @property
    def num_groups(self) -> int:
        """The number of KV cache groups of the model."""
        return self.buffers.num_groups

    def zero(self, group: int, blocks: Sequence[int]) -> None:
        """Set every byte of the blocks to 0."""
        pages = self.buffers.group(group)
        if pages.layers:  # a pipeline stage may hold no layer of a group
            self.ops.zero_pages(pages, blocks)

    def copy(self, group: int, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy block src[i] to dst[i], with the result of copying in order."""
        pages = self.buffers.group(group)
        if pages.layers:
            self.ops.copy_pages(pages, src, dst)

    def moves(self) -> DeviceMoves | None:
        """Return a handle of all calls of `zero` and `copy` so far, to poll or wait for; None for pages on the host,
        where calls are synchronous.
        """
        memory = self.buffers.memory
        if not memory.is_cuda:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(memory.device))
        return DeviceMoves(event)
