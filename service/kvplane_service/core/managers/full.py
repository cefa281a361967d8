"""Full attention, and MLA, whose pages are managed alike: every block is kept until the request ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvplane.base.step import CacheEvent, EventKind
from kvplane_service.core.keys import NULL_BLOCK, Key
from kvplane_service.core.managers.base import GroupManager
from kvplane_service.core.managers.questions import GroupSetup, Query, RequestProgress


class FullAttentionManager(GroupManager):
    """Looks up left to right until a miss; with partial hits, also the inner boundaries of the first missing block."""

    def find(self, query: Query) -> tuple[list[list[int]], int]:
        """See GroupManager.find."""
        unit = self.replica.hit_alignment
        found: list[list[int]] = [[] for _ in query.groups]
        limit = min(query.max_tokens, len(query.digests) * self.hash_size)
        length = self._find_full_blocks(query, limit, found)
        fine = unit < self.block_size and self.block_size % unit == 0
        if fine:
            length = self._find_inside_next_block(query, limit, length, found)
        if query.drops_last_block and length > 0:
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

    def is_downward_closed(self) -> bool:
        """True: every block from the start is needed, so a shorter hit needs fewer of the same blocks."""
        return True

    def drop_margin(self) -> int:
        """With partial hits a look-up drops one hash block only."""
        return min(self.hash_size, self.block_size) if self.replica.partial_hits else self.block_size

    def needed_ends(self, found: int, wanted: int) -> Iterator[int]:
        """Every aligned end behind what was found."""
        step = min(self.replica.hit_alignment, self.block_size)
        yield from range(found // step * step + step, wanted + 1, step)

    def register_blocks(self, slot: int, num_tokens: int, boundaries: Sequence[int]) -> None:
        """See GroupManager.register_blocks; also the last hash boundary of the prompt when that is inside a block."""
        super().register_blocks(slot, num_tokens, boundaries)
        if self.block_size != self.hash_size:
            self._register_prompt_tail(slot, num_tokens)

    def _register_prompt_tail(self, slot: int, num_tokens: int) -> None:
        boundary, block = self._prompt_tail(slot)
        if block != NULL_BLOCK and boundary <= num_tokens:
            register_inside_block(self, slot, block, boundary)

    def _prompt_tail(self, slot: int) -> tuple[int, int]:
        """The prompt's last hash boundary with a known hash, and the block that it is inside of; null block: none."""
        size = self.hash_size
        boundary = min(self._prompt_limit(slot) // size, len(self.requests.content[slot].digests)) * size
        index = boundary // self.block_size
        inside = boundary % self.block_size != 0 and index < len(self.table[slot])
        return boundary, self.table[slot][index] if inside else NULL_BLOCK

    def _prompt_limit(self, slot: int) -> int:
        """A repeat of the prompt matches at most prompt - 1 tokens; a look-up that drops a block reads one more."""
        return self.requests.num_prompt[slot] - (0 if self.drops_last_block else 1)

    def register_bound(self, slot: int) -> int:
        """See GroupManager.register_bound; 0 while the prompt's last hash boundary may still be registered."""
        return 0 if self._awaits_prompt_tail(slot) else super().register_bound(slot)

    def _awaits_prompt_tail(self, slot: int) -> bool:
        if self.block_size == self.hash_size:
            return False
        digests = self.requests.content[slot].digests
        if len(digests) < self._prompt_limit(slot) // self.hash_size:
            return True  # with a hash look-ahead the last hashes arrive later
        boundary, block = self._prompt_tail(slot)
        if block == NULL_BLOCK:
            return False
        return not self.pool.has_key(block, self.key(slot, boundary // self.hash_size))


def register_inside_block(manager: GroupManager, slot: int, block: int, num_tokens: int) -> Key:
    """Register the key of the prefix of `num_tokens` that ends inside `block`, instead of a shorter primary key."""
    pool = manager.pool
    key = manager.key(slot, num_tokens // manager.hash_size)
    if pool.has_key(block, key):
        return key
    if pool.key[block] is not None and pool.key_tokens[block] < num_tokens:
        manager.promote(block, num_tokens)
    pool.register(block, key, num_tokens)
    report_stored_inside(manager, slot, block, key, num_tokens)
    return key


def report_stored_inside(manager: GroupManager, slot: int, block: int, key: Key, num_tokens: int) -> None:
    """Emit STORED for the last hash block of the prefix of `num_tokens` that ends inside `block`."""
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
    """Full attention with sinks: the group reserves the sink blocks, which are in no table."""

    def __init__(self, setup: GroupSetup) -> None:
        super().__init__(setup)
        setup.pool.reserve(setup.spec.sink_tokens // setup.spec.block_size)


class RetainedWindowManager(FullAttentionManager):
    """R-SWA: a request keeps its prompt and the last `window` tokens; blocks of the gap between them are released.

    |--- prompt ---|....... gap .......|<- window ->|
    """

    def release_skipped(self, slot: int, num_processed: int) -> None:
        """Release the blocks that are entirely in the gap."""
        prompt = self.requests.num_prompt[slot]
        window_start = max(prompt, num_processed - self.spec.window)
        self._release_range(slot, self._blocks_for(prompt), window_start // self.block_size)

    def normalize_table(self, table: list[int], at: RequestProgress) -> list[int] | None:
        """See GroupManager.normalize_table."""
        start = min(self._blocks_for(at.num_prompt), len(table))
        stop = max(start, max(at.num_prompt, at.computed - self.spec.window) // self.block_size)
        normalized = table[:start] + [NULL_BLOCK] * (stop - start) + table[stop:]
        needed = table[:start] + table[stop:]
        return normalized if len(table) >= self._blocks_for(at.computed) and NULL_BLOCK not in needed else None

    def can_rewind(self, slot: int, num_computed: int) -> bool:
        """See GroupManager.can_rewind: blocks of the gap are needed again once the window would include them."""
        window_start = max(self.requests.num_prompt[slot], num_computed - self.spec.window)
        return NULL_BLOCK not in self.table[slot][window_start // self.block_size :]

    def window_bound(self, slot: int, num_processed: int) -> int:
        """See GroupManager.window_bound."""
        prompt = self.requests.num_prompt[slot]
        start = max(prompt, num_processed - self.spec.window)
        return (start // self.block_size + 1) * self.block_size + self.spec.window


__all__ = [
    "FullAttentionManager",
    "RetainedWindowManager",
    "SinkManager",
    "register_inside_block",
    "report_stored_inside",
]
