"""The list of the free blocks in eviction order: doubly linked, in two columns; any block can be removed in constant
time.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvplane_core.face.columns import SLICE_BLOCKS, U32, Ints, column


@dataclass(frozen=True, slots=True)
class Links:
    """The links of a whole free list, computed in one pass.

    Attributes:
        following, previous: by block, the next and the previous block in eviction order; the last entry is that of the
            sentinel.
        count: number of free blocks.
        first_keyed: the first block that has a key; the sentinel if none has one.
    """

    following: array[int]
    previous: array[int]
    count: int
    first_keyed: int

    @classmethod
    def of(cls, num_blocks: int, order: Ints, num_unkeyed: int) -> Links:
        """Build the links of a list with the blocks of `order`, the eviction order. The first `num_unkeyed` blocks have
        no key, all others have one.
        """
        chain = np.concatenate([[num_blocks], order, [num_blocks]])
        following, previous = np.zeros(num_blocks + 1, np.uint32), np.zeros(num_blocks + 1, np.uint32)
        following[chain[:-1]] = chain[1:]
        previous[chain[1:]] = chain[:-1]
        first_keyed = int(chain[1 + num_unkeyed])
        return cls(column(U32, following), column(U32, previous), len(order), first_keyed)


class FreeList:
    """Blocks that can be allocated; the first one is evicted next.

    The order is the eviction policy, here LRU; `eviction` and `policies` have others. Blocks without a key are freed to
    the front, since they can never hit; blocks with a key to the back, the tail of the request first, so that the
    beginnings of prefixes are evicted last (as in vLLM's block pool).

        sentinel -> next victim -> ... -> last freed -> sentinel        (sentinel = num_blocks)

    Attributes:
        let_go: those of the last `pop` that the policy let go because they left a window; none for LRU.
    """

    let_go: Collection[int] = frozenset()

    def __init__(self, num_blocks: int) -> None:
        """Make a list of all blocks except the null block 0, in ascending order."""
        self.sentinel = num_blocks
        self.replace(Links.of(num_blocks, np.arange(1, num_blocks), num_blocks - 1))

    def __iter__(self) -> Iterator[int]:
        """Yield the block ids in eviction order."""
        return _walk(self._next, self.sentinel)

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

    def append_left_window(self, blocks: Sequence[int]) -> None:
        """Put blocks with a key that left the window of a running request; LRU does not distinguish them."""
        self.append(blocks)

    def note_owner(self, slot: int, indices: Sequence[int], blocks: Sequence[int], block_size: int) -> None:
        """Record that a request is the last user of blocks, which are at these places of its table; LRU records
        nothing.
        """
        del slot, indices, blocks, block_size

    def forget(self, blocks: Iterable[int]) -> None:
        """Forget what the policy recorded of blocks that lose their keys; LRU records nothing."""
        del blocks

    def rebuild(self, order: Iterable[int]) -> None:
        """Replace the content of the list by `order`."""
        self._next[self.sentinel] = self._previous[self.sentinel] = self.sentinel
        self.count = 0
        self._insert(self.sentinel, list(order))

    def put_unkeyed_first(self, key_tokens: array[int], num_keyed: int) -> Generator[None, None, int]:
        """Move all blocks without a key to the front of all blocks with a key. Yields between slices; the list is valid
        at each yield. Returns the first block with a key, or the sentinel.

        Walks from the back of the list to the first block that has a key, and moves the blocks without a key that were
        on the way in front of this block. This is fast where most blocks with keys are at the back, as `append` puts
        them. Blocks with keys keep their order, even when the generator is closed before its end.

        Args:
            key_tokens: one entry per block of the pool; 0: the block has no key.
            num_keyed: number of free blocks that have a key.
        """
        tokens = np.frombuffer(key_tokens, np.uint32)
        walked: list[Ints] = []  # pieces of the list, in its order; the last piece is the front one
        block, unwalked, first = self.sentinel, self.count, self.sentinel
        while num_keyed:
            piece = []
            for _ in range(min(SLICE_BLOCKS, unwalked)):
                block = self._previous[block]
                piece.append(block)
            unwalked -= len(piece)
            at = np.array(piece)
            keyed = np.flatnonzero(tokens[at])
            if num_keyed <= len(keyed):
                at = at[: keyed[num_keyed - 1] + 1]
                first = int(at[-1])
            num_keyed -= min(num_keyed, len(keyed))
            walked.append(at[::-1])
            yield
        while walked:
            self._split(walked.pop(), tokens, first)
            yield
        return first

    def _split(self, piece: Ints, tokens: npt.NDArray[np.uint32], first: int) -> None:
        """Move the blocks without a key of a piece of the list in front of the block `first`."""
        has_key = tokens[piece] > 0
        unkeyed = piece[~has_key]
        if len(unkeyed):
            before, after = self._previous[int(piece[0])], self._next[int(piece[-1])]
            self._link([before], piece[has_key], [after])
            self._link([self._previous[first]], unkeyed, [first])

    def _link(self, *blocks: Ints | list[int]) -> None:
        chain = np.concatenate(blocks)
        np.frombuffer(self._next, np.uint32)[chain[:-1]] = chain[1:]
        np.frombuffer(self._previous, np.uint32)[chain[1:]] = chain[:-1]

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


def _walk(following: Sequence[int], sentinel: int) -> Iterator[int]:
    block = following[sentinel]
    while block != sentinel:
        yield block
        block = following[block]
