"""Writes of new tokens into pages: kernel arguments, and the launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvplane_kernels.checks import EIGHT_BIT
from kvplane_kernels.triton_ops.kernels.arguments import Heads, Paged, WriteShape, power_of_two
from kvplane_kernels.triton_ops.kernels.writes import write_tokens
from kvplane_kernels.triton_ops.launch import Chip, Fixed, Launch, current, is_interpreted

MAX_COLUMNS = 1024
TILE_ELEMENTS = 8192
VECTOR = 8
COPIED = (torch.float32, torch.bfloat16, torch.float16)
RAW = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@dataclass(frozen=True, slots=True)
class Written:
    """The arguments of a write: new tokens [tokens, heads, size], and the pages [blocks, block_size, heads, size] that
    receive these tokens.
    """

    tokens: Tensor
    pages: Tensor
    scale: Tensor | None

    @property
    def width(self) -> int:
        """The number of elements of a token over all heads."""
        return self.pages.shape[2] * self.pages.shape[3]

    def refusal(self) -> str:
        """Return why no kernel supports this write; "" if one does."""
        pages, size = self.pages, self.pages.shape[3]
        if pages.dtype in EIGHT_BIT:
            if self.tokens.dtype not in COPIED:
                return f"no kernel rounds {self.tokens.dtype} to {pages.dtype}"
        elif pages.dtype not in COPIED or self.tokens.dtype != pages.dtype:
            return f"no kernel writes {self.tokens.dtype} into pages of {pages.dtype}"
        if pages.stride(3) != 1 or pages.stride(2) != size or self.tokens.stride(1) != size:
            return "heads of a token are not contiguous"
        if self.tokens.stride(2) != 1 or self.width % VECTOR:
            return f"a token's {self.width} elements are not contiguous or not a multiple of {VECTOR}"
        return ""

    def source(self) -> Heads:
        """Return the kernel argument for the tokens."""
        return heads(self.tokens, self.tokens.dtype == self.pages.dtype)

    def target(self) -> Paged:
        """Return the kernel argument for the pages."""
        kind = torch.uint8 if self.pages.dtype in EIGHT_BIT else raw(self.pages.dtype)
        per_head = self.scale is not None and self.scale.numel() > 1
        strides = (self.pages.stride(0), self.pages.stride(1), self.pages.stride(2))
        return Paged(self.pages.view(kind), strides, self.scale, int(per_head))


def raw(dtype: torch.dtype) -> torch.dtype:
    """Return the type as which elements are copied: integers in the interpreter, where bfloat16 is incorrect."""
    return RAW[dtype] if is_interpreted() else dtype


def heads(tokens: Tensor, is_copied: bool) -> Heads:
    """Return the kernel argument for new tokens. `is_copied`: whether pages have their type."""
    data = tokens.view(raw(tokens.dtype)) if is_copied and is_interpreted() else tokens
    return Heads(data, (tokens.stride(0), tokens.stride(1)))


class PreparedWrite:
    """The launch of writes that differ in the number of tokens and in addresses alone."""

    def __init__(self, key: Written, value: Written | None, chip: Chip) -> None:
        widest = max(key.width, value.width if value else 0)
        columns = min(MAX_COLUMNS, power_of_two(widest))
        shape = WriteShape(
            page=key.pages.shape[1],
            size_k=key.pages.shape[3],
            size_v=value.pages.shape[3] if value else 0,
            width_k=key.width,
            width_v=value.width if value else 0,
            fp8=chip.fp8(key.pages.dtype),
            tokens=TILE_ELEMENTS // columns,
            columns=columns,
        )
        self._device = key.pages.device
        self._tile, self._columns = shape.tokens, -(-widest // columns)
        self._targets = key.target(), (value or key).target()
        self._is_copied = key.tokens.dtype == key.pages.dtype
        self._kernel = Fixed(write_tokens, {"S": shape}, 4)

    def grid(self, tokens: int) -> tuple[int, int, int]:
        """Return the grid for a number of tokens."""
        return (-(-tokens // self._tile), self._columns, 1)

    def arguments(self, key: Tensor, value: Tensor, slots: Tensor) -> tuple[Any, ...]:
        """Return the arguments of the launch; `value` is `key` for latent rows."""
        first = heads(key, self._is_copied)
        second = first if value is key else heads(value, self._is_copied)
        return (first, second, *self._targets, slots, slots.shape[0])

    def run(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Write tokens. The caller guarantees that the kernel which the first call compiled suits this one."""
        with current(self._device):
            self._kernel(self.grid(slots.shape[0]), *self.arguments(key, value, slots))

    def launch(self, key: Tensor, value: Tensor, slots: Tensor) -> Launch:
        """Return the launch as a value."""
        return self._kernel.launch(self.grid(slots.shape[0]), self.arguments(key, value, slots))


def write_launch(key: Written, value: Written | None, slots: Tensor, chip: Chip) -> Launch:
    """Return the launch that writes keys and, unless `value` is None, values; one token per slot."""
    return PreparedWrite(key, value, chip).launch(key.tokens, (value or key).tokens, slots)
