"""Full attention and MLA, which are managed in the same way: every block is kept until the request ends."""

from __future__ import annotations

from collections.abc import Sequence

from kvplane.base.step import CacheEvent, EventKind
from kvplane_core.face.keys import NULL_BLOCK, Key
from kvplane_core.spec.managers.base import GroupManager
from kvplane_core.spec.managers.questions import GroupSetup, Query, RequestProgress


class FullAttentionManager(GroupManager):
    """Manages a group of full attention. A look-up goes from left to right until a block is missing.

    With partial hits (hits that end inside a block) it then searches for the prefix that ends at a hash block inside
    the missing block.
    """

    def find(self, query: Query) -> tuple[list[list[int]], int]:
        """Find the longest cached prefix of the query; returns the blocks of the prefix per group, and its length in
        tokens.
        """
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
            blocks = query.find(self._digest(query.digests, index))
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
            blocks = query.find(query.digests[end // unit - 1])
            if blocks is not None:
                for row, block in zip(found, blocks, strict=True):
                    row.append(block)
                return end
        return length

    def is_downward_closed(self) -> bool:
        """Return True: a hit needs every block from the start, so a shorter hit needs fewer of the same blocks."""
        return True

    def can_rewind(self, slot: int, num_computed: int) -> bool:
        """Return True: no block leaves a table of full attention."""
        return True

    def drop_margin(self) -> int:
        """Return by how many tokens a look-up shortens a hit whose last block the request must compute again: the size
        of a block, or with partial hits the number of tokens per block hash.
        """
        return min(self.hash_size, self.block_size) if self.replica.partial_hits else self.block_size

    def register_blocks(self, slot: int, num_tokens: int, boundaries: Sequence[int]) -> None:
        """Register the full blocks of the first `num_tokens` tokens, and the prefix at the prompt's last hash boundary.

        The latter ends inside a block.
        """
        super().register_blocks(slot, num_tokens, boundaries)
        if self.block_size != self.hash_size:
            self._register_prompt_tail(slot, num_tokens)

    def _register_prompt_tail(self, slot: int, num_tokens: int) -> None:
        boundary, block = self._prompt_tail(slot)
        if block != NULL_BLOCK and boundary <= num_tokens:
            register_inside_block(self, slot, block, boundary)

    def _prompt_tail(self, slot: int) -> tuple[int, int]:
        """Return the position of the prompt's last hash boundary whose hash is known, and the block that contains it.

        The block is the null block if the boundary is at the edge of a block, or beyond the table.
        """
        size = self.hash_size
        boundary = min(self._prompt_limit(slot) // size, len(self.requests.content[slot].digests)) * size
        index = boundary // self.block_size
        inside = boundary % self.block_size != 0 and index < len(self.table[slot])
        return boundary, self.table[slot][index] if inside else NULL_BLOCK

    def _prompt_limit(self, slot: int) -> int:
        """Return how many tokens of the prompt a look-up of the same prompt may use.

        A hit has all but the last token; a look-up that leaves out the last matched block may use the last token too.
        """
        return self.requests.num_prompt[slot] - (0 if self.drops_last_block else 1)


def register_inside_block(manager: GroupManager, slot: int, block: int, num_tokens: int) -> Key:
    """Register the key of the prefix of `num_tokens` tokens, which ends inside `block`; returns this key.

    If the primary key of the block names a shorter prefix, it is removed.
    """
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
    """Emit a STORED event for the last hash block of a prefix of `num_tokens` tokens, which ends inside `block`."""
    if not manager.replica.events:
        return
    domain, group, digest = key
    size = manager.hash_size
    start, count = num_tokens - size, num_tokens // size
    parent = manager.requests.content[slot].digests[count - 2] if count > 1 else b""
    manager.pool.events.append(
        CacheEvent(
            EventKind.STORED,
            group,
            (digest,),
            (block,),
            domain,
            parent,
            size,
            slot,
            start,
            num_tokens,
            (start,),
        )
    )


class SinkManager(FullAttentionManager):
    """Manages full attention with attention sinks. The sink blocks are reserved in the pool, and are in no
    block table.
    """

    def __init__(self, setup: GroupSetup) -> None:
        super().__init__(setup)
        setup.pool.reserve(setup.spec.sink_tokens // setup.spec.block_size)


class RetainedWindowManager(FullAttentionManager):
    """Manages retained sliding windows (R-SWA): a request keeps its prompt and the last `window` tokens.

    Blocks between the prompt and the window (the gap) are released.

    |--- prompt ---|....... gap .......|<- window ->|
    """

    def register_blocks(self, slot: int, num_tokens: int, boundaries: Sequence[int]) -> None:
        """Register blocks of the prompt only.

        A later token does not attend to the gap between prompt and window, so its page depends on where the prompt
        ends, which no key states. vLLM registers all blocks.
        """
        known = min(num_tokens, self.requests.num_prompt[slot]) if self._safe else num_tokens
        super().register_blocks(slot, known, boundaries)

    def release_skipped(self, slot: int, num_processed: int) -> None:
        """Release the blocks that are entirely in the gap between prompt and window."""
        prompt = self.requests.num_prompt[slot]
        window_start = max(prompt, num_processed - self.spec.window)
        self._release_range(slot, self._blocks_for(prompt), window_start // self.block_size)

    def normalize_table(self, table: list[int], at: RequestProgress) -> list[int] | None:
        """Return the table with null blocks in the gap between prompt and window; None if another block is missing.

        A load writes blocks in the gap too. In groups of other kinds a load has no block that no token attends to.
        """
        start = min(self._blocks_for(at.num_prompt), len(table))
        gap_end = 0 if at.loading else max(at.num_prompt, at.computed - self.spec.window) // self.block_size
        stop = max(start, min(len(table), gap_end))
        normalized = table[:start] + [NULL_BLOCK] * (stop - start) + table[stop:]
        needed = table[:start] + table[stop:]
        return normalized if len(table) >= self._blocks_for(at.computed) and NULL_BLOCK not in needed else None

    def can_rewind(self, slot: int, num_computed: int) -> bool:
        """Whether the window at `num_computed` tokens has all its blocks; some may have been released with the gap
        before it.
        """
        window_start = max(self.requests.num_prompt[slot], num_computed - self.spec.window)
        return NULL_BLOCK not in self.table[slot][window_start // self.block_size :]
