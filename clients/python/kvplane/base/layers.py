"""The formats in which layers are cached, one frozen type for each, and the layers of a model.

`kvplane.base.layer_spec` has the base classes of the formats. The rules are those of vLLM 0.33
(vllm/v1/kv_cache_interface.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar

from kvplane.base.groups import GroupKind, MambaMode
from kvplane.base.layer_spec import (
    ONE_OR_MORE,
    ZERO_OR_MORE,
    AttentionSpec,
    DType,
    LayerSpec,
    RequestLimits,
    ceil_div,
    refuse,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Full attention: the keys and values of every token are kept.

    A layer with local attention can also be cached in this format (vLLM: with hybrid allocation off). Such a layer
    still computes with its window or chunk, which `computes_window` and `computes_chunk` record. Layers that differ
    only in these two can share one format.

    Attributes:
        computes_window: sliding window of the computation in tokens; 0 = none.
        computes_chunk: attention chunk of the computation in tokens; 0 = none.
    """

    type_name: ClassVar[str] = "full_attention"
    kind: ClassVar[GroupKind] = GroupKind.FULL_ATTENTION
    holds_every_token: ClassVar[bool] = True
    fine_grained_hits: ClassVar[bool] = True
    supports_dcp: ClassVar[bool] = True

    computes_window: int = field(default=0, metadata=ZERO_OR_MORE)
    computes_chunk: int = field(default=0, metadata=ZERO_OR_MORE)

    def blocks_per_request(self, limits: RequestLimits) -> int:
        """Return the blocks of a request of the maximum length, on one of the ranks that share its tokens."""
        ranks = limits.dcp_size if self.dcp_sharded else 1
        return ceil_div(ceil_div(limits.max_model_len, ranks), self.block_size)

    def merged_with(self, other: LayerSpec) -> LayerSpec | None:
        """Return a format for layers of both formats; None if the formats differ in more than the window or chunk of
        the computation.
        """
        if type(other) is not type(self) or self._as_stored() != other._as_stored():
            return None
        windows = {self.computes_window, other.computes_window} - {0}
        chunks = {self.computes_chunk, other.computes_chunk} - {0}
        if len(windows) + len(chunks) > 1:
            return None
        return replace(self, computes_window=max(windows, default=0), computes_chunk=max(chunks, default=0))

    def _as_stored(self) -> FullAttentionSpec:
        return replace(self, computes_window=0, computes_chunk=0)

    def _kind_key(self) -> tuple[object, ...]:
        return ("every token",)


@dataclass(frozen=True, slots=True, kw_only=True)
class MLASpec(FullAttentionSpec):
    """Multi-head latent attention: one latent row per token, and no values.

    Its pages cannot be padded to an arbitrary size, since kernels address them in whole rows.
    """

    type_name: ClassVar[str] = "mla_attention"
    kind: ClassVar[GroupKind] = GroupKind.MLA

    def _default_head_size_v(self) -> int:
        return 0

    def _padded_to(self, page_bytes: int) -> LayerSpec | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenStateSpec(MLASpec):
    """Hidden states that are kept for an extractor. They are allocated as full attention, in a group of their own."""

    type_name: ClassVar[str] = "hidden_state"

    @property
    def token_bytes(self) -> int:
        """The size of one token's hidden state in bytes."""
        return self.num_kv_heads * self.head_size * self.dtype.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkFullAttentionSpec(FullAttentionSpec):
    """Full attention that also reads the blocks of fixed sink tokens. The group always holds these blocks."""

    type_name: ClassVar[str] = "sink_full_attention"
    kind: ClassVar[GroupKind] = GroupKind.SINK_FULL

    sink_tokens: int = field(metadata=ONE_OR_MORE)

    def __post_init__(self) -> None:
        AttentionSpec.__post_init__(self)
        if self.sink_tokens % self.block_size:
            refuse(
                f"{self.sink_tokens} is not a multiple of the block size, {self.block_size}",
                "sink_tokens",
                "give a multiple of block_size",
            )

    def group_fields(self) -> dict[str, Any]:
        """Return the number of sink tokens for this layer's `GroupSpec`."""
        return {"sink_tokens": self.sink_tokens}

    def _kind_key(self) -> tuple[object, ...]:
        return (self.type_name, self.sink_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RSWASpec(FullAttentionSpec):
    """Reference sliding window: a token attends to the whole prompt and to the last `window` generated tokens.

    The most blocks of a request is the number for full attention, since prompt and window can be as long as the longest
    request.
    """

    type_name: ClassVar[str] = "r_swa"
    kind: ClassVar[GroupKind] = GroupKind.R_SWA
    holds_every_token: ClassVar[bool] = False

    window: int = field(metadata=ONE_OR_MORE)

    def group_fields(self) -> dict[str, Any]:
        """Return the window for this layer's `GroupSpec`."""
        return {"window": self.window}

    def _kind_key(self) -> tuple[object, ...]:
        return (self.type_name, self.window)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """Sliding-window attention: a token attends to the last `window` tokens. Blocks before the window are freed during
    the request.

    Attributes:
        window: attended tokens, including the current one.
        extra_retained_tokens: tokens kept below the window, because a drafter with several modules may compute these
            tokens again.
    """

    type_name: ClassVar[str] = "sliding_window"
    kind: ClassVar[GroupKind] = GroupKind.SLIDING_WINDOW
    sparse_retention: ClassVar[bool] = True

    window: int = field(metadata=ONE_OR_MORE)
    extra_retained_tokens: int = field(default=0, metadata=ZERO_OR_MORE)

    def blocks_per_request(self, limits: RequestLimits) -> int:
        """Return the blocks of the window and of the tokens in flight, plus one because the window may begin inside a
        block.
        """
        reach = self.window - 1 + self.extra_retained_tokens + limits.max_in_flight_tokens
        return ceil_div(min(reach, limits.max_model_len), self.block_size) + 1

    def admission_cap_blocks(self, limits: RequestLimits) -> int:
        """Return the same number as `blocks_per_request`, so that a request that fits into the pool at start-up is also
        admitted later.
        """
        return self.blocks_per_request(limits)

    def as_full_attention(self, block_size: int) -> LayerSpec:
        """Return the full-attention format of a layer that computes with this window."""
        return FullAttentionSpec(computes_window=self.window, **self._promoted(block_size))

    def retaining(self, extra_tokens: int) -> LayerSpec:
        """Return this format with at least `extra_tokens` tokens kept below its window."""
        return replace(self, extra_retained_tokens=max(self.extra_retained_tokens, extra_tokens))

    def group_fields(self) -> dict[str, Any]:
        """Return the window and the tokens kept below it for this layer's `GroupSpec`."""
        return {"window": self.window, "extra_retained_tokens": self.extra_retained_tokens}

    def _kind_key(self) -> tuple[object, ...]:
        return (self.type_name, self.window)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowMLASpec(SlidingWindowSpec):
    """A sliding window over the latent rows of MLA.

    A layer of this format never shares a format with a layer of SlidingWindowSpec. (vLLM merges them if the
    SlidingWindowSpec is first.)
    """

    type_name: ClassVar[str] = "sliding_window_mla"
    kind: ClassVar[GroupKind] = GroupKind.SLIDING_WINDOW_MLA

    def _default_head_size_v(self) -> int:
        return 0

    def as_full_attention(self, block_size: int) -> LayerSpec:
        """Return the MLA format of a layer that computes with this window."""
        return MLASpec(computes_window=self.window, **self._promoted(block_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLocalSpec(AttentionSpec):
    """Chunked local attention: a token attends only to its chunk of `chunk` tokens. Blocks of earlier chunks
    are freed.
    """

    type_name: ClassVar[str] = "chunked_local_attention"
    kind: ClassVar[GroupKind] = GroupKind.CHUNKED_LOCAL

    chunk: int = field(metadata=ONE_OR_MORE)

    def blocks_per_request(self, limits: RequestLimits) -> int:
        """Return the blocks of one chunk and of the tokens in flight."""
        return ceil_div(min(self.chunk + limits.max_in_flight_tokens, limits.max_model_len), self.block_size)

    def admission_cap_blocks(self, limits: RequestLimits) -> int:
        """Return the same number as `blocks_per_request`, so that a request that fits into the pool at start-up is also
        admitted later.
        """
        return self.blocks_per_request(limits)

    def as_full_attention(self, block_size: int) -> LayerSpec:
        """Return the full-attention format of a layer that computes with this chunk."""
        return FullAttentionSpec(computes_chunk=self.chunk, **self._promoted(block_size))

    def group_fields(self) -> dict[str, Any]:
        """Return the chunk for this layer's `GroupSpec`."""
        return {"chunk": self.chunk}

    def _kind_key(self) -> tuple[object, ...]:
        return (self.type_name, self.chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """Cross attention: the keys and values of the encoder's tokens. They are allocated once and never shared."""

    type_name: ClassVar[str] = "cross_attention"
    kind: ClassVar[GroupKind] = GroupKind.CROSS
    prefix_cacheable: ClassVar[bool] = False

    def blocks_per_request(self, limits: RequestLimits) -> int:
        """Return the blocks of the longest encoder input."""
        return ceil_div(limits.max_encoder_tokens, self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSpec(AttentionSpec):
    """The input of a compressor: one block per request, which is written as a ring buffer."""

    type_name: ClassVar[str] = "ring"
    kind: ClassVar[GroupKind] = GroupKind.RING
    prefix_cacheable: ClassVar[bool] = False
    zeroes_new_blocks: ClassVar[bool] = False

    def blocks_per_request(self, limits: RequestLimits) -> int:
        """Return 1: a request has one block of this format."""
        return 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec(LayerSpec):
    """A recurrent state (Mamba, linear attention, delta nets). A page holds one state, whatever the block size.

    Attributes:
        shapes: shapes of the state's tensors, without the block dimension.
        dtypes: their element types, one per shape.
        mode: NONE keeps only the state of the last accepted token; ALIGN also caches states at block boundaries.
        speculative_blocks: number of states kept for draft tokens, in addition to the state of the last accepted token.
        checkpoint_alignment: ALIGN only: launches also write a state inside their chunk, see `GroupSpec`; 0 = no such
            state.
    """

    type_name: ClassVar[str] = "mamba"
    kind: ClassVar[GroupKind] = GroupKind.MAMBA
    fine_grained_hits: ClassVar[bool] = True
    sparse_retention: ClassVar[bool] = True
    supports_dcp: ClassVar[bool] = True
    is_state: ClassVar[bool] = True

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[DType, ...]
    mode: MambaMode = MambaMode.NONE
    speculative_blocks: int = field(default=0, metadata=ZERO_OR_MORE)
    checkpoint_alignment: int = field(default=0, metadata=ZERO_OR_MORE)

    def __post_init__(self) -> None:
        if not self.shapes or len(self.shapes) != len(self.dtypes):
            found = f"there are {len(self.shapes)} shapes and {len(self.dtypes)} dtypes"
            refuse(found, "shapes", "give one or more shapes, and one dtype for each")
        if any(size < 1 for shape in self.shapes for size in shape):
            refuse(f"a tensor of the shapes {self.shapes} has no elements", "shapes", "give sizes of 1 or more")
        if self.dcp_sharded:
            refuse("ranks cannot split a recurrent state: it has no tokens", "dcp_sharded", "give false")
        LayerSpec.__post_init__(self)

    @property
    def content_bytes(self) -> int:
        """The size of one state in bytes."""
        return sum(prod(s) * d.num_bytes for s, d in zip(self.shapes, self.dtypes, strict=True))

    @property
    def mamba_mode(self) -> MambaMode | None:
        """The caching mode: whether states are cached at block boundaries."""
        return self.mode

    def blocks_per_request(self, limits: RequestLimits) -> int:
        """Return the most states of one request: the state of the last accepted token, the states for drafts, and in
        ALIGN mode the last cached state and the state inside a chunk.
        """
        cached = 1 + int(self.checkpoint_alignment > 0) if self.mode is MambaMode.ALIGN else 0
        return 1 + cached + self.speculative_blocks

    def group_fields(self) -> dict[str, Any]:
        """Return the fields of the `GroupSpec` that only groups of states have."""
        return {
            "mamba_mode": self.mode,
            "speculative_blocks": self.speculative_blocks,
            "checkpoint_alignment": self.checkpoint_alignment if self.mode is MambaMode.ALIGN else 0,
        }

    def _kind_key(self) -> tuple[object, ...]:
        return (self.type_name, self.mode, self.speculative_blocks, self.checkpoint_alignment, self.page_bytes)


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer with a cache of its own.

    Attributes:
        name: name of the layer, unique within the model.
        spec: the cache's format.
        is_draft: the layer belongs to a draft model (EAGLE, MTP). Not a part of the format, so draft layers can share a
            group with others.
    """

    name: str
    spec: LayerSpec
    is_draft: bool = False


@dataclass(frozen=True, slots=True)
class KVSharingLayer:
    """A layer that reads the cache of another layer and therefore has neither a format nor memory of its own.

    Attributes:
        name: name of the layer, unique within the model.
        shares_with: name of the `Layer` whose cache it reads.
    """

    name: str
    shares_with: str
