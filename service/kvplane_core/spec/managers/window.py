"""Sliding windows and chunks: blocks before the last window or chunk are released, and a hit needs only the blocks of
its last one.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvplane_core.face.keys import NULL_BLOCK
from kvplane_core.spec.managers.base import GroupManager
from kvplane_core.spec.managers.questions import GroupSetup, Query


class SlidingWindowManager(GroupManager):
    """Manages a group of sliding window attention: with a window of w tokens, token t attends to t - w + 1 .. t.

    With window 4 and 7 computed tokens, the next token 7 attends to 4..7, so 0..3 are skipped:

        0 1 2 3 4 5 6 [7]
        |skipped|window |
    """

    def __init__(self, setup: GroupSetup) -> None:
        super().__init__(setup)
        self._window = setup.spec.window
        self._kept_every = setup.replica.kept_every
        self._margin = setup.spec.window - 1 + setup.spec.extra_retained_tokens

    def _run_length(self, drops_last_block: bool) -> int:
        """Return how many consecutive cached blocks a hit needs; one block more if look-ups leave out the last matched
        block.
        """
        return self._blocks_for(self._window - 1) + int(drops_last_block)

    def skipped_tokens(self, num_computed: int) -> int:
        """Return the number of leading tokens outside the window of the next token."""
        return max(0, num_computed - self._margin)

    def first_read(self, num_computed: int) -> int:
        """Return the index of the first block inside the window: a hit has none of the blocks retained before it."""
        return max(0, num_computed - self._window + 1) // self.block_size

    def find(self, query: Query) -> tuple[list[list[int]], int]:
        """Find the longest prefix whose last blocks, as many as the window needs, are all cached; searches from the
        right.

        Fewer are enough if they begin with block 0.

        index   0 1 2 3 4 5 6      run of 2 needed
        cached  . . . x x . x  ->  hit of 5 blocks: null null null b3 b4
        """
        found, start, end = self._find_run(query)
        if query.drops_last_block and end > 0:
            end = self._align(end - 1)
        start = min(start, end)
        rows = [
            [NULL_BLOCK] * start + [found[index][row] for index in range(start, end)]
            for row in range(len(query.groups))
        ]
        return rows, end * self.block_size

    def _find_run(self, query: Query) -> tuple[dict[int, list[int]], int, int]:
        """Return the blocks that were found, by index, and the bounds [start, end) of the run of consecutive cached
        blocks.
        """
        unit, size = self.replica.hit_alignment, self.block_size
        needed = self._run_length(query.drops_last_block)
        limit = min(query.max_tokens, len(query.digests) * self.hash_size) // size
        found: dict[int, list[int]] = {}
        run = 0
        for index in range(limit - 1, -1, -1):
            blocks = query.find(self._digest(query.digests, index))
            if blocks is None:
                run = 0
                continue
            hit_end = index if query.drops_last_block else index + 1
            if run == 0 and hit_end * size % unit != 0:
                continue  # not a multiple of the hit alignment
            found[index] = blocks
            run += 1
            if run >= needed:
                return found, index, index + run
        # The run ends where a hit may end, or with the block behind it that is left out: aligned, a hit would be lost.
        return found, 0, run if self._safe else self._align(run)

    def _align(self, num_blocks: int) -> int:
        while num_blocks * self.block_size % self.replica.hit_alignment != 0:
            num_blocks -= 1
        return num_blocks

    def reachable_blocks(self, start: int, end: int, boundaries: Sequence[int]) -> list[bool] | None:
        """Return a mask: which blocks are in a window that ends at a multiple of the retention interval or at one of
        `boundaries`.

        Where look-ups drop the last block they read one block past the boundary, so the window ends one block later.
        """
        unit, size = self.replica.hit_alignment, self.block_size
        if unit % size != 0:
            return None  # a boundary can be inside a block: keep all blocks, so that no hit is lost
        needed, shift = self._run_length(self.drops_last_block), int(self.drops_last_block)
        keep = [False] * (end - start)
        segment = unit if self._dense else self._kept_every
        if segment:
            per_segment = segment // size
            if needed >= per_segment:
                return None
            for index in range(max(start, shift), end):
                if (index - shift) % per_segment >= per_segment - needed:
                    keep[index - start] = True
        if not self._dense:
            for boundary in boundaries:
                stop = boundary // unit * unit // size + shift
                for index in range(max(start, stop - needed), min(end, stop)):
                    keep[index - start] = True
        return keep


class ChunkedLocalManager(GroupManager):
    """Manages a group of chunked local attention.

    With chunks of 8, after 13 computed tokens the next token does not attend to the first 8 tokens. Nor does it after 8
    computed tokens, since the next token begins a chunk.

    0 1 2 3 4 5 6 7 | 8 9 10 11 12 [13]
    |--- skipped ---|
    """

    def skipped_tokens(self, num_computed: int) -> int:
        """Return the number of tokens in all chunks before the chunk of the next token."""
        return num_computed // self.spec.chunk * self.spec.chunk

    def find(self, query: Query) -> tuple[list[list[int]], int]:
        """Find a prefix: null blocks for all chunks but the last one, then the cached blocks of the last chunk up to a
        missing one.

        Where blocks do not divide chunks, this prefix may end in an earlier chunk, inside whose first block that chunk
        begins: it is searched again, as a prefix of this length. vLLM takes it without those blocks.
        """
        size = self.block_size
        end = min(query.max_tokens, len(query.digests) * self.hash_size) // size
        while True:
            first = max(self.skipped_tokens(end * size), 0) // size
            rows = [[NULL_BLOCK] * first for _ in query.groups]
            for index in range(first, end):
                blocks = query.find(self._digest(query.digests, index))
                if blocks is None:
                    break
                for row, block in zip(rows, blocks, strict=True):
                    row.append(block)
            end = len(rows[0])
            if self.skipped_tokens(end * size) // size == first:
                return rows, end * size
