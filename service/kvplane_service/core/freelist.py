"""The list of the free blocks in eviction order: doubly linked, in two columns; any block can be removed in constant
time.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvplane_service.core.columns import SLICE_BLOCKS, U32, Ints, column


@dataclass(frozen=True, slots=True)
class Links:
    """The links of a whole free list, computed in one pass.

    Attributes:
        following, previous: by block, the next and the previous block in eviction order; the last entry is that of the
            sentinel.
        count: number of free blocks.
    """

    following: array[int]
    previous: array[int]
    count: int

    @classmethod
    def of(cls, num_blocks: int, order: Ints) -> Links:
        """Build the links of a list with the blocks of `order`, which is the eviction order."""
        chain = np.concatenate([[num_blocks], order, [num_blocks]])
        following, previous = np.zeros(num_blocks + 1, np.uint32), np.zeros(num_blocks + 1, np.uint32)
        following[chain[:-1]] = chain[1:]
        previous[chain[1:]] = chain[:-1]
        return cls(column(U32, following), column(U32, previous), len(order))


class FreeList:
    """Blocks that can be allocated; the first one is evicted next.

    The order is the eviction policy. Blocks without a key are freed to the front, since they can never hit; blocks with
    a key to the back, the tail of the request first, so that the beginnings of prefixes are evicted last (as in vLLM's
    block pool).

        sentinel -> next victim -> ... -> last freed -> sentinel        (sentinel = num_blocks)
    """

    def __init__(self, num_blocks: int) -> None:
        """Make a list of all blocks except the null block 0, in ascending order."""
        self.sentinel = num_blocks
        self.replace(Links.of(num_blocks, np.arange(1, num_blocks)))

    def __iter__(self) -> Iterator[int]:
        """Yield the block ids in eviction order."""
        block = self._next[self.sentinel]
        while block != self.sentinel:
            yield block
            block = self._next[block]

    def pop(self, count: int) -> list[int]:
        """Remove and return the first `count` blocks. The caller must check that the list has at least
        `count` blocks.
        """
        assert count <= self.count, f"{count} blocks requested, {self.count} free"
        follow, sentinel = self._next, self.sentinel
        block = follow[sentinel]
        taken = []
        for _ in range(count):
            taken.append(block)
            block = follow[block]
        follow[sentinel] = block
        self._previous[block] = sentinel
        self.count -= count
        return taken

    def remove(self, block: int) -> None:
        """Remove this block, which must be in the list."""
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self.count -= 1

    def prepend(self, blocks: Sequence[int]) -> None:
        """Put blocks at the front; blocks[0] is evicted next."""
        self._insert(self.sentinel, blocks)

    def append(self, blocks: Sequence[int]) -> None:
        """Put blocks at the back; blocks[-1] is evicted last."""
        self._insert(self._previous[self.sentinel], blocks)

    def rebuild(self, order: Iterable[int]) -> None:
        """Replace the content of the list by `order`."""
        self._next[self.sentinel] = self._previous[self.sentinel] = self.sentinel
        self.count = 0
        self.append(list(order))

    def put_unkeyed_first(self, key: Sequence[object], num_keyed: int) -> Generator[None]:
        """Move all blocks without a key to the front of all blocks with a key. Yields between slices; the list is valid
        at each yield.

        Walks from the back of the list to the first block that has a key, and moves the blocks without a key that were
        on the way in front of this block. This is fast where most blocks with keys are at the back, as `append` puts
        them. Blocks with keys keep their order, even when the generator is closed before its end.

        Args:
            key: one entry per block of the pool; None: the block has no key.
            num_keyed: number of free blocks that have a key.
        """
        behind: list[int] = []  # blocks without a key, last one first
        block, left = self.sentinel, num_keyed
        while left:
            for _ in range(SLICE_BLOCKS):
                block = self._previous[block]
                if key[block] is None:
                    behind.append(block)
                    continue
                left -= 1
                if not left:
                    break
            yield
        while behind:
            moved = behind[: -SLICE_BLOCKS - 1 : -1]
            del behind[-SLICE_BLOCKS:]
            for one in moved:
                self.remove(one)
            self._insert(self._previous[block], moved)
            yield

    def replace(self, links: Links) -> None:
        """Replace the list by links that were built for a pool of the same size; takes ownership of the arrays."""
        self._next, self._previous, self.count = links.following, links.previous, links.count

    def _insert(self, before: int, blocks: Sequence[int]) -> None:
        follow, previous = self._next, self._previous
        after = follow[before]
        for block in blocks:
            follow[before] = block
            previous[block] = before
            before = block
        follow[before] = after
        previous[after] = before
        self.count += len(blocks)

    def links(self) -> Iterator[tuple[int, int]]:
        """Yield (block, the block before it) in eviction order, the sentinel last. Used to check the links."""
        block = self.sentinel
        while True:
            block = self._next[block]
            yield block, self._previous[block]
            if block == self.sentinel:
                return
