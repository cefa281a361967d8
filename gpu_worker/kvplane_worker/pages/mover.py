"""Orders on pages, carried out by a backend: what `kvplane.rank.Rank` moves pages with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvplane_worker.ops.interface import PageOps
from kvplane_worker.pages.buffers import PageBuffers


@dataclass(frozen=True, slots=True)
class PageMover:
    """Zeroes and copies whole blocks of a rank's groups."""

    buffers: PageBuffers
    ops: PageOps

    @property
    def num_groups(self) -> int:
        """KV cache groups."""
        return self.buffers.num_groups

    def zero(self, group: int, blocks: Sequence[int]) -> None:
        """Set every byte of the blocks to 0."""
        pages = self.buffers.group(group)
        if pages.layers:  # a pipeline stage may hold no layer of a group
            self.ops.zero_pages(pages, blocks)

    def copy(self, group: int, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy block src[i] to dst[i], as if one after the other."""
        pages = self.buffers.group(group)
        if pages.layers:
            self.ops.copy_pages(pages, src, dst)
