"""The eviction policies: in which order free blocks with a key are evicted.

    LRU            without a key -> with a key, the last used one last
    WINDOW_TAIL    without a key -> left a window | with a key, the last used one last
                                                  |
                                               divider

WINDOW_TAIL distinguishes the blocks that leave the window of a running request (in a chunked group: its chunk). They
serve only hits that end near them, while a block of full attention serves every longer hit. So they go first, except
where hits are likely to end (`kept_indices`). States are few, and each is the only hit at its end: they are evicted as
by LRU: letting them go first costs up to 4 points of hits (tests/bench/results/policies.md).

A policy decides the order of free blocks, and nothing else: it can cost hits, and never cause a wrong one. It is a pure
function of the operations on the list, so replays, mirrors and loaded states continue with the same victims.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING

from kvplane.base.groups import EvictionPolicy
from kvplane_service.core.freelist import FreeList, Links
from kvplane_service.core.setup import replay_boundaries

if TYPE_CHECKING:
    from kvplane_service.core.managers.base import GroupManager


def make_free_list(policy: EvictionPolicy, num_blocks: int) -> FreeList:
    """Return the list of the free blocks of a pool, in the order of the policy."""
    return WindowTailList(num_blocks) if policy is EvictionPolicy.WINDOW_TAIL else FreeList(num_blocks)


def kept_indices(manager: GroupManager, slot: int) -> Collection[int]:
    """Return the indices of the blocks, in the slot's table, that WINDOW_TAIL treats as any other when they leave the
    window: those of a hit at one of these positions, or one alignment unit before it.

    - where a request that repeats or continues the prompt can begin (`replay_boundaries`);
    - the single-group hit, where another prompt leaves this one;
    - where the hit of this request ended: what was hit once is hit again, such as a common system prompt.

    Without the unit before, a prompt that differs inside its last unit has no hit: that costs more than it saves.
    """
    spec, requests, size = manager.replica, manager.requests, manager.block_size
    drops = any(group.drops_last_block for group in spec.groups)
    unit, num_prompt = spec.hit_alignment, requests.num_prompt[slot]
    positions = replay_boundaries(num_prompt, spec.scheduler_block_size, drops, spec.keep_divergence_boundary)
    kept = set[int]()
    ends = {at // unit * unit for at in (*positions, requests.single_group_hit[slot], requests.hit_end.get(slot, 0))}
    for end in ends - {0}:
        first = max(manager.skipped_tokens(max(end - unit, 0)), 0) // size
        kept.update(range(first, -(-end // size) + int(manager.drops_last_block)))
    return kept


class WindowTailList(FreeList):
    """A free list with a divider: blocks that left a window are put before it, other blocks with a key at the back.

    Behind the blocks without a key, the block that left its window first is evicted first.
    """

    def __init__(self, num_blocks: int) -> None:
        self._divider = num_blocks + 1
        super().__init__(num_blocks)
        self.let_go: Collection[int] = ()

    def __iter__(self) -> Iterator[int]:
        """Yield the block ids in eviction order."""
        return (block for block in super().__iter__() if block != self._divider)

    def copy(self) -> Iterator[int]:
        """Return an iterator over the block ids in the present order, whatever changes before it is read."""
        order, divider = super().copy(), self._divider
        return (block for block in order if block != divider)

    def copy_first(self) -> Iterator[int]:
        """As `copy`, of the blocks before the divider."""
        return takewhile(lambda block: block != self._divider, super().copy())

    def pop(self, count: int) -> list[int]:
        """Remove and return the first `count` blocks."""
        assert count <= self.count, f"{count} blocks requested, {self.count} free"
        follow, divider = self._next, self._divider
        block, taken, num_first = follow[self.sentinel], list[int](), count
        while len(taken) < count:
            if block == divider:
                num_first = len(taken)
            else:
                taken.append(block)
            block = follow[block]
        ends = (self.sentinel, block) if num_first == count else (self.sentinel, divider, block)
        self._join(*ends)
        self.count -= count
        self.let_go = set(taken[:num_first])
        return taken

    def append_left_window(self, blocks: Sequence[int]) -> None:
        """Put blocks before the divider; blocks[-1] is evicted last of them."""
        self._insert(self._previous[self._divider], blocks)

    def rebuild(self, order: Iterable[int], num_first: int | None = None) -> None:
        """Replace the content of the list by `order`, with the divider behind `num_first` blocks (default: all)."""
        blocks = list(order)
        num_first = len(blocks) if num_first is None else num_first
        super().rebuild([*blocks[:num_first], self._divider, *blocks[num_first:]])
        self.count -= 1

    def replace(self, links: Links) -> None:
        """Replace the list by links, with the divider before the first block that has a key."""
        super().replace(links)
        for column in (self._next, self._previous):
            column.append(0)
        self._join(self._previous[links.first_keyed], self._divider, links.first_keyed)

    def put_unkeyed_first(self, key_tokens: array[int], num_keyed: int) -> Generator[None, None, int]:
        """As in `FreeList`; then put the divider before the first block that has a key."""
        self._move_divider(self._next[self.sentinel])
        first = yield from super().put_unkeyed_first(key_tokens, num_keyed)
        self._move_divider(first)
        return first

    def links(self) -> Iterator[tuple[int, int]]:
        """Yield (block, the block before it) in eviction order, the sentinel last, as if there were no divider."""
        for block, before in super().links():
            if block != self._divider:
                yield block, self._previous[before] if before == self._divider else before

    def _move_divider(self, after: int) -> None:
        divider = self._divider
        if after != divider:
            self._join(self._previous[divider], self._next[divider])
            self._join(self._previous[after], divider, after)

    def _join(self, *blocks: int) -> None:
        for before, after in pairwise(blocks):
            self._next[before], self._previous[after] = after, before
