"""What the kernels of attention take: tuples of pointers and numbers, and a frozen shape that is compiled in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Heads(NamedTuple):
    """Queries or results [rows, heads, size]; strides of a row and of a head, in elements."""

    data: Tensor
    strides: tuple[int, int]


class Paged(NamedTuple):
    """Keys, values or latents; strides of a block, a token and a head, in elements.

    Attributes:
        scale: float32, one or one per head, for 8-bit elements.
        scale_stride: 0 or 1.
    """

    data: Tensor
    strides: tuple[int, int, int]
    scale: Tensor | None = None
    scale_stride: int = 0


class Rows(NamedTuple):
    """Block tables and lengths of a batch; `starts` are the rows' first queries, None when each row has one."""

    table: Tensor
    table_stride: int
    lengths: Tensor
    num_rows: int
    starts: Tensor | None = None


class Parts(NamedTuple):
    """Room for partial results: [workers, 2, q_heads, width] and [workers, 2, q_heads, 2] (maximum, sum)."""

    acc: Tensor
    stats: Tensor
    workers: int


@dataclass(frozen=True)
class Shape:
    """What attention kernels are compiled for.

    Attributes:
        page: tokens of a page.
        width_k, width_v: elements of a key and of a value. Latents: both the elements that are key and value at once.
        rest: elements of a latent that are key only; 0 for keys and values of their own.
        paired: values have the keys' strides, so that one offset serves both.
        group: query heads that share a program, of one kv head; `padded_group` is it as the products want it.
        window, chunk: the rule's.
        fp8, upcast: how elements become numbers (see `numbers`).
        tile: tokens of one step of the softmax.
        stages: depth of the software pipeline.
        scan: rows looked at at once when spans are counted.
    """

    page: int
    width_k: int
    width_v: int
    group: int
    rest: int = 0
    paired: bool = False
    window: int = 0
    chunk: int = 0
    fp8: int = 0
    upcast: bool = False
    tile: int = 64
    stages: int = 2
    scan: int = 256

    @property
    def padded_k(self) -> int:
        """`width_k` as products want it, like the next three."""
        return power_of_two(self.width_k)

    @property
    def padded_v(self) -> int:
        """See `padded_k`."""
        return power_of_two(self.width_v)

    @property
    def padded_rest(self) -> int:
        """See `padded_k`."""
        return power_of_two(self.rest)

    @property
    def padded_group(self) -> int:
        """See `padded_k`."""
        return power_of_two(self.group)

    @property
    def lanes(self) -> int:
        """Heads of a group with those that only fill up to a power of two."""
        return power_of_two(self.group, 1)


@dataclass(frozen=True)
class WriteShape:
    """What the kernel that writes tokens is compiled for.

    Attributes:
        page: tokens of a page.
        size_k, size_v: elements of a head.
        width_k, width_v: elements of a token, all heads; width_v is 0 for latents.
        fp8: how numbers become 8-bit elements (see `numbers`).
        tokens, columns: what one program writes.
    """

    page: int
    size_k: int
    size_v: int
    width_k: int
    width_v: int
    fp8: int
    tokens: int
    columns: int


def power_of_two(size: int, least: int = 16) -> int:
    """The power of two at or above `size`, and at or above `least`, which is what a matrix product takes."""
    return max(least, 1 << (size - 1).bit_length())
