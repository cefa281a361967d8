"""The free list of each eviction policy, and that of HAZARD: victims by what `hazard` has learnt, in batches.

HAZARD divides its list as WINDOW_TAIL does. Where the blocks before the divider do not suffice, and the ghosts of the
learner say that it hits more than LRU, it puts the blocks of least worth there, 1/64 of all at a time; otherwise the
order behind the divider, that of LRU, continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

import numpy as np

from kvplane.base.groups import NULL_BLOCK, EvictionPolicy
from kvplane_core.face.columns import U64, zeros
from kvplane_core.spec.eviction import TurnTailList, WindowTailList
from kvplane_core.spec.freelist import FreeList
from kvplane_core.spec.hazard import MOST_COUNT, PIECES, Learner, Prompt, check
from kvplane_core.spec.pool import BlockPool
from kvplane_core.spec.split import SplitPool

if TYPE_CHECKING:
    from kvplane.base.groups import ReplicaSpec
    from kvplane_core.spec.managers.base import GroupManager
    from kvplane_core.spec.requests import Requests

_BATCH = 64  # parts of the candidates


def make_pool(spec: ReplicaSpec) -> BlockPool:
    """Return the empty block pool of a replica."""
    if spec.blocks_per_state > 1:
        return SplitPool(spec)
    pool = BlockPool(spec.num_blocks, len(spec.groups), spec.enable_caching, spec.events)
    pool.free = make_free_list(spec, pool)
    return pool


def make_free_list(spec: ReplicaSpec, pool: BlockPool) -> FreeList:
    """Return the list of the free blocks of a pool, in the order of the replica's policy."""
    if spec.eviction is EvictionPolicy.HAZARD:
        return HazardList(spec, pool)
    lists = {EvictionPolicy.WINDOW_TAIL: WindowTailList, EvictionPolicy.TURN_TAIL: TurnTailList}
    return lists.get(spec.eviction, FreeList)(spec.num_blocks)


def note_admitted(pool: BlockPool, requests: Requests, slot: int, num_hit: int) -> None:
    """Record an admission for HAZARD, before it adopts the tokens of its hit and allocates."""
    free = pool.free
    if isinstance(free, HazardList):
        digests, domain = requests.content[slot].digests, requests.domain[slot]
        hint = requests.hints.get(slot, 0)
        free.prompts[slot] = free.learner.admit(digests, domain, requests.num_tokens[slot], num_hit, hint)


def are_hints(spec: ReplicaSpec, column: Sequence[int], least: int = 0) -> bool:
    """Whether the entries are hints that the engine of this replica has announced, or `least`."""
    return not column or (least <= min(column) and max(column) < max(1, spec.hint_values))


def note_hint(pool: BlockPool, requests: Requests, slot: int, hint: int) -> None:
    """Record for HAZARD what the engine says of requests that continue this one."""
    free = pool.free
    if isinstance(free, HazardList):
        requests.hints[slot] = hint
        if slot in free.prompts:
            free.learner.describe(free.prompts[slot], hint)


def note_released(managers: Sequence[GroupManager], slot: int) -> None:
    """Record for HAZARD that a request is the last user of its blocks, before it releases them."""
    free = managers[0].pool.free
    if isinstance(free, HazardList):
        for manager in managers:
            table = manager.table[slot]
            free.note_owner(slot, range(len(table)), table, manager.block_size)
        free.prompts.pop(slot, None)


class HazardList(WindowTailList):
    """A free list that puts the blocks of least worth before the divider.

    Attributes:
        learner: what is known about the traffic.
        prompts: how the prompt of each admitted request is divided, by slot.
        owner: what used each block last: number of the admission * PIECES + piece.
    """

    def __init__(self, spec: ReplicaSpec, pool: BlockPool) -> None:
        self._pool = pool
        tokens = spec.num_blocks * max(group.block_size for group in spec.groups)
        self.learner = Learner(max(1, tokens // (len(spec.groups) * spec.hash_block_size)), spec.hash_block_size)
        self.prompts: dict[int, Prompt] = {}
        self.owner = zeros(U64, spec.num_blocks)
        super().__init__(spec.num_blocks)

    def note_owner(self, slot: int, indices: Sequence[int], blocks: Sequence[int], block_size: int) -> None:
        """As in `FreeList`; a request that was not admitted in this engine life is not known."""
        prompt = self.prompts.get(slot)
        if prompt is not None and len(blocks):
            ends = (np.array(indices, np.int64) + 1) * block_size
            pieces = (ends <= prompt.seen_end).astype(np.int64) + (ends <= prompt.many_end)
            np.frombuffer(self.owner, np.int64)[np.array(blocks)] = prompt.number * PIECES + pieces

    def pop(self, count: int) -> list[int]:
        """Remove and return `count` blocks."""
        if self.learner.leads:
            self._put_before(count - len(self._first))
        taken = super().pop(count)
        self.let_go = ()
        return taken

    def state(self) -> list[Any]:
        """Return what a list has in addition to the order of its blocks; `load` takes it."""
        prompts = {slot: list(astuple(one)) for slot, one in self.prompts.items()}
        owner = self.owner[:]
        owner[NULL_BLOCK] = 0  # decides nothing
        return [owner, prompts, self.learner.state()]

    def load(self, state: list[Any]) -> None:
        """Continue from a state."""
        owner, prompts, learner = state
        if len(owner) != len(self.owner) or owner.typecode != U64:
            raise ValueError(f"owner has {len(owner)} entries")
        self.owner, self.prompts = owner, {slot: Prompt(*one) for slot, one in prompts.items()}
        self.learner.load(learner)
        now = self.learner.history.now
        check(max(self.owner) < (now + 1) * PIECES, "owners of blocks")
        ends = [end for one in self.prompts.values() for end in astuple(one)[1:]]
        check(all(0 <= one.number <= now for one in self.prompts.values()), "numbers of prompts")
        check(all(0 <= end < MOST_COUNT for end in ends), "ends in prompts")

    def _put_before(self, missing: int) -> None:
        """Put at least `missing` blocks of least worth before the divider, if that number has a key."""
        tokens = np.frombuffer(self._pool.key_tokens, np.uint32)
        at = np.array(sorted(self._blocks) if missing > 0 else [], np.int64)
        at = at[tokens[at] > 0]
        if len(at):
            owners, depths = np.frombuffer(self.owner, np.int64)[at], tokens[at].astype(np.int64)
            count = min(len(at), max(missing, len(at) // _BATCH))
            chosen: list[int] = at[self.learner.history.order(owners, depths, count)].tolist()
            for block in chosen:
                self.remove(block)
            self.append_left_window(chosen)
