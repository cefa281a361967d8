"""Page memory of a test: several layers in one buffer, in either layout, filled with poison."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch

from tests.kernels.formats import POISON, Format


@dataclass(frozen=True)
class Place:
    """Place of a layer's pages: byte offset of block 0, bytes between blocks, bytes of a page."""

    offset: int
    stride: int
    page_bytes: int


@dataclass
class Memory:
    """A buffer of bytes and the layers in it.

    Layer-outermost, each layer's pages are together; block-outermost, a block's pages of all layers are:

        [layer 0: page page page][layer 1: page page page]          [page l0, page l1][page l0, page l1] ...
    """

    num_blocks: int
    buffer: np.ndarray
    places: list[Place] = field(default_factory=list)

    @classmethod
    def draw(cls, rng: np.random.Generator, num_blocks: int, page_bytes: list[int]) -> Memory:
        """Place the layers in a random layout; every byte is poison."""
        places, end = [], 0
        if rng.random() < 0.5:
            for size in page_bytes:
                places.append(Place(end, size, size))
                end += num_blocks * size
        else:
            for size in page_bytes:
                places.append(Place(end, sum(page_bytes), size))
                end += size
            end = num_blocks * sum(page_bytes)
        return cls(num_blocks, np.full(-(-end // 16) * 16, POISON, np.uint8), places)

    def layer(self, index: int) -> np.ndarray:
        """The bytes of a layer's pages, uint8 [num_blocks, page_bytes], in place."""
        place = self.places[index]
        shape, strides = (self.num_blocks, place.page_bytes), (place.stride, 1)
        return np.lib.stride_tricks.as_strided(self.buffer[place.offset :], shape, strides)

    def part(self, index: int, start: int, shape: tuple[int, ...], form: Format) -> np.ndarray:
        """Bytes of elements [num_blocks, *shape] from byte `start` of each page, last axis widened, in place."""
        sizes = (*shape[:-1], shape[-1] * form.num_bytes)
        inner = [prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
        place = self.places[index]
        first = self.buffer[place.offset + start :]
        return np.lib.stride_tricks.as_strided(first, (self.num_blocks, *sizes), (place.stride, *inner))

    def on(self, device: str) -> DeviceMemory:
        """The memory as tensors."""
        return DeviceMemory(self, torch.from_numpy(self.buffer.copy()).to(device))


@dataclass(frozen=True)
class DeviceMemory:
    """A copy of the memory on a device."""

    memory: Memory
    raw: torch.Tensor

    def layer(self, index: int) -> torch.Tensor:
        """Bytes of a layer's pages, uint8 [num_blocks, page_bytes]."""
        place = self.memory.places[index]
        return self.raw.as_strided((self.memory.num_blocks, place.page_bytes), (place.stride, 1), place.offset)

    def part(self, index: int, start: int, shape: tuple[int, ...], form: Format) -> torch.Tensor:
        """Typed view [num_blocks, *shape] from byte `start` of each page."""
        place, typed = self.memory.places[index], self.raw.view(form.torch_dtype)
        inner = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
        strides = (place.stride // form.num_bytes, *inner)
        return typed.as_strided((self.memory.num_blocks, *shape), strides, (place.offset + start) // form.num_bytes)

    def bytes(self) -> np.ndarray:
        """The current content of the memory."""
        return self.raw.cpu().numpy()

    def now(self) -> Memory:
        """The current content of the memory, with its layers."""
        return Memory(self.memory.num_blocks, self.bytes(), self.memory.places)


def draw_page_bytes(rng: np.random.Generator, content_bytes: int, form: Format) -> tuple[list[int], int]:
    """Draw page sizes of one to three layers, and the layer that holds `content_bytes`, sometimes padded."""
    padding = int(rng.choice([0, 0, 16, 48, form.num_bytes])) if rng.random() < 0.5 else 0
    ours = content_bytes + padding
    others = [int(rng.choice([ours, 64, 16 * form.num_bytes])) for _ in range(int(rng.integers(0, 3)))]
    index = int(rng.integers(0, len(others) + 1))
    return [*others[:index], ours, *others[index:]], index
