"""Full attention (and MLA, whose pages behave alike): every block stays until the request ends."""

from __future__ import annotations

from collections.abc import Sequence

from kvplane.base.step import CacheEvent, EventKind
from kvplane_service.core.keys import NULL_BLOCK, Key
from kvplane_service.core.managers.base import GroupManager, GroupSetup, Query, Standing


class FullAttentionManager(GroupManager):
    """Looks up left to right until a miss; with partial hits, also the inner boundaries of the first missing block."""

    downward_closed = True
    fine_grained = True

    def find(self, query: Query) -> tuple[list[list[int]], int]:
        """See GroupManager.find."""
        unit = self.replica.hit_alignment
        found: list[list[int]] = [[] for _ in query.groups]
        limit = min(query.max_tokens, len(query.digests) * self.hash_size)
        length = self._find_full_blocks(query, limit, found)
        fine = unit < self.block_size and self.block_size % unit == 0
        if fine:
            length = self._find_inside_next_block(query, limit, length, found)
        if query.drop_last and length > 0:
            length -= min(unit, self.block_size)
        length -= length % unit
        for blocks in found:
            del blocks[self._blocks_for(length) :]
        return found, length

    def _find_full_blocks(self, query: Query, limit: int, found: list[list[int]]) -> int:
        count = 0
        for index in range(limit // self.block_size):
            blocks = self.pool.find(query.domain, query.groups, self._digest(query.digests, index), query.horizon)
            if blocks is None:
                break
            for row, block in zip(found, blocks, strict=True):
                row.append(block)
            count += 1
        return count * self.block_size

    def _find_inside_next_block(self, query: Query, limit: int, length: int, found: list[list[int]]) -> int:
        unit = self.replica.hit_alignment
        longest = min(length + self.block_size - unit, limit // unit * unit)
        for end in range(longest, length, -unit):
            blocks = self.pool.find(query.domain, query.groups, query.digests[end // unit - 1], query.horizon)
            if blocks is not None:
                for row, block in zip(found, blocks, strict=True):
                    row.append(block)
                return end
        return length

    def register_blocks(self, slot: int, num_tokens: int, boundaries: Sequence[int]) -> None:
        """See GroupManager.register_blocks; also the last hash boundary of the prompt when it lies inside a block."""
        super().register_blocks(slot, num_tokens, boundaries)
        if self.block_size != self.hash_size:
            self._register_prompt_tail(slot, num_tokens)

    def _register_prompt_tail(self, slot: int, num_tokens: int) -> None:
        boundary, block = self._prompt_tail(slot)
        if block != NULL_BLOCK and boundary <= num_tokens:
            register_inside_block(self, slot, block, boundary)

    def _prompt_tail(self, slot: int) -> tuple[int, int]:
        """Last hash boundary of the prompt that is known, and the block that it lies inside of; null when in none."""
        size = self.hash_size
        boundary = min(self._prompt_limit(slot) // size, len(self.requests.content[slot].digests)) * size
        index = boundary // self.block_size
        inside = boundary % self.block_size != 0 and index < len(self.table[slot])
        return boundary, self.table[slot][index] if inside else NULL_BLOCK

    def _prompt_limit(self, slot: int) -> int:
        """A repeat of the prompt matches at most prompt - 1 tokens; a draft group reads all before it drops a unit."""
        return self.requests.num_prompt[slot] - (0 if self.drops else 1)

    def quiet_cache(self, slot: int) -> int:
        """See GroupManager.quiet_cache; never as long as the prompt's last hash boundary may still be registered."""
        return 0 if self._awaits_prompt_tail(slot) else super().quiet_cache(slot)

    def _awaits_prompt_tail(self, slot: int) -> bool:
        if self.block_size == self.hash_size:
            return False
        digests = self.requests.content[slot].digests
        if len(digests) < self._prompt_limit(slot) // self.hash_size:
            return True  # hashes that look ahead come later
        boundary, block = self._prompt_tail(slot)
        if block == NULL_BLOCK:
            return False
        return not self.pool.has_key(block, self.key(slot, boundary // self.hash_size))


def register_inside_block(manager: GroupManager, slot: int, block: int, num_tokens: int) -> Key:
    """Register a key for the prefix of `num_tokens` that ends inside `block`; a shorter key of the block goes first."""
    pool = manager.pool
    key = manager.key(slot, num_tokens // manager.hash_size)
    if pool.has_key(block, key):
        return key
    if pool.key[block] is not None and pool.key_tokens[block] < num_tokens:
        manager.promote(block, num_tokens)
    pool.register(block, key, num_tokens)
    tell_stored_inside(manager, slot, block, key, num_tokens)
    return key


def tell_stored_inside(manager: GroupManager, slot: int, block: int, key: Key, num_tokens: int) -> None:
    """The block has the key of a prefix of `num_tokens`: an event of its last hash block."""
    if not manager.replica.events:
        return
    size = manager.hash_size
    start, count = num_tokens - size, num_tokens // size
    parent = manager.requests.content[slot].digests[count - 2] if count > 1 else b""
    manager.pool.events.append(
        CacheEvent(
            EventKind.STORED,
            manager.group,
            (key.digest,),
            (block,),
            key.domain,
            parent,
            size,
            slot,
            start,
            num_tokens,
            (start,),
        )
    )


class SinkManager(FullAttentionManager):
    """Full attention with sinks: the group holds the sink blocks for the life of the pool, outside every table."""

    def __init__(self, setup: GroupSetup) -> None:
        super().__init__(setup)
        self.sink_blocks = setup.pool.reserve(setup.spec.sink_tokens // setup.spec.block_size)


class RetainedWindowManager(FullAttentionManager):
    """R-SWA: a request keeps its prompt and the last `window` tokens; the gap between them is given back.

    |--- prompt ---|....... gap .......|<- window ->|
    """

    def release_skipped(self, slot: int, num_processed: int) -> None:
        """Give back the blocks that lie wholly in the gap."""
        prompt = self.requests.num_prompt[slot]
        window_start = max(prompt, num_processed - self.spec.window)
        self._release_range(slot, self._blocks_for(prompt), window_start // self.block_size)

    def settle(self, table: list[int], at: Standing) -> list[int] | None:
        """See GroupManager.settle."""
        start = min(self._blocks_for(at.num_prompt), len(table))
        stop = max(start, max(at.num_prompt, at.computed - self.spec.window) // self.block_size)
        settled = table[:start] + [NULL_BLOCK] * (stop - start) + table[stop:]
        needed = table[:start] + table[stop:]
        return settled if len(table) >= self._blocks_for(at.computed) and NULL_BLOCK not in needed else None

    def can_rewind(self, slot: int, num_computed: int) -> bool:
        """See GroupManager.can_rewind: the gap stays as it is while the window does not reach back into it."""
        window_start = max(self.requests.num_prompt[slot], num_computed - self.spec.window)
        return NULL_BLOCK not in self.table[slot][window_start // self.block_size :]

    def quiet_window(self, slot: int, num_processed: int) -> int:
        """See GroupManager.quiet_window."""
        prompt = self.requests.num_prompt[slot]
        start = max(prompt, num_processed - self.spec.window)
        return (start // self.block_size + 1) * self.block_size + self.spec.window


__all__ = [
    "FullAttentionManager",
    "RetainedWindowManager",
    "SinkManager",
    "register_inside_block",
    "tell_stored_inside",
]
