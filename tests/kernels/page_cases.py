"""Random cases of the operations on whole pages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvplane_kernels.interface import GroupPages
from tests.kernels.memory import DeviceMemory, Memory

PAGE_BYTES = (16, 48, 64, 96, 256, 512, 1024, 2048)
ODD_PAGE_BYTES = (4, 6, 10, 33, 100)


@dataclass(frozen=True)
class GroupCase:
    """Pages of a group with random content, and the blocks that an operation names."""

    memory: Memory
    of_group: list[int]
    blocks: list[int]
    targets: list[int]

    def layers(self) -> list[np.ndarray]:
        """The group's layers, in place."""
        return [self.memory.layer(index) for index in self.of_group]

    def on(self, device: str) -> tuple[GroupPages, DeviceMemory]:
        memory = self.memory.on(device)
        return GroupPages(tuple(memory.layer(index) for index in self.of_group)), memory


def draw_memory(rng: np.random.Generator, page_bytes_multiple: int) -> tuple[Memory, list[int]]:
    """Draw layers, including those of the group; sizes are equal, mixed, or odd."""
    count = int(rng.integers(1, 6))
    sizes = rng.choice(ODD_PAGE_BYTES if rng.random() < 0.2 else PAGE_BYTES, count)
    sizes = sizes if rng.random() < 0.5 else np.repeat(sizes[:1], count)
    sizes = -(-sizes // page_bytes_multiple) * page_bytes_multiple
    memory = Memory.draw(rng, int(rng.integers(2, 12)), [int(size) for size in sizes])
    memory.buffer[:] = rng.integers(0, 256, len(memory.buffer))
    of_group = sorted(rng.permutation(count)[: int(rng.integers(1, count + 1))].tolist())
    return memory, of_group


def named_once(rng: np.random.Generator, page_bytes_multiple: int) -> GroupCase:
    """Draw distinct blocks without the null block; sometimes none."""
    memory, of_group = draw_memory(rng, page_bytes_multiple)
    blocks = rng.permutation(np.arange(1, memory.num_blocks))[: int(rng.integers(0, memory.num_blocks))].tolist()
    return GroupCase(memory, of_group, blocks, [])


def sources(rng: np.random.Generator, page_bytes_multiple: int) -> GroupCase:
    """Draw blocks to read, with repeats and the null block."""
    memory, of_group = draw_memory(rng, page_bytes_multiple)
    blocks = rng.integers(0, memory.num_blocks, int(rng.integers(0, 10))).tolist()
    return GroupCase(memory, of_group, blocks, [])


def targets(rng: np.random.Generator, page_bytes_multiple: int) -> GroupCase:
    """Draw blocks to zero, with repeats, without the null block."""
    memory, of_group = draw_memory(rng, page_bytes_multiple)
    blocks = rng.integers(1, memory.num_blocks, int(rng.integers(0, 10))).tolist()
    return GroupCase(memory, of_group, blocks, [])


def copies(rng: np.random.Generator, page_bytes_multiple: int) -> GroupCase:
    """Draw copies among few blocks, so that chains, swaps through a third block, and repeated targets are common."""
    memory, of_group = draw_memory(rng, page_bytes_multiple)
    few = rng.permutation(memory.num_blocks)[: int(rng.integers(2, 6))]
    count = int(rng.integers(0, 10))
    sources = rng.choice(few, count).tolist()
    targets = rng.choice(few[few != 0], count).tolist() if len(few[few != 0]) else []
    return GroupCase(memory, of_group, sources[: len(targets)], targets)
