"""The result of planning: KV cache groups, their blocks, and where each layer's pages lie."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from kvplane.base.groups import GroupKind
from kvplane.base.layer_spec import LayerSpec
from kvplane.base.layers import KVSharingLayer
from kvplane.base.rank_plan import TensorPlacement
from kvplane_service.core.planner.options import PlanOptions


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one block table.

    Attributes:
        layer_names: in the group's order, which is their order in memory.
        specs: the format of each layer, as it is allocated (after growing and padding).
        one_format: the layers were merged into one format; else each keeps its own, of one uniform type.
        is_draft: holds draft layers whose last matched block is computed again.
    """

    layer_names: tuple[str, ...]
    specs: tuple[LayerSpec, ...]
    one_format: bool
    is_draft: bool = False

    @property
    def spec(self) -> LayerSpec:
        """The format that stands for the group."""
        return self.specs[0]

    @property
    def block_size(self) -> int:
        """Tokens per block, before context-parallel scaling."""
        return self.spec.block_size

    @property
    def kind(self) -> GroupKind:
        """How the allocator treats the group. Kinds mix only where every layer keeps every token."""
        kinds = {spec.kind for spec in self.specs}
        return kinds.pop() if len(kinds) == 1 else GroupKind.FULL_ATTENTION

    @property
    def bytes_per_block(self) -> int:
        """Bytes of the group's pages of one block, without padding between groups."""
        return sum(spec.page_bytes for spec in self.specs)


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker's share. `layer_names` of its tensors are its own layers only."""

    bytes_per_block: int
    size_bytes: int
    tensors: tuple[TensorPlacement, ...]


class WarningCode(Enum):
    """What a plan is worth a warning for."""

    PADDING_LAYERS = "padding_layers"
    HYBRID_OFF = "hybrid_off"
    FULL_ALLOCATION = "full_allocation"
    NO_DRAFT_LAYERS = "no_draft_layers"


@dataclass(frozen=True, slots=True)
class PlanWarning:
    """Memory or hits given away. `figures` are the numbers of the message, for machines."""

    code: WarningCode
    message: str
    figures: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Everything that follows from layers, memory and options.

    Attributes:
        options: as given, with max_model_len shortened where that was asked for.
        groups: the whole model's groups; the index is the group id.
        workers: one per worker given, in its order.
        bytes_per_block: the widest group with alignment, over all workers' layers.
        num_blocks: in every worker's pool, with the null block.
        blocks_per_request: blocks that one request of max_model_len holds, over all groups.
        scheduler_block_size: tokens; hits are multiples of it unless they may end inside a block.
        hash_block_size: tokens per block hash.
        partial_hits: hits may end inside a block.
        needs_zeroing: new blocks must be zeroed: a page can be read as another type, or before it is written.
        tp_replicas: consecutive tensor-parallel ranks that hold identical pages in every layer.
        shared_layers: layers without a cache of their own.
        warnings: what a person should know.
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
    shared_layers: tuple[KVSharingLayer, ...] = ()
    warnings: tuple[PlanWarning, ...] = ()

    @property
    def hit_alignment(self) -> int:
        """Every hit length is a multiple of this many tokens."""
        return self.hash_block_size if self.partial_hits else self.scheduler_block_size

    @property
    def padding_bytes(self) -> tuple[int, ...]:
        """Per group: bytes of each block that its layers leave unused."""
        return tuple(self.bytes_per_block - group.bytes_per_block for group in self.groups)

    @property
    def max_concurrency(self) -> float:
        """Requests of max_model_len that fit at once; infinite when the model has no cache."""
        return self.num_blocks / self.blocks_per_request if self.blocks_per_request else math.inf

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit when every request is of max_model_len; 0 when the model has no cache."""
        return int(self.max_concurrency * self.options.max_model_len) if self.blocks_per_request else 0
