"""Copying, zeroing, gathering, scattering and checksums of whole pages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from ctypes import memmove
from itertools import chain, groupby, repeat
from operator import attrgetter

import torch
from torch import Tensor

from kvplane_kernels.interface import GroupPages

# Most bytes that checksums are computed from at a time. Their intermediate results fit a processor's cache.
PIECE_BYTES = {"cpu": 1 << 18, "cuda": 1 << 23}
WORD = 0xFFFFFFFF
GOLDEN = 0x9E3779B1


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
    if on_host(group, staging):
        for pages, rows, size in runs_on_host(group, blocks, staging):
            move(rows, pages, size)
        return
    at = ids(group, blocks)
    for layer, part in zip(group.layers, parts(group, staging), strict=True):
        part.copy_(layer[at])


def scatter(group: GroupPages, blocks: Sequence[int], staging: Tensor) -> None:
    """Copy the rows of staging, uint8 [len(blocks), bytes per block], into blocks."""
    if on_host(group, staging):
        for pages, rows, size in runs_on_host(group, blocks, staging):
            move(pages, rows, size)
        return
    at = ids(group, blocks)
    for layer, part in zip(group.layers, parts(group, staging), strict=True):
        layer[at] = part.to(layer.device)


def checksum(group: GroupPages, blocks: Sequence[int]) -> Tensor:
    """Return checksums, int64 [len(blocks)]. Words are int32; sums and products wrap as those of unsigned ones."""
    device, num_bytes = group.layers[0].device, group.bytes_per_block
    num_words = -(-num_bytes // 4)
    sums = torch.zeros(len(blocks), dtype=torch.int64, device=device)
    rows_at_once = max(1, PIECE_BYTES[device.type] // max(4, 4 * num_words))
    words_at_once = max(1, PIECE_BYTES[device.type] // (4 * rows_at_once))
    rows = torch.zeros((rows_at_once, 4 * num_words), dtype=torch.uint8, device=device)
    number = torch.arange(1, num_words + 1, dtype=torch.int32, device=device).mul_(signed(GOLDEN))
    for start in range(0, len(blocks), rows_at_once):
        some = blocks[start : start + rows_at_once]
        gather(group, some, rows[: len(some), :num_bytes])
        words = rows[: len(some)].view(torch.int32)
        for first in range(0, num_words, words_at_once):
            piece = words[:, first : first + words_at_once] + number[first : first + words_at_once]
            sums[start : start + len(some)] += mix(piece).sum(1)
    return sums.bitwise_and_(WORD)


def mix(h: Tensor) -> Tensor:
    """Overwrite 32-bit values, int32, with the result of MurmurHash3's finalizer, and return them."""
    high = torch.empty_like(h)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        torch.bitwise_right_shift(h, shift, out=high)
        h.bitwise_xor_(high.bitwise_and_(WORD >> shift))  # the shift copies the sign, the mask removes the copies
        if factor > 1:
            h.mul_(signed(factor))
    return h


def signed(word: int) -> int:
    """Return the signed value of an unsigned word of 32 bits."""
    return word - (1 << 32) if word >> 31 else word


def on_host(group: GroupPages, staging: Tensor) -> bool:
    """Whether pages and staging are host memory, and the bytes of each page and row are contiguous."""
    return bool(group.host_runs) and staging.device.type == "cpu" and staging.stride(1) == 1


def runs_on_host(
    group: GroupPages, blocks: Sequence[int], staging: Tensor
) -> Iterator[tuple[Iterable[int], Iterable[int], int]]:
    """Yield (addresses in the pages, addresses in the rows, bytes at each): for every run of layers whose pages of a
    block are contiguous, those of equal size together, one row after the other, so that each row is passed once.
    """
    runs = group.host_runs
    row, width = staging.data_ptr(), staging.stride(0)
    steps = {run.stride: [block * run.stride for block in blocks] for run in runs}
    for size, equal in groupby(runs, key=attrgetter("size")):
        some, last = list(equal), row + len(blocks) * width
        pages = zip(*(map(run.address.__add__, steps[run.stride]) for run in some), strict=True)
        rows = zip(*(range(row + run.offset, last + run.offset, width) for run in some), strict=True)
        yield chain.from_iterable(pages), chain.from_iterable(rows), size


def move(dst: Iterable[int], src: Iterable[int], num_bytes: int) -> None:
    """Copy bytes from each address in `src` to the one in `dst`, without the interpreter's lock."""
    deque(map(memmove, dst, src, repeat(num_bytes)), maxlen=0)


def ids(group: GroupPages, blocks: Sequence[int]) -> Tensor:
    """Return block ids as an index tensor, int64 on the pages' device."""
    return torch.tensor(blocks, dtype=torch.int64, device=group.layers[0].device)


def parts(group: GroupPages, staging: Tensor) -> Iterator[Tensor]:
    """Yield the columns of staging that belong to each layer."""
    start = 0
    for layer in group.layers:
        yield staging[:, start : start + layer.shape[1]]
        start += layer.shape[1]
