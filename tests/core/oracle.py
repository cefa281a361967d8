"""An independent oracle of the allocator for full attention and sliding windows: an object per block, texts as keys.

It shares no code with the core and cares for nothing but being plainly right: the free queue is a list, a key is the
text of the prefix itself, and the hit is found by trying every length from the longest down. Blocks of one size, every
block cached (dense retention), a synchronous engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(eq=False)
class Block:
    """A block of the pool and the content it is cached under: (group, prefix), None when it is not."""

    number: int
    references: int = 0
    key: tuple[int, str] | None = None


@dataclass
class Request:
    text: str
    computed: int = 0
    running: bool = False
    tables: list[list[Block | None]] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)  # per group, leading blocks that need no further registration


class Oracle:
    """`windows`: per group its window in tokens, None for full attention."""

    def __init__(self, windows: list[int | None], num_blocks: int, size: int) -> None:
        self.windows = windows
        self.size = size
        self.blocks = [Block(number) for number in range(num_blocks)]
        self.free = self.blocks[1:]
        self.index: dict[tuple[int, str], list[Block]] = {}
        self.requests: dict[int, Request] = {}

    # -- pool

    def _take(self, count: int) -> list[Block]:
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            self.forget(block)
            block.references = 1
        return taken

    def evict(self, blocks: list[Block]) -> None:
        """A request that counts one of these blocks as computed registers it again."""
        if not any(block.key for block in blocks):
            return
        for request in self.requests.values():
            for group, table in enumerate(request.tables):
                first = next((index for index, block in enumerate(table) if block in blocks), len(table))
                request.cached[group] = min(request.cached[group], first)
        for block in blocks:
            self.forget(block)

    def forget(self, block: Block) -> None:
        if block.key is not None:
            self.index[block.key].remove(block)
            block.key = None

    def _release(self, blocks: Iterable[Block | None]) -> None:
        gone = []
        for block in (block for block in blocks if block):
            block.references -= 1
            if block.references == 0:
                gone.append(block)
        unkeyed, keyed = [b for b in gone if b.key is None], [b for b in gone if b.key is not None]
        self.free = unkeyed + self.free + keyed

    def reset(self) -> bool:
        if any(block.references for block in self.blocks):
            return False
        for block in self.blocks:
            self.forget(block)
        return True

    # -- look-up

    def hit(self, text: str) -> list[list[Block | None]]:
        """Per group the blocks of the longest hit; nulls where a window does not reach."""
        for count in range((len(text) - 1) // self.size, 0, -1):
            tables = [self._hit_of(group, text, count) for group in range(len(self.windows))]
            if all(table is not None for table in tables):
                return [table for table in tables if table is not None]
        return [[] for _ in self.windows]

    def _hit_of(self, group: int, text: str, count: int) -> list[Block | None] | None:
        window = self.windows[group]
        reach = count if window is None else min(count, max(1, -(-(window - 1) // self.size)))
        found: list[Block | None] = [None] * (count - reach)
        for end in range(count - reach + 1, count + 1):
            blocks = self.index.get((group, text[: end * self.size]))
            if not blocks:
                return None
            found.append(blocks[0])
        return found

    # -- allocation

    def admit(self, slot: int, cap: int) -> bool:
        request = self.requests[slot]
        hits = self.hit(request.text)
        computed = len(hits[0]) * self.size
        wanted = min(cap, len(request.text) - computed)
        tables = [self._clipped(group, table, computed) for group, table in enumerate(hits)]
        return self._allocate(request, tables, computed, wanted)

    def run(self, slot: int, cap: int) -> int:
        """Tokens granted."""
        request = self.requests[slot]
        wanted = min(cap, len(request.text) - request.computed)
        if wanted <= 0:
            return 0
        for group, table in enumerate(request.tables):
            keep = self._clipped(group, table, request.computed)
            self._release(old for old, new in reversed(list(zip(table, keep, strict=True))) if old is not new)
            request.tables[group] = keep
        return wanted if self._allocate(request, request.tables, request.computed, wanted) else 0

    def _clipped(self, group: int, table: list[Block | None], computed: int) -> list[Block | None]:
        """The table without the blocks that no token from `computed` on attends to."""
        window = self.windows[group]
        skipped = 0 if window is None else max(0, computed - window + 1) // self.size
        return [None if index < skipped else block for index, block in enumerate(table)]

    def _allocate(self, request: Request, tables: list[list[Block | None]], computed: int, wanted: int) -> bool:
        need = -(-(computed + wanted) // self.size)
        adopted = [] if request.running else [block for table in tables for block in table if block]
        new = sum(need - len(table) for table in tables if need > len(table))
        if new + sum(block.references == 0 for block in adopted) > len(self.free):
            return False
        for block in adopted:
            block.references += 1
            if block in self.free:
                self.free.remove(block)
        if not request.running:
            request.cached = [len(table) for table in tables]
        request.tables = [[*table, *self._take(max(0, need - len(table)))] for table in tables]
        request.computed, request.running = computed + wanted, True
        self._cache(request)
        return True

    def _cache(self, request: Request) -> None:
        full = min(request.computed, len(request.text)) // self.size
        for group, table in enumerate(request.tables):
            for index in range(request.cached[group], full):
                block = table[index]
                if block is not None and block.key is None:
                    block.key = (group, request.text[: (index + 1) * self.size])
                    self.index.setdefault(block.key, []).append(block)
            request.cached[group] = max(request.cached[group], full)

    def leave(self, slot: int) -> None:
        """Give all blocks back, group by group, tail first."""
        request = self.requests[slot]
        for table in request.tables:
            self._release(reversed(table))
        request.tables, request.computed, request.running = [], 0, False
