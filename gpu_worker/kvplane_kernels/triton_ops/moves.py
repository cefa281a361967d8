"""Copies of whole pages: layer tables on the device, tile sizes, and copies whose sources other copies write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvplane_kernels.columns import column
from kvplane_kernels.interface import GroupPages
from kvplane_kernels.triton_ops.kernels.arguments import power_of_two
from kvplane_kernels.triton_ops.kernels.moves import move_pages
from kvplane_kernels.triton_ops.launch import Launch

WORD_BYTES = 4
TILE_WORDS, WARPS = 4096, 4
# With few programs, each needs more bytes in flight; registers of 8 warps are left next to two programs of a decode.
FEW_PROGRAMS, WIDE_TILE_WORDS, WIDE_WARPS = 4, 8192, 8
ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class LayerTable:
    """The addresses of the layers of a group, on the device (see `kernels.moves`).

    Attributes:
        rows: int64 [layers, 4].
        page_words: 32-bit words of a page of the widest layer.
    """

    rows: Tensor
    page_words: int

    @classmethod
    def of(cls, group: GroupPages) -> LayerTable:
        """Return the table of a group's addresses and strides, copied to the device."""
        rows, before = [], 0
        for layer in group.layers:
            words = layer.shape[1] // WORD_BYTES
            rows.append((layer.data_ptr(), layer.stride(0), words, before))
            before += words
        on_host = torch.tensor(rows, dtype=torch.int64)
        return cls(on_host.to(group.layers[0].device), max(row[2] for row in rows))


def key_of(group: GroupPages) -> tuple[tuple[int, int, int], ...]:
    """Return the cache key of a group's layer table."""
    return tuple((layer.data_ptr(), layer.stride(0), layer.shape[1]) for layer in group.layers)


def refusal(group: GroupPages) -> str:
    """Return why no kernel can copy these pages; "" if one can."""
    for layer in group.layers:
        if layer.data_ptr() % ALIGNMENT_BYTES or layer.stride(0) % ALIGNMENT_BYTES or layer.stride(1) != 1:
            return f"pages are not aligned to {ALIGNMENT_BYTES} bytes"
        if layer.shape[1] % ALIGNMENT_BYTES:
            return f"pages of {layer.shape[1]} bytes are not a multiple of {ALIGNMENT_BYTES}"
    return ""


def staging_refusal(group: GroupPages, staging: Tensor) -> str:
    """Return why no kernel can use this staging buffer; "" if one can."""
    if staging.data_ptr() % ALIGNMENT_BYTES or staging.stride(0) % ALIGNMENT_BYTES or staging.stride(1) != 1:
        return f"rows of the staging buffer are not aligned to {ALIGNMENT_BYTES} bytes"
    return ""


def on_device(blocks: Sequence[int], device: torch.device) -> Tensor:
    """Return block ids as int32 on the device. The copy is asynchronous."""
    ids = column(blocks, torch.int32)
    return ids.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else ids


@dataclass(frozen=True, slots=True)
class Move:
    """The arguments of one launch that copies, zeroes or sums pages.

    Attributes:
        what: operation, a constant of `kernels.moves`.
        blocks, targets: block ids on the device; targets only for copies.
        staging: uint8 [blocks, bytes of a row], device or pinned memory; None = not used.
        sums: int64 [blocks], zeroed, receives checksums; None = not used.
        background: whether to launch at most `FEW_PROGRAMS` programs, so that other kernels keep the other
            multiprocessors.
    """

    what: int
    blocks: Tensor
    targets: Tensor | None = None
    staging: Tensor | None = None
    sums: Tensor | None = None
    background: bool = False


def move_launch(table: LayerTable, move: Move) -> Launch:
    """Return the launch for a `Move`, in tiles of 16 KiB; in tiles of 32 KiB for a background move.

    A tile covers several pages if the pages are small.
    """
    tile_words, warps = (WIDE_TILE_WORDS, WIDE_WARPS) if move.background else (TILE_WORDS, WARPS)
    words = min(tile_words, power_of_two(table.page_words, 4))
    pages = tile_words // words
    count, layers = move.blocks.numel(), table.rows.shape[0]
    chunks = -(-table.page_words // words)
    tiles = -(-count // pages) * layers * chunks
    staging = None if move.staging is None else move.staging.view(torch.int32)
    row_words = 0 if staging is None else staging.stride(0)
    sums = None if move.sums is None else move.sums.view(torch.int32)
    return Launch(
        move_pages,
        (min(tiles, FEW_PROGRAMS) if move.background else tiles,),
        (table.rows, move.blocks, move.targets, staging, sums, count, row_words, layers, chunks),
        {"WHAT": move.what, "PAGES": pages, "WORDS": words},
        warps,
    )


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Copies as (source, target) pairs, in two sets, each of which may run in parallel.

    No copy writes a source of `direct`. The sources of `staged` are written by other copies, so these sources are read
    before any write.
    """

    direct: tuple[tuple[int, int], ...]
    staged: tuple[tuple[int, int], ...]


def plan_copies(src: Sequence[int], dst: Sequence[int]) -> CopyPlan:
    """Return copies that may run in parallel and have the result of copying src[i] → dst[i] one after the other."""
    origin: dict[int, int] = {}
    for source, target in zip(src, dst, strict=True):
        origin[target] = origin.get(source, source)
    pairs = [(source, target) for target, source in origin.items() if source != target]
    written = {target for _, target in pairs}
    staged = tuple(pair for pair in pairs if pair[0] in written)
    return CopyPlan(tuple(pair for pair in pairs if pair[0] not in written), staged)
