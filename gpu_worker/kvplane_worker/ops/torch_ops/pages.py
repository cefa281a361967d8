"""Copying, zeroing, gathering, scattering and checksums of whole pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvplane_worker.ops.interface import GroupPages

# Most bytes that checksums are computed from at a time.
PIECE_BYTES = 1 << 23
WORD = 0xFFFFFFFF


def copy(group: GroupPages, src: Sequence[int], dst: Sequence[int]) -> None:
    """Copy blocks with the result of copying one pair after the other."""
    origin: dict[int, int] = {}
    for source, target in zip(src, dst, strict=True):
        origin[target] = origin.get(source, source)
    moved = [(source, target) for target, source in origin.items() if source != target]
    if not moved:
        return
    sources, targets = torch.tensor(moved, device=group.layers[0].device).T
    for layer in group.layers:
        layer[targets] = layer[sources]


def zero(group: GroupPages, blocks: Sequence[int]) -> None:
    """Set every byte of the blocks to 0."""
    at = ids(group, blocks)
    for layer in group.layers:
        layer[at] = 0


def gather(group: GroupPages, blocks: Sequence[int], staging: Tensor) -> None:
    """Copy blocks into the rows of staging, uint8 [len(blocks), bytes per block]."""
    at = ids(group, blocks)
    for layer, part in zip(group.layers, parts(group, staging), strict=True):
        part.copy_(layer[at])


def scatter(group: GroupPages, blocks: Sequence[int], staging: Tensor) -> None:
    """Copy the rows of staging, uint8 [len(blocks), bytes per block], into blocks."""
    at = ids(group, blocks)
    for layer, part in zip(group.layers, parts(group, staging), strict=True):
        layer[at] = part.to(layer.device)


def checksum(group: GroupPages, blocks: Sequence[int]) -> Tensor:
    """Return checksums, int64 [len(blocks)]. The sums are computed in int64 and masked to 32 bits, so that products
    wrap as in 32-bit arithmetic.
    """
    device, num_bytes = group.layers[0].device, group.bytes_per_block
    sums = torch.empty(len(blocks), dtype=torch.int64, device=device)
    at_once = max(1, PIECE_BYTES // max(1, num_bytes))
    for start in range(0, len(blocks), at_once):
        some = blocks[start : start + at_once]
        rows = torch.zeros((len(some), -(-num_bytes // 4) * 4), dtype=torch.uint8, device=device)
        gather(group, some, rows[:, :num_bytes])
        words = rows.view(torch.int32).long() & WORD
        number = torch.arange(1, words.shape[1] + 1, device=device)
        sums[start : start + at_once] = mix((words + number * 0x9E3779B1) & WORD).sum(1) & WORD
    return sums


def mix(h: Tensor) -> Tensor:
    """Return the result of MurmurHash3's finalizer for 32-bit values that are stored in int64."""
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & WORD
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & WORD
    return h ^ (h >> 16)


def ids(group: GroupPages, blocks: Sequence[int]) -> Tensor:
    """Return block ids as an index tensor, int64 on the pages' device."""
    return torch.tensor(blocks, dtype=torch.int64, device=group.layers[0].device)


def parts(group: GroupPages, staging: Tensor) -> Iterator[Tensor]:
    """Yield the columns of staging that belong to each layer."""
    start = 0
    for layer in group.layers:
        yield staging[:, start : start + layer.shape[1]]
        start += layer.shape[1]
