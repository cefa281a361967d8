"""What a plan is made from: workers, and the settings that matter to memory."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import DENSE_RETENTION, MAX_BLOCKS, MAX_TOKENS
from kvplane.base.layer_spec import RequestLimits
from kvplane.base.layers import KVSharingLayer, Layer


class Layout(Enum):
    """Order of layers and blocks in memory. The value is the reference's name (L = layer, B = block).

    LAYER_OUTERMOST: all blocks of a layer lie together.
    BLOCK_OUTERMOST: all layers of a block lie together, so a block is one large transfer.
    """

    LAYER_OUTERMOST = "LBNHC"
    BLOCK_OUTERMOST = "BLHNC"


@dataclass(frozen=True, slots=True)
class Worker:
    """One rank as the plan sees it. Tensor-parallel ranks have equal layers, pipeline stages different ones.

    Attributes:
        layers: in model order.
        memory_bytes: cache memory; not looked at when the number of blocks is given.
    """

    layers: tuple[Layer | KVSharingLayer, ...]
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Settings of a plan.

    Attributes:
        max_model_len: longest request in tokens.
        fit_max_model_len: shorten max_model_len to what fits, in place of a refusal.
        max_batched_tokens: most tokens scheduled in one step.
        max_concurrent_batches: steps in flight.
        max_encoder_tokens: longest encoder input, for cross attention.
        num_blocks: blocks in the pool, whatever the memory; 0 = as many as fit.
        layout: order of layers and blocks in memory.
        hybrid: free what local layers no longer need; off: every layer keeps every token.
        prefix_caching: blocks are hashed and shared.
        external_cache: a connector moves blocks by hash, also without prefix caching.
        prefix_match_unit: tokens per block hash; 0 = as coarse as every group allows.
        retention_interval: tokens between kept tails of window and state groups; 0 and DENSE_RETENTION as in
            `ReplicaSpec`.
        drop_draft_block: the drafter computes the last matched block again: groups with draft layers drop it.
        prefill_lookahead: drafts per step of a multi-module drafter.
        tp_size, dcp_size: tensor-parallel and decode-context-parallel ranks.
    """

    max_model_len: int = 32768
    fit_max_model_len: bool = False
    max_batched_tokens: int = 8192
    max_concurrent_batches: int = 1
    max_encoder_tokens: int = 0
    num_blocks: int = 0
    layout: Layout = Layout.LAYER_OUTERMOST
    hybrid: bool = True
    prefix_caching: bool = True
    external_cache: bool = False
    prefix_match_unit: int = 0
    retention_interval: int = 0
    drop_draft_block: bool = False
    prefill_lookahead: int = 0
    tp_size: int = 1
    dcp_size: int = 1

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_batched_tokens", "max_concurrent_batches", "tp_size", "dcp_size"):
            _require_range(name, getattr(self, name), 1, MAX_TOKENS)
        for name in ("max_encoder_tokens", "prefix_match_unit", "prefill_lookahead"):
            _require_range(name, getattr(self, name), 0, MAX_TOKENS)
        _require_range("num_blocks", self.num_blocks, 0, MAX_BLOCKS)
        _require_range("retention_interval", self.retention_interval, DENSE_RETENTION, MAX_TOKENS)

    @property
    def max_in_flight_tokens(self) -> int:
        """Most tokens scheduled and not yet executed."""
        return self.max_batched_tokens * self.max_concurrent_batches

    @property
    def limits(self) -> RequestLimits:
        """What bounds the pages of one request."""
        return RequestLimits(self.max_model_len, self.max_in_flight_tokens, self.max_encoder_tokens, self.dcp_size)


def _require_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidArgument(f"{value} is out of range", field=name, remedy=f"give {low} to {high}")
