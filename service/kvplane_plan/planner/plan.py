"""The input types of planning (workers and options) and its output types (groups, placements, the plan)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import DENSE_RETENTION, MAX_BLOCKS, MAX_TOKENS, GroupKind, Planner
from kvplane.base.layer_spec import LayerSpec, RequestLimits
from kvplane.base.layers import KVSharingLayer, Layer
from kvplane.base.rank_plan import TensorPlacement


class Layout(Enum):
    """Order of layers and blocks in memory. The value is vLLM's name (L = layer, B = block).

    LAYER_OUTERMOST: all blocks of a layer are contiguous.
    BLOCK_OUTERMOST: all layers of a block are contiguous, so a block is one large transfer.
    """

    LAYER_OUTERMOST = "LBNHC"
    BLOCK_OUTERMOST = "BLHNC"


@dataclass(frozen=True, slots=True)
class Worker:
    """The layers and memory of one rank. Tensor-parallel ranks have equal layers, pipeline stages different ones.

    Attributes:
        layers: layers of the rank, in model order.
        memory_bytes: memory for the cache; ignored if `PlanOptions.num_blocks` is given.
    """

    layers: tuple[Layer | KVSharingLayer, ...]
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Settings of a plan.

    Attributes:
        max_model_len: longest request in tokens.
        fit_max_model_len: shorten max_model_len to what fits instead of refusing the plan.
        max_batched_tokens: most tokens scheduled in one step.
        max_concurrent_batches: steps in flight.
        max_encoder_tokens: longest encoder input, for cross attention.
        num_blocks: blocks in the pool, independent of the memory; 0: as many as fit.
        layout: order of layers and blocks in memory.
        hybrid: release blocks that local layers do not need any more; off: every layer keeps every token.
        prefix_caching: blocks are hashed and shared.
        external_cache: a connector moves blocks by hash, even without prefix caching.
        prefix_match_unit: tokens per block hash; 0: the most that every group allows.
        retention_interval: tokens between kept tails of window and state groups; 0 and DENSE_RETENTION as in
            `ReplicaSpec`.
        drops_last_block: look-ups of draft groups drop the last matched block, which the drafter recomputes.
        prefill_lookahead: drafts per step of a multi-module drafter.
        tp_size, dcp_size: tensor-parallel and decode-context-parallel ranks.
        planner: how layers are distributed over groups; BEST also chooses the layout, and needs the workers' memory.
            With SPLIT, num_blocks counts blocks of attention.
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
    drops_last_block: bool = False
    prefill_lookahead: int = 0
    tp_size: int = 1
    dcp_size: int = 1
    planner: Planner = Planner.REFERENCE

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
        """The limits that bound the blocks of one request."""
        return RequestLimits(self.max_model_len, self.max_in_flight_tokens, self.max_encoder_tokens, self.dcp_size)


def _require_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidArgument(f"{value} is not {low} to {high}", field=name, remedy=f"give {low} to {high}")


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one block table.

    Attributes:
        layer_names: names of the layers, in their order in memory.
        specs: the format of each layer as allocated, after growing and padding.
        one_format: whether the layers were merged into one format; otherwise each layer keeps its own page size.
        is_draft: whether the group has draft layers, whose last matched block is computed again.
    """

    layer_names: tuple[str, ...]
    specs: tuple[LayerSpec, ...]
    one_format: bool
    is_draft: bool = False

    @property
    def spec(self) -> LayerSpec:
        """The format of the group as a whole: that of its first layer."""
        return self.specs[0]

    @property
    def block_size(self) -> int:
        """Tokens per block, before context-parallel scaling."""
        return self.spec.block_size

    @property
    def kind(self) -> GroupKind:
        """The kind of the group. Layers of several kinds are grouped only where every layer keeps every token."""
        kinds = {spec.kind for spec in self.specs}
        return kinds.pop() if len(kinds) == 1 else GroupKind.FULL_ATTENTION

    @property
    def bytes_per_block(self) -> int:
        """Bytes of the group's pages of one block, without padding between groups."""
        return sum(spec.page_bytes for spec in self.specs)


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """The memory of one worker: bytes per block, total bytes, and the places of its own layers' tensors."""

    bytes_per_block: int
    size_bytes: int
    tensors: tuple[TensorPlacement, ...]


class WarningCode(Enum):
    """Why a plan has a warning."""

    PADDING_LAYERS = "padding_layers"
    HYBRID_OFF = "hybrid_off"
    FULL_ALLOCATION = "full_allocation"
    NO_DRAFT_LAYERS = "no_draft_layers"
    COARSE_HITS = "coarse_hits"


@dataclass(frozen=True, slots=True)
class PlanWarning:
    """A warning about memory or cache hits that the plan loses. `figures` are the numbers in the message."""

    code: WarningCode
    message: str
    figures: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The result of planning.

    Attributes:
        options: as given, with max_model_len shortened where that was requested.
        groups: the whole model's groups; the index is the group id.
        workers: one plan per given worker, in the same order.
        bytes_per_block: bytes of the widest group, aligned, over the layers of all workers.
        num_blocks: number of blocks in every worker's pool, the null block included.
        blocks_per_request: blocks that one request of max_model_len holds, over all groups.
        scheduler_block_size: tokens; hits are multiples of it unless they may end inside a block.
        hash_block_size: tokens per block hash.
        partial_hits: whether hits may end inside a block.
        needs_zeroing: whether new blocks must be zeroed, because a page can be read as another type, or before it is
            written.
        tp_replicas: consecutive tensor-parallel ranks that hold identical pages in every layer.
        blocks_per_state: consecutive blocks that a state takes.
        shared_layers: layers that use the cache of another layer.
        warnings: what the operator should know.
    """

    options: PlanOptions
    groups: tuple[CacheGroup, ...]
    workers: tuple[WorkerPlan, ...]
    bytes_per_block: int
    num_blocks: int
    blocks_per_request: int
    scheduler_block_size: int
    hash_block_size: int
    partial_hits: bool
    needs_zeroing: bool
    tp_replicas: int
    blocks_per_state: int = 1
    shared_layers: tuple[KVSharingLayer, ...] = ()
    warnings: tuple[PlanWarning, ...] = ()

    @property
    def hit_alignment(self) -> int:
        """Every hit length is a multiple of this many tokens."""
        return self.hash_block_size if self.partial_hits else self.scheduler_block_size

    @property
    def padding_bytes(self) -> tuple[int, ...]:
        """Per group: bytes of each block that its layers leave unused."""
        return tuple(
            self.bytes_per_block * (self.blocks_per_state if group.spec.is_state else 1) - group.bytes_per_block
            for group in self.groups
        )

    @property
    def max_concurrency(self) -> float:
        """Requests of max_model_len that fit at once; infinite for a model without caches."""
        return self.num_blocks / self.blocks_per_request if self.blocks_per_request else math.inf

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit when every request is of max_model_len; 0 when the model has no cache."""
        return int(self.max_concurrency * self.options.max_model_len) if self.blocks_per_request else 0
