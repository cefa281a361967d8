"""The list of the free blocks in eviction order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence


class FreeList:
    """Blocks that can be allocated; the first one is evicted next.

    The order is the eviction policy, here LRU; `eviction` and `policies` have others. Blocks without a key are freed to
    the front, since they can never hit; blocks with a key to the back, the tail of the request first, so that the
    beginnings of prefixes are evicted last (as in vLLM's block pool).

    Attributes:
        let_go: those of the last `pop` that the policy let go because they left a window; none for LRU.
    """

    let_go: Collection[int] = frozenset()

    def __init__(self, num_blocks: int) -> None:
        """Make a list of all blocks except the null block 0, in ascending order."""
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.rebuild(range(1, num_blocks))

    def __iter__(self) -> Iterator[int]:
        """Yield the block ids in eviction order."""
        return iter(self._blocks)

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self._blocks)

    def pop(self, count: int) -> list[int]:
        """Remove and return the first `count` blocks. The caller must check that the list has at least
        `count` blocks.
        """
        assert count <= self.count, f"{count} blocks requested, {self.count} free"
        return [self._blocks.popitem(last=False)[0] for _ in range(count)]

    def remove(self, block: int) -> None:
        """Remove this block, which must be in the list."""
        del self._blocks[block]

    def prepend(self, blocks: Sequence[int]) -> None:
        """Put blocks at the front; blocks[0] is evicted next."""
        put_first(self._blocks, blocks)

    def append(self, blocks: Iterable[int]) -> None:
        """Put blocks at the back; blocks[-1] is evicted last."""
        self._blocks.update(dict.fromkeys(blocks))

    def append_left_window(self, blocks: Iterable[int]) -> None:
        """Put blocks with a key that left the window of a running request; LRU does not distinguish them."""
        self.append(blocks)

    def note_owner(self, slot: int, indices: Sequence[int], blocks: Sequence[int], block_size: int) -> None:
        """Record that a request is the last user of blocks, which are at these places of its table; LRU records
        nothing.
        """

    def forget(self, block: int) -> None:
        """Forget what the policy recorded of a block that loses its keys; LRU records nothing."""

    def rebuild(self, order: Iterable[int], num_first: int | None = None) -> None:
        """Replace the content of the list by `order`, of which the policy lets the first `num_first` go first (default:
        all).
        """
        self._blocks = OrderedDict.fromkeys(order)

    def put_unkeyed_first(self, key_tokens: Sequence[int]) -> None:
        """Move all blocks without a key to the front, in their order.

        `key_tokens`: one entry per block of the pool; 0: the block has no key.
        """
        order = sorted(self, key=lambda block: key_tokens[block] > 0)
        self.rebuild(order, sum(1 for block in order if not key_tokens[block]))


def put_first(blocks: OrderedDict[int, None], new: Sequence[int]) -> None:
    """Put blocks before all others; new[0] becomes the first one."""
    for block in reversed(new):
        blocks[block] = None
        blocks.move_to_end(block, last=False)
