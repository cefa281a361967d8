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

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import ClassVar, Protocol

from kvplane.base.checkpoints import CheckpointRule
from kvplane.base.groups import EvictionPolicy, GroupSpec, ReplicaSpec
from kvplane_core.face.keys import Key
from kvplane_core.face.setup import replay_boundaries
from kvplane_core.spec.freelist import FreeList, put_first
from kvplane_core.spec.pool import BlockPool
from kvplane_core.spec.requests import Requests


class Holder(Protocol):
    """What is read of a `GroupManager`."""

    pool: BlockPool
    spec: GroupSpec
    replica: ReplicaSpec
    requests: Requests
    block_size: int
    hash_size: int
    has_window: ClassVar[bool]
    drops_last_block: bool

    def skipped_tokens(self, num_computed: int) -> int: ...  # noqa: D102
    def key(self, slot: int, num_hashes: int) -> Key: ...  # noqa: D102


def split_left(
    manager: Holder, slot: int, indices: Sequence[int], blocks: Sequence[int]
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


def note_copied(manager: Holder, slot: int, source: int) -> None:
    """Record for TURN_TAIL that a hit of this request ends inside the block, which was copied, if the request will
    register a later end of its own.
    """
    free, end = manager.pool.free, manager.requests.hit_end.get(slot, 0)
    if isinstance(free, TurnTailList) and manager.pool.key_tokens[source] == end < _last_state(manager, slot):
        free.superseded[source] = source not in free.superseded


def renew_states(managers: Sequence[Holder], slot: int) -> None:
    """Count the states at the end of the request's prompt as used now, if they are free: TURN_TAIL and split pools,
    before the request releases its blocks.
    """
    for manager in (manager for manager in managers if not manager.has_window):
        pool, count = manager.pool, _last_state(manager, slot) // manager.hash_size
        if 0 < count <= len(manager.requests.content[slot].digests):
            resting = [block for block in pool.blocks_of(manager.key(slot, count)) if not pool.references[block]]
            pool.retained.renew(resting)


def _last_state(manager: Holder, slot: int) -> int:
    """Return the tokens of the last prefix of the prompt at which another request can continue."""
    rule = CheckpointRule.of(manager.replica, manager.spec)
    return rule.last_boundary(manager.requests.num_prompt[slot], manager.hash_size)


def kept_indices(manager: Holder, slot: int) -> Collection[int]:
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
        self._first: OrderedDict[int, None] = OrderedDict()  # before the divider
        super().__init__(num_blocks)
        self.let_go: Collection[int] = ()

    def __iter__(self) -> Iterator[int]:
        """Yield the block ids in eviction order."""
        return chain(self._first, self._blocks)

    def first(self) -> Iterator[int]:
        """Yield the ids of the blocks before the divider."""
        return iter(self._first)

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self._first) + len(self._blocks)

    def pop(self, count: int) -> list[int]:
        """Remove and return the first `count` blocks."""
        assert count <= self.count, f"{count} blocks requested, {self.count} free"
        first = [self._first.popitem(last=False)[0] for _ in range(min(count, len(self._first)))]
        self.let_go = set(first)
        return first + super().pop(count - len(first))

    def remove(self, block: int) -> None:
        """Remove this block, which must be in the list."""
        del (self._first if block in self._first else self._blocks)[block]

    def prepend(self, blocks: Sequence[int]) -> None:
        """Put blocks at the front; blocks[0] is evicted next."""
        put_first(self._first, blocks)

    def append_left_window(self, blocks: Iterable[int]) -> None:
        """Put blocks before the divider; blocks[-1] is evicted last of them."""
        self._first.update(dict.fromkeys(blocks))

    def rebuild(self, order: Iterable[int], num_first: int | None = None) -> None:
        """As in `FreeList`: the divider is behind the first `num_first` blocks."""
        blocks = list(order)
        num_first = len(blocks) if num_first is None else num_first
        self._first, self._blocks = OrderedDict.fromkeys(blocks[:num_first]), OrderedDict.fromkeys(blocks[num_first:])


class TurnTailList(WindowTailList):
    """As `WindowTailList`; a block that a longer prompt has copied is put before the divider too.

    Attributes:
        superseded: blocks with a key that such prompts copied: True after one copy, False after several.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.superseded: dict[int, bool] = {}

    def append(self, blocks: Iterable[int]) -> None:
        """Put blocks at the back, those that are superseded before the divider."""
        for block in blocks:
            (self._first if self.superseded.get(block) else self._blocks)[block] = None

    def forget(self, block: int) -> None:
        """Forget that a block is superseded, because it loses its keys."""
        self.superseded.pop(block, None)
