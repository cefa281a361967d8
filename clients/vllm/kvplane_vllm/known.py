"""What was reported to the allocator about a request of vLLM."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.request import Request, RequestStatus

from kvplane.base.hashing.extra_keys import RequestKeys
from kvplane.base.step import ExtraKeys, Multimodal

STREAMS = RequestStatus.WAITING_FOR_STREAMING_REQ  # the answer has ended, and the next input is not there


class Known:
    """A request that the allocator knows: its slot, and how many of its tokens and hashes were reported."""

    __slots__ = ("is_cached", "num_hashes", "num_tokens", "request", "slot")

    def __init__(self, slot: int, request: Request, is_cached: bool) -> None:
        """`is_cached`: whether the allocator has a prefix cache, which needs the hashes."""
        self.slot = slot
        self.request = request
        self.is_cached = is_cached
        self.num_tokens = self.num_hashes = 0

    @property
    def num_kept(self) -> int:
        """The tokens that the request keeps: a session of inputs drops the last one of each answer."""
        request = self.request
        drops_last = request.resumable and (request.is_finished() or request.status is STREAMS)
        return max(self.num_tokens, request.num_tokens - drops_last)

    def new_hashes(self, hash_block_size: int, num_tokens: int) -> Sequence[bytes]:
        """Return the hashes of full blocks of the first `num_tokens` tokens that were not reported yet."""
        if not self.is_cached:
            return ()
        return self.request.block_hashes[self.num_hashes : num_tokens // hash_block_size]


def check_proof(request: Request, block_size: int) -> None:
    """Check that the hashes of a request prove its multimodal items and its adapter. Raises InvalidArgument."""
    positions = [(item.identifier, item.mm_position) for item in request.mm_features]
    items = tuple(Multimodal(name, position.offset, position.length) for name, position in positions)
    lora = request.lora_request
    keys = ExtraKeys(lora=(lora.lora_name, lora.lora_path) if lora else None, multimodal=items)
    RequestKeys(keys, block_size).check_prompt(request.num_tokens)


def withhold_hashes(request: Request) -> None:
    """Let a request have no hashes, from now on: it hits nothing, and others hit nothing of it."""
    request.block_hashes, request._block_hasher = [], None
