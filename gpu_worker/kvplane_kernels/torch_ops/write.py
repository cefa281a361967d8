"""Writes of new tokens into pages."""

from __future__ import annotations

import torch
from torch import Tensor

from kvplane_kernels.interface import AttentionPages, LatentPages


def write_kv(pages: AttentionPages, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Write keys and values [tokens, kv_heads, size] into their slots; a slot of -1 skips the token."""
    kept = slots >= 0
    block_size = pages.k.shape[1]
    blocks, offsets = slots[kept] // block_size, slots[kept] % block_size
    for target, new, scale in ((pages.k, key, pages.k_scale), (pages.v, value, pages.v_scale)):
        stored = new[kept] if scale is None else quantized(new[kept], scale, target.dtype)
        bits(target)[blocks, offsets] = bits(stored)


def write_latent(pages: LatentPages, latent: Tensor, slots: Tensor) -> None:
    """Write latent rows [tokens, latent_size] into their slots; a slot of -1 skips the token."""
    kept = slots >= 0
    block_size = pages.rows.shape[1]
    stored = latent[kept]
    if pages.scale is not None:
        stored = quantized(stored.unsqueeze(1), pages.scale, pages.rows.dtype).squeeze(1)
    bits(pages.rows)[slots[kept] // block_size, slots[kept] % block_size] = bits(stored)


def quantized(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values [tokens, heads, size] / scale in an 8-bit type. Values beyond the type's range are clamped, since
    older PyTorch versions would return NaN.
    """
    largest = torch.finfo(dtype).max
    exact = values.double() if values.dtype == torch.float64 else values.float()
    return (exact / scale[:, None]).clamp(-largest, largest).to(dtype)


def bits(tensor: Tensor) -> Tensor:
    """Return 8-bit floats as a view of bytes: not every device supports indexing of 8-bit floats."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
