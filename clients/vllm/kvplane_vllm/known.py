"""What was reported to the allocator about a request of vLLM."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.request import Request


class Known:
    """A request that the allocator knows: its slot, and how many of its tokens and hashes were reported."""

    __slots__ = ("is_cached", "num_hashes", "num_tokens", "request", "slot")

    def __init__(self, slot: int, request: Request, is_cached: bool) -> None:
        """`is_cached`: whether the allocator has a prefix cache, which needs the hashes."""
        self.slot = slot
        self.request = request
        self.is_cached = is_cached
        self.num_tokens = self.num_hashes = 0

    def new_hashes(self, hash_block_size: int, num_tokens: int) -> Sequence[bytes]:
        """Return the hashes of full blocks of the first `num_tokens` tokens that were not reported yet."""
        if not self.is_cached:
            return ()
        return self.request.block_hashes[self.num_hashes : num_tokens // hash_block_size]
