"""The free blocks in eviction order: an intrusive doubly linked list in two columns, every operation O(1) per block."""

from __future__ import annotations

from array import array
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvplane_service.core.columns import SLICE_BLOCKS, U32, Ints, column


@dataclass(frozen=True, slots=True)
class Links:
    """A whole free list, made at once.

    Attributes:
        following, previous: by block, and behind the blocks the sentinel.
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
    """Blocks that may be handed out, next victim first.

    The order is the eviction policy: blocks without a key are freed to the front (they can never hit), blocks with a
    key to the back, tail of the request first, so that the roots of prefixes live longest (vLLM's block pool does the
    same).

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
        """Take the next `count` victims; the caller has checked that there are as many."""
        assert count <= self.count, f"{count} blocks asked, {self.count} free"
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
        """Take one given block out of the middle."""
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
        """Become exactly `order`."""
        self._next[self._sentinel] = self._previous[self._sentinel] = self._sentinel
        self.count = 0
        self.append(list(order))

    def put_unkeyed_first(self, key: Sequence[object], num_keyed: int) -> Generator[None]:
        """Put blocks without a key before those with one; in slices, between which the list is whole.

        Goes from the back to the first block with a key, and moves what it met without one in front of that. So it
        costs little where most keyed blocks are at the back, as `append` puts them; and if it is given up half way,
        the keyed blocks have still kept their order.

        Args:
            key: by block, None = it has none.
            num_keyed: free blocks with a key.
        """
        behind: list[int] = []  # blocks without a key, last one first
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
        """Become what was linked elsewhere, for as many blocks; the columns are this list's from now on."""
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
        """Prove that the links agree both ways and with the count; return the free blocks."""
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
