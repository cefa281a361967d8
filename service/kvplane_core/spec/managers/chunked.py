"""Chunked local attention: a token attends only to its own chunk, so earlier chunks need no blocks."""

from __future__ import annotations

from kvplane_core.face.keys import NULL_BLOCK
from kvplane_core.spec.managers.base import GroupManager
from kvplane_core.spec.managers.questions import Query


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
