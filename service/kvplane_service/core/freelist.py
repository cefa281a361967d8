"""The free blocks in eviction order: a doubly linked list in two columns, with O(1) removal of any block."""

from __future__ import annotations

from array import array
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvplane_service.core.columns import SLICE_BLOCKS, U32, Ints, column


@dataclass(frozen=True, slots=True)
class Links:
    """The links of a whole free list.

    Attributes:
        following, previous: by block; the last entry is the sentinel's.
    """

    following: array[int]
    previous: array[int]
    count: int

    @classmethod
    def of(cls, num_blocks: int, order: Ints) -> Links:
        """Blocks in eviction order."""
        chain = np.concatenate([[num_blocks], order, [num_blocks]])
        following, previous = np.zeros(num_blocks + 1, np.uint32), np.zeros(num_blocks + 1, np.uint32)
        following[chain[:-1]] = chain[1:]
        previous[chain[1:]] = chain[:-1]
        return cls(column(U32, following), column(U32, previous), len(order))


class FreeList:
    """Blocks that can be allocated, next victim first.

    The order is the eviction policy. Blocks without a key are freed to the front, since they can never hit; blocks with
    a key to the back, the tail of the request first, so that the beginnings of prefixes are evicted last (as in vLLM's
    block pool).

        sentinel -> next victim -> ... -> last freed -> sentinel        (sentinel = num_blocks)
    """

    def __init__(self, num_blocks: int) -> None:
        """All blocks but the null block 0 are free, in id order."""
        self._sentinel = num_blocks
        self.replace(Links.of(num_blocks, np.arange(1, num_blocks)))

    def __iter__(self) -> Iterator[int]:
        """Block ids in eviction order."""
        block = self._next[self._sentinel]
        while block != self._sentinel:
            yield block
            block = self._next[block]

    def pop(self, count: int) -> list[int]:
        """Remove the next `count` victims; the caller has checked that the list has them."""
        assert count <= self.count, f"{count} blocks requested, {self.count} free"
        follow, sentinel = self._next, self._sentinel
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
        """Remove one given block."""
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self.count -= 1

    def prepend(self, blocks: Sequence[int]) -> None:
        """Put blocks at the front; blocks[0] becomes the next victim."""
        self._insert(self._sentinel, blocks)

    def append(self, blocks: Sequence[int]) -> None:
        """Put blocks at the back; blocks[-1] is evicted last."""
        self._insert(self._previous[self._sentinel], blocks)

    def rebuild(self, order: Iterable[int]) -> None:
        """Set the list to `order`."""
        self._next[self._sentinel] = self._previous[self._sentinel] = self._sentinel
        self.count = 0
        self.append(list(order))

    def put_unkeyed_first(self, key: Sequence[object], num_keyed: int) -> Generator[None]:
        """Move blocks without a key in front of those with one; in slices, and the list is valid after each.

        Walks from the back to the first keyed block and moves the unkeyed blocks that it passed in front of that block.
        This is cheap where most keyed blocks are at the back, as `append` puts them. Keyed blocks keep their order,
        also when the generator is dropped half way.

        Args:
            key: by block; None: the block has no key.
            num_keyed: free blocks with a key.
        """
        behind: list[int] = []  # unkeyed blocks, last one first
        block, left = self._sentinel, num_keyed
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
        """Replace the list by prebuilt links for as many blocks; takes ownership of the arrays."""
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

    def check(self) -> set[int]:
        """Assert that the links agree in both directions and with the count; returns the free blocks."""
        seen: set[int] = set()
        before = self._sentinel
        for block in self:
            assert block not in seen, f"free list: block {block} twice"
            assert self._previous[block] == before, f"free list: block {block} does not point back to {before}"
            seen.add(block)
            before = block
        assert self._previous[self._sentinel] == before, "free list: sentinel does not point to the last block"
        assert len(seen) == self.count, f"free list: {len(seen)} blocks, count says {self.count}"
        return seen
