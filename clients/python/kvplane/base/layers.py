"""The kinds of layer cache: one frozen type per kind, and the layers of a model that have them.

What they have in common is in `kvplane.base.layer_spec`. Facts follow vLLM 0.33
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
    """Every token's keys and values are kept.

    A local layer may be cached this way (hybrid allocation off) and still compute with its window or chunk, which is
    then recorded here; layers that differ only in that share one format.

    Attributes:
        computes_window: sliding window of the computation; 0 = none.
        computes_chunk: attention chunk of the computation; 0 = none.
    """

    type_name: ClassVar[str] = "full_attention"
    kind: ClassVar[GroupKind] = GroupKind.FULL_ATTENTION
    holds_every_token: ClassVar[bool] = True
    fine_grained_hits: ClassVar[bool] = True
    supports_dcp: ClassVar[bool] = True

    computes_window: int = field(default=0, metadata=ZERO_OR_MORE)
    computes_chunk: int = field(default=0, metadata=ZERO_OR_MORE)

    def blocks_per_request(self, limits: RequestLimits) -> int:
        """Blocks of a request of the longest length, on one of the ranks that share it."""
        ranks = limits.dcp_size if self.dcp_sharded else 1
        return ceil_div(ceil_div(limits.max_model_len, ranks), self.block_size)

    def merged_with(self, other: LayerSpec) -> LayerSpec | None:
        """As for any format, but layers may differ in whether they compute with a window or chunk."""
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
    """Multi-head latent attention: one latent row per token, no values.

    Kernels index the cache in whole rows, so its pages cannot be padded to an arbitrary size.
    """

    type_name: ClassVar[str] = "mla_attention"
    kind: ClassVar[GroupKind] = GroupKind.MLA

    def _default_head_size_v(self) -> int:
        return 0

    def _padded_to(self, page_bytes: int) -> LayerSpec | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenStateSpec(MLASpec):
    """Hidden states kept for an extractor: allocated as full attention, in a group of their own."""

    type_name: ClassVar[str] = "hidden_state"

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's hidden state."""
        return self.num_kv_heads * self.head_size * self.dtype.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkFullAttentionSpec(FullAttentionSpec):
    """Full attention that also reads the blocks of fixed sink tokens, which the group always holds."""

    type_name: ClassVar[str] = "sink_full_attention"
    kind: ClassVar[GroupKind] = GroupKind.SINK_FULL

    sink_tokens: int = field(metadata=ONE_OR_MORE)

    def __post_init__(self) -> None:
        AttentionSpec.__post_init__(self)
        if self.sink_tokens % self.block_size:
            refuse(f"{self.sink_tokens} is no multiple of block_size", "sink_tokens", "give whole blocks")

    def group_fields(self) -> dict[str, Any]:
        """The sinks."""
        return {"sink_tokens": self.sink_tokens}

    def _kind_key(self) -> tuple[object, ...]:
        return (self.type_name, self.sink_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RSWASpec(FullAttentionSpec):
    """Reference sliding window: the prompt is always visible, of the generated tokens only the last `window`.

    It is bounded like full attention (prompt and window together are at most the longest request).
    """

    type_name: ClassVar[str] = "r_swa"
    kind: ClassVar[GroupKind] = GroupKind.R_SWA
    holds_every_token: ClassVar[bool] = False

    window: int = field(metadata=ONE_OR_MORE)

    def group_fields(self) -> dict[str, Any]:
        """The decode window."""
        return {"window": self.window}

    def _kind_key(self) -> tuple[object, ...]:
        return (self.type_name, self.window)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """Only the last `window` tokens are attended; blocks wholly before them are freed while the request runs.

    Attributes:
        window: attended tokens, the present one among them.
        extra_retained_tokens: tokens kept below the window, which a multi-module drafter may compute again.
    """

    type_name: ClassVar[str] = "sliding_window"
    kind: ClassVar[GroupKind] = GroupKind.SLIDING_WINDOW
    sparse_retention: ClassVar[bool] = True

    window: int = field(metadata=ONE_OR_MORE)
    extra_retained_tokens: int = field(default=0, metadata=ZERO_OR_MORE)

    def blocks_per_request(self, limits: RequestLimits) -> int:
        """Blocks of the window and the tokens in flight; one more, as a window may begin inside a block."""
        reach = self.window - 1 + self.extra_retained_tokens + limits.max_in_flight_tokens
        return ceil_div(min(reach, limits.max_model_len), self.block_size) + 1

    def admission_cap_blocks(self, limits: RequestLimits) -> int:
        """The same bound, so that a request that fits at start-up is admitted later."""
        return self.blocks_per_request(limits)

    def as_full_attention(self, block_size: int) -> LayerSpec:
        """Full attention that computes with this window."""
        return FullAttentionSpec(computes_window=self.window, **self._promoted(block_size))

    def retaining(self, extra_tokens: int) -> LayerSpec:
        """This window with at least `extra_tokens` kept below it."""
        return replace(self, extra_retained_tokens=max(self.extra_retained_tokens, extra_tokens))

    def group_fields(self) -> dict[str, Any]:
        """The window and what is kept below it."""
        return {"window": self.window, "extra_retained_tokens": self.extra_retained_tokens}

    def _kind_key(self) -> tuple[object, ...]:
        return (self.type_name, self.window)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowMLASpec(SlidingWindowSpec):
    """A sliding window over latent rows.

    It is never merged with a plain window, although the reference merges them when a plain one comes first.
    """

    type_name: ClassVar[str] = "sliding_window_mla"
    kind: ClassVar[GroupKind] = GroupKind.SLIDING_WINDOW_MLA

    def _default_head_size_v(self) -> int:
        return 0

    def as_full_attention(self, block_size: int) -> LayerSpec:
        """MLA that computes with this window."""
        return MLASpec(computes_window=self.window, **self._promoted(block_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLocalSpec(AttentionSpec):
    """A token attends only to its own chunk of `chunk` tokens; blocks of earlier chunks are freed."""

    type_name: ClassVar[str] = "chunked_local_attention"
    kind: ClassVar[GroupKind] = GroupKind.CHUNKED_LOCAL

    chunk: int = field(metadata=ONE_OR_MORE)

    def blocks_per_request(self, limits: RequestLimits) -> int:
        """Blocks of one chunk and the tokens in flight."""
        return ceil_div(min(self.chunk + limits.max_in_flight_tokens, limits.max_model_len), self.block_size)

    def admission_cap_blocks(self, limits: RequestLimits) -> int:
        """The same bound, so that a request that fits at start-up is admitted later."""
        return self.blocks_per_request(limits)

    def as_full_attention(self, block_size: int) -> LayerSpec:
        """Full attention that computes with this chunk."""
        return FullAttentionSpec(computes_chunk=self.chunk, **self._promoted(block_size))

    def group_fields(self) -> dict[str, Any]:
        """The chunk."""
        return {"chunk": self.chunk}

    def _kind_key(self) -> tuple[object, ...]:
        return (self.type_name, self.chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """Keys and values of the encoder's tokens: allocated once, never shared."""

    type_name: ClassVar[str] = "cross_attention"
    kind: ClassVar[GroupKind] = GroupKind.CROSS
    prefix_cacheable: ClassVar[bool] = False

    def blocks_per_request(self, limits: RequestLimits) -> int:
        """Blocks of the longest encoder input."""
        return ceil_div(limits.max_encoder_tokens, self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSpec(AttentionSpec):
    """One block per request, written as a ring buffer: the input of a compressor."""

    type_name: ClassVar[str] = "ring"
    kind: ClassVar[GroupKind] = GroupKind.RING
    prefix_cacheable: ClassVar[bool] = False
    zeroes_new_blocks: ClassVar[bool] = False

    def blocks_per_request(self, limits: RequestLimits) -> int:
        """One."""
        return 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec(LayerSpec):
    """A recurrent state (Mamba, linear attention, delta nets): one per page, whatever the block size.

    Attributes:
        shapes: shapes of the state's tensors, without the block dimension.
        dtypes: their element types, one per shape.
        mode: NONE keeps the running state only; ALIGN also caches states at block boundaries.
        speculative_blocks: states kept for draft tokens in addition to the running one.
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

    def __post_init__(self) -> None:
        if not self.shapes or len(self.shapes) != len(self.dtypes):
            refuse("shapes and dtypes do not pair", "shapes", "give one dtype for each of one or more shapes")
        if any(size < 1 for shape in self.shapes for size in shape):
            refuse("a state tensor has no elements", "shapes", "give sizes of 1 or more")
        if self.dcp_sharded:
            refuse("a state has no tokens to split", "dcp_sharded", "give false: each rank holds it")
        LayerSpec.__post_init__(self)

    @property
    def content_bytes(self) -> int:
        """Bytes of one state."""
        return sum(prod(s) * d.num_bytes for s, d in zip(self.shapes, self.dtypes, strict=True))

    @property
    def mamba_mode(self) -> MambaMode | None:
        """How states are cached."""
        return self.mode

    def blocks_per_request(self, limits: RequestLimits) -> int:
        """The running state, the speculative ones, and in ALIGN mode the one last cached."""
        return (2 if self.mode is MambaMode.ALIGN else 1) + self.speculative_blocks

    def group_fields(self) -> dict[str, Any]:
        """How states are cached."""
        return {"mamba_mode": self.mode, "speculative_blocks": self.speculative_blocks}

    def _kind_key(self) -> tuple[object, ...]:
        return (self.type_name, self.mode, self.speculative_blocks, self.page_bytes)


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer that owns a cache.

    Attributes:
        name: unique within the model.
        spec: the cache's format.
        is_draft: the layer belongs to a draft model (EAGLE, MTP); no part of the format, so it never divides
            groups.
    """

    name: str
    spec: LayerSpec
    is_draft: bool = False


@dataclass(frozen=True, slots=True)
class KVSharingLayer:
    """A layer that reads the cache of another layer, so it has no format and costs nothing.

    Attributes:
        name: unique within the model.
        shares_with: name of the `Layer` whose cache it reads.
    """

    name: str
    shares_with: str
