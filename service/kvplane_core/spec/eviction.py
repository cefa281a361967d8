"""Eviction policies: in which order free blocks with a key are evicted. HAZARD is in `policies`.

    LRU            without a key -> with a key, the last used one last
    WINDOW_TAIL    without a key -> left a window | with a key, the last used one last
    TURN_TAIL      without a key -> left a window, superseded | with a key, the last used one last
                                                              |
                                                           divider

A policy is a list of the free blocks (`FreeList` is LRU). The pool says what happens to blocks (`append`, `prepend`,
`append_left_window`, `forget`), the list decides where they enter, and `pop` takes victims from its front.

WINDOW_TAIL distinguishes the blocks that leave the window of a running request (in a chunked group: its chunk). They
serve only hits that end near them, while a block of full attention serves every longer hit. So they go first, except
where hits are likely to end (`kept_indices`). States are few, and each is the only hit at its end: they are evicted as
by LRU, since letting them go first costs up to 4 points of hits (tests/bench/results/policies.md).

TURN_TAIL also distinguishes the turns of a conversation, where hits can end inside blocks (tests/bench/fine_hits.py).
Each turn then copies, in every group, the block in which the last one ended, and leaves a state itself. The source of a
copy serves only prompts that leave the conversation there: it goes first, until a second prompt copies it too. So do
states on the way to the last one of a prompt. That one becomes free long before the other blocks of its request, and is
useless without them: it counts as used when they are released.

A policy decides the order of free blocks, and nothing else: it can cost hits, and never cause a wrong one. It is a pure
function of the operations on the list, so replays, mirrors and loaded states continue with the same victims.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING

from kvplane.base.checkpoints import CheckpointRule
from kvplane.base.groups import EvictionPolicy
from kvplane_core.face.setup import replay_boundaries
from kvplane_core.spec.freelist import FreeList, Links

if TYPE_CHECKING:
    from kvplane_core.spec.managers.base import GroupManager


def split_left(
    manager: GroupManager, slot: int, indices: Sequence[int], blocks: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Divide blocks that a running request gives up into those that enter the list as `append_left_window` and those
    that enter it as all others.

    `indices`: their places in the slot's table.
    """
    manager.pool.free.note_owner(slot, indices, blocks, manager.block_size)
    if manager.has_window:
        kept = kept_indices(manager, slot)
        first = [index not in kept for index in indices]
    elif manager.replica.eviction is EvictionPolicy.TURN_TAIL and manager.replica.partial_hits:
        requests, end_of = manager.requests, manager.pool.key_tokens
        ends = {requests.single_group_hit[slot], requests.hit_end.get(slot, 0), _last_state(manager, slot)}
        first = [end_of[block] not in ends for block in blocks]
    else:
        return [], list(blocks)
    return (
        [block for block, goes in zip(blocks, first, strict=True) if goes],
        [block for block, goes in zip(blocks, first, strict=True) if not goes],
    )


def note_copied(manager: GroupManager, slot: int, source: int) -> None:
    """Record for TURN_TAIL that a hit of this request ends inside the block, which was copied, if the request will
    register a later end of its own.
    """
    free, end = manager.pool.free, manager.requests.hit_end.get(slot, 0)
    if isinstance(free, TurnTailList) and manager.pool.key_tokens[source] == end < _last_state(manager, slot):
        free.superseded[source] = source not in free.superseded


def renew_states(managers: Sequence[GroupManager], slot: int) -> None:
    """Count the states at the end of the request's prompt as used now, if they are free: TURN_TAIL and split pools,
    before the request releases its blocks.
    """
    for manager in (manager for manager in managers if not manager.has_window):
        pool, count = manager.pool, _last_state(manager, slot) // manager.hash_size
        if 0 < count <= len(manager.requests.content[slot].digests):
            resting = [block for block in pool.blocks_of(manager.key(slot, count)) if not pool.references[block]]
            pool.retained.renew(resting)


def _last_state(manager: GroupManager, slot: int) -> int:
    """Return the tokens of the last prefix of the prompt at which another request can continue."""
    rule = CheckpointRule.of(manager.replica, manager.spec)
    return rule.last_boundary(manager.requests.num_prompt[slot], manager.hash_size)


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

    def first(self) -> Iterator[int]:
        """Yield the ids of the blocks before the divider."""
        return takewhile(lambda block: block != self._divider, super().__iter__())

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


class TurnTailList(WindowTailList):
    """As `WindowTailList`; a block that a longer prompt has copied is put before the divider too.

    Attributes:
        superseded: blocks with a key that such prompts copied: True after one copy, False after several.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.superseded: dict[int, bool] = {}

    def append(self, blocks: Sequence[int]) -> None:
        """Put blocks at the back, those that are superseded before the divider."""
        if self.superseded:
            self.append_left_window([block for block in blocks if self.superseded.get(block)])
            blocks = [block for block in blocks if not self.superseded.get(block)]
        super().append(blocks)

    def forget(self, blocks: Iterable[int]) -> None:
        """Forget that blocks are superseded, because they lose their keys."""
        if self.superseded:
            for block in blocks:
                self.superseded.pop(block, None)
