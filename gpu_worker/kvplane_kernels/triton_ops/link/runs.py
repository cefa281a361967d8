"""Copies between pages and staging, merged: fragments that are adjacent on both sides form one run.

staging row r:  | layer 0 of blocks[r] | layer 1 of blocks[r] | ...    in order of addresses
pages:          layers of a block adjacent (block-outermost): one run per block; consecutive blocks: one run
                layers separate: one run per block and layer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvplane_kernels.interface import GroupPages


@dataclass(frozen=True, slots=True)
class Runs:
    """Copies between pages and staging, merged as far as possible.

    Attributes:
        pages: addresses of the first bytes in pages.
        rows: addresses of the first bytes in staging.
        sizes: bytes of each run, above 0.
    """

    pages: list[int]
    rows: list[int]
    sizes: list[int]

    @property
    def num_bytes(self) -> int:
        """The bytes of all runs."""
        return sum(self.sizes)

    @property
    def mean_bytes(self) -> int:
        """The mean number of bytes of a run; 0 if there are no runs."""
        return self.num_bytes // max(1, len(self.sizes))


def merged_runs(group: GroupPages, blocks: Sequence[int], staging: Tensor) -> Runs:
    """Return the runs between blocks and the rows of staging, in the order of the rows. The runs cover each byte
    exactly once.
    """
    widths = torch.tensor([layer.shape[1] for layer in group.layers])
    bases = torch.tensor([layer.data_ptr() for layer in group.layers])
    strides = torch.tensor([layer.stride(0) for layer in group.layers])
    ids, places = torch.tensor(blocks, dtype=torch.int64), torch.arange(len(blocks))
    pages = (bases + ids[:, None] * strides).flatten()
    rows = (staging.data_ptr() + places[:, None] * staging.stride(0) + widths.cumsum(0) - widths).flatten()
    return merged(pages, rows, widths.repeat(len(blocks)))


def merged(pages: Tensor, rows: Tensor, sizes: Tensor) -> Runs:
    """Merge fragments, int64 [fragments] on the host, into runs. Empty fragments are left out."""
    held = sizes > 0
    pages, rows, sizes = pages[held], rows[held], sizes[held]
    begins = torch.ones_like(sizes, dtype=torch.bool)
    begins[1:] = (pages[1:] != pages[:-1] + sizes[:-1]) | (rows[1:] != rows[:-1] + sizes[:-1])
    first = begins.nonzero().flatten()
    before = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    ends = torch.cat([first[1:], torch.tensor([len(sizes)])])[: len(first)]
    return Runs(pages[first].tolist(), rows[first].tolist(), (before[ends] - before[first]).tolist())
