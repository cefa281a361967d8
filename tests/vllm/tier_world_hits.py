"""`tier_world` with a prefix cache of the engine's own, as vLLM has: requests share blocks and begin behind its hits,
freed blocks stay hittable until they are used again, and some allocations fail although the tiers were asked.
"""

from __future__ import annotations

from typing import Any

from tests.vllm.tier_world import BLOCK, LOADING, WAITING, Request, World

REFUSED = 0.15  # of the allocations behind a look-up

Key = tuple[int, tuple[int, ...]]  # group, and all tokens up to the end of the block


class SharingWorld(World):
    """A world whose engine has a prefix cache.

    Attributes:
        own_hits: tokens that requests had from the engine's own cache.
        mixed: loads behind a hit of the engine's own.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.holders: dict[int, int] = {}
        self.keys: dict[int, Key] = {}
        self.blocks: dict[Key, int] = {}
        self.own_hits = self.mixed = 0

    def take(self) -> int:
        """Take the block that was freed first; it loses its key."""
        block = self.free.pop(0)
        key = self.keys.pop(block, None)
        if key is not None:
            del self.blocks[key]
        self.holders[block] = 1
        return block

    def release(self, blocks: list[int]) -> None:
        """Let a request hold these blocks no more. Those without a key are used again first."""
        for block in blocks:
            self.holders[block] -= 1
            if not self.holders[block]:
                self.free.insert(len(self.free) if block in self.keys else 0, block)

    def own_hit(self, one: Request) -> tuple[list[int], list[int]]:
        """Return the blocks of the longest hit: all of full attention, and the last ones of the window."""

        def block_of(group: int, at: int) -> int:
            return self.blocks.get((group, tuple(one.tokens[: (at + 1) * BLOCK])), 0)

        most, count = (one.num_tokens - 1) // BLOCK, 0
        while count < most and block_of(0, count):
            count += 1
        while count and not all(block_of(1, at) for at in range(self.first(count), count)):
            count -= 1
        windowed = [block_of(1, at) for at in range(self.first(count), count)]
        return [block_of(0, at) for at in range(count)], [0] * (count - len(windowed)) + windowed

    def first(self, count: int) -> int:
        """Return the first block that the window reads behind this number of blocks."""
        return max(0, count * BLOCK - self.window + 1) // BLOCK

    def look_up(self, one: Request) -> bool:
        """Ask the engine's own cache, then the tiers; returns whether the request may be scheduled now."""
        tables = self.own_hit(one)
        computed = len(tables[0]) * BLOCK
        found = self.planner.matched(one, computed)  # type: ignore[arg-type]
        if found is None or self.rng.random() < REFUSED:
            return False
        held = [block for table in tables for block in table if block]
        waits = [other for other in (*self.of(LOADING), *self.of(WAITING)) if other.computed]
        if found and sum(map(self.whole, (one, *waits))) > len(self.free):
            return False
        for block in held:
            if not self.holders.get(block):
                self.free.remove(block)
                self.holders[block] = 0
            self.holders[block] += 1
        one.tables, one.computed = tables, computed + found
        self.own_hits += computed
        if not found:
            return True
        if not self.allocate(one, computed + found):
            self.drop(one)
            return False
        one.fresh = []
        self.planner.take(one, one.tables, found)  # type: ignore[arg-type]
        self.mixed += computed > 0
        one.state = LOADING
        return False

    def schedule(self) -> None:
        """Plan a step. The keys of its full blocks are known at once, as in vLLM."""
        super().schedule()
        for tokens, tables, _, end, _ in self.flight[-1][1]:
            for group, table in enumerate(tables):
                for at in range(min(end, len(tokens)) // BLOCK):
                    block, key = table[at], (group, tuple(tokens[: (at + 1) * BLOCK]))
                    if self.holders.get(block) and block not in self.keys and key not in self.blocks:
                        self.keys[block], self.blocks[key] = key, block
