"""Zeroes and copies of whole pages by a backend; implements `kvplane.rank.PageMover`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvplane_worker.ops.interface import PageOps
from kvplane_worker.pages.buffers import PageBuffers


@dataclass(frozen=True, slots=True)
class DeviceMoves:
    """The work that was queued on a CUDA stream before `event`; implements `kvplane.rank.Moves`."""

    event: torch.cuda.Event

    def have_ended(self) -> bool:
        """See `kvplane.rank.Moves`."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """See `kvplane.rank.Moves`."""
        self.event.synchronize()


@dataclass(frozen=True, slots=True)
class PageMover:
    """Zeroes and copies whole blocks of a rank's groups.

    On a GPU, calls are queued on PyTorch's current stream of the pages' device. Launches must use the same stream, so
    that they run after the zeroes and copies.
    """

    buffers: PageBuffers
    ops: PageOps

    @property
    def num_groups(self) -> int:
        """KV cache groups of the model."""
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
        """All calls so far, to poll or wait for; None for pages on the host, where calls are synchronous."""
        memory = self.buffers.memory
        if not memory.is_cuda:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(memory.device))
        return DeviceMoves(event)
