"""The shapes of layers and models: what their cache needs, before ranks, data type and block size are known.

A model is a pattern of layers. A layer has one cache, several (attention and a state, keys of an indexer) or none.
`Model.layers` makes the specifications of the layers on one rank from a model and `ModelOptions`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import Drafter, MambaMode
from kvplane.base.layer_spec import AttentionSpec, DType, LayerSpec, ceil_div, round_up
from kvplane.base.layers import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    Layer,
    MambaSpec,
    MLASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from kvplane_plan.planner import KERNEL_BLOCK, MLA_KERNEL_BLOCK, Layout

CACHE_DTYPES = {
    "bfloat16": DType.BFLOAT16,
    "float16": DType.FLOAT16,
    "fp8": DType.FLOAT8_E4M3FN,
}
AUTO = "auto"  # the type that the checkpoint was quantized for, else bfloat16


MAX_SPECULATIVE_TOKENS = 128
COMPRESSED_PAGE_ALIGNMENT = 576  # bytes; the stride of the kernels of compressed attention (vLLM 0.33)
MLA_STATE_BLOCK = 128  # tokens; a block of latent rows in a model with states is a multiple of it (vLLM 0.33)


def check_speculation(num_tokens: int, drafter: Drafter) -> None:
    """Raise InvalidArgument if there are too many draft tokens, or if there is a drafter and no draft token."""
    least = 0 if drafter is Drafter.NONE else 1
    if not least <= num_tokens <= MAX_SPECULATIVE_TOKENS:
        raise InvalidArgument(
            f"it is {num_tokens} with the drafter {drafter.value!r}",
            field="speculative_tokens",
            remedy=f"give the number of draft tokens of a decode step, {least} to {MAX_SPECULATIVE_TOKENS}",
        )


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How a model is served, as far as the specifications of its layers depend on it.

    Attributes:
        tensor_parallel: number of ranks that divide the heads; if there are fewer key-value heads, heads are
            replicated.
        cache_dtype: data type of keys and values, AUTO or one of CACHE_DTYPES; recurrent states stay in the model's
            bfloat16.
        block_size: tokens per attention block; raised if kernels or states need larger blocks.
        max_model_len: longest request in tokens; also the block size of a recurrent state that is not cached.
        mamba_mode: how recurrent states are cached.
        speculative_tokens: most draft tokens per decode step; one recurrent state is kept for each.
        drafter: drafter whose layer is added to the model.
        state_checkpoints: launches also write a state inside their chunk where the model's kernels can (vLLM 0.33 with
            Mamba 2). Set it only for an engine that does.
    """

    tensor_parallel: int = 1
    cache_dtype: str = AUTO
    block_size: int = KERNEL_BLOCK
    max_model_len: int = 32768
    mamba_mode: MambaMode = MambaMode.ALIGN
    speculative_tokens: int = 0
    drafter: Drafter = Drafter.NONE
    state_checkpoints: bool = False

    def __post_init__(self) -> None:
        check_speculation(self.speculative_tokens, self.drafter)
        for name in ("tensor_parallel", "block_size", "max_model_len"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"it is {getattr(self, name)}", field=name, remedy="give 1 or more")
        if self.cache_dtype not in (AUTO, *CACHE_DTYPES):
            known = ", ".join((AUTO, *CACHE_DTYPES))
            what = f"the data type {self.cache_dtype!r} is unknown"
            raise InvalidArgument(what, field="cache_dtype", remedy=f"use one of {known}")

    @property
    def dtype(self) -> DType:
        """Element type of keys and values."""
        return CACHE_DTYPES.get(self.cache_dtype, DType.BFLOAT16)


@dataclass(frozen=True, slots=True)
class Full:
    """The shape of a full attention layer: number of key-value heads of the whole model, and head size.

    Attributes:
        value_size: elements of a value; 0 = as many as of a key.
    """

    kv_heads: int
    head_size: int
    value_size: int = field(default=0, kw_only=True)

    def attention(self, options: ModelOptions, block_size: int) -> AttentionSpec:
        """Return the specification of this layer on one rank, with `block_size` tokens per block."""
        return FullAttentionSpec(**self._common(options, block_size))

    def _common(self, options: ModelOptions, block_size: int) -> dict[str, Any]:
        return {
            "block_size": block_size,
            "num_kv_heads": _heads_per_rank(self.kv_heads, options.tensor_parallel),
            "head_size": self.head_size,
            "head_size_v": self.value_size,
            "dtype": options.dtype,
        }


@dataclass(frozen=True, slots=True)
class Sliding(Full):
    """The shape of a sliding-window attention layer: attention over the last `window` tokens."""

    window: int

    def attention(self, options: ModelOptions, block_size: int) -> AttentionSpec:
        """Return the specification of this layer on one rank, with `block_size` tokens per block."""
        return SlidingWindowSpec(**self._common(options, block_size), window=self.window)


@dataclass(frozen=True, slots=True)
class Chunked(Full):
    """The shape of a chunked attention layer: attention within chunks of `chunk` tokens."""

    chunk: int

    def attention(self, options: ModelOptions, block_size: int) -> AttentionSpec:
        """Return the specification of this layer on one rank, with `block_size` tokens per block."""
        return ChunkedLocalSpec(**self._common(options, block_size), chunk=self.chunk)


@dataclass(frozen=True, slots=True)
class Latent:
    """The shape of a multi-head latent attention layer: one vector of `row_size` numbers per token, with equal content
    on every rank.

    Attributes:
        packed_bytes: bytes of a row of elements of fp8, which has scales and parts in bfloat16; 0: as many as elements.
    """

    row_size: int
    packed_bytes: int = 0

    def attention(self, options: ModelOptions, block_size: int) -> AttentionSpec:
        """Return the specification of this layer on one rank, with at least `block_size` tokens per block."""
        is_packed = bool(self.packed_bytes) and options.dtype is DType.FLOAT8_E4M3FN
        return MLASpec(
            block_size=round_up(block_size, MLA_KERNEL_BLOCK),
            num_kv_heads=1,
            head_size=self.packed_bytes if is_packed else self.row_size,
            dtype=DType.UINT8 if is_packed else options.dtype,
            max_tp_shards=1,
        )


@dataclass(frozen=True, slots=True)
class Indexer:
    """The shape of the keys by which sparse attention selects tokens: one row of bytes per token, of which each rank
    has a copy.
    """

    row_bytes: int

    def attention(self, options: ModelOptions, block_size: int) -> AttentionSpec:
        """Return the specification of this cache on one rank, with at least `block_size` tokens per block."""
        return MLASpec(
            block_size=round_up(block_size, MLA_KERNEL_BLOCK),
            num_kv_heads=1,
            head_size=self.row_bytes,
            dtype=DType.UINT8,
            max_tp_shards=1,
        )


@dataclass(frozen=True, slots=True)
class Compressed:
    """The shape of one of the caches of a layer with compressed attention (DeepSeek V4). Kernels fix the tokens of a
    block, the bytes of a row and the alignment of a page; every rank has a copy.

    Attributes:
        name: what follows "model.layers.<i>." in the name of the cache.
        block_size: tokens of a block.
        row_size: elements of a row.
        row_bytes: bytes of a row that has scales and parts of another type; 0: as many as elements need.
        dtype: data type of a row of elements.
        tokens_per_row: tokens that a row covers.
        window: tokens that are kept; 0 = all.
    """

    name: str
    block_size: int
    row_size: int
    row_bytes: int = 0
    dtype: DType = DType.UINT8
    tokens_per_row: int = 1
    window: int = 0

    def attention(self, options: ModelOptions, block_size: int) -> AttentionSpec:
        """Return the specification of this cache; `block_size` has no effect. Raises InvalidArgument for a data type
        that is not the kernels'.
        """
        if options.cache_dtype not in (AUTO, "fp8"):
            what = f"compressed attention has rows of fp8, not of {options.cache_dtype}"
            raise InvalidArgument(what, field="cache_dtype", remedy=f"use {AUTO} or fp8")
        common: dict[str, Any] = {
            "block_size": self.block_size,
            "num_kv_heads": 1,
            "head_size": self.row_size,
            "dtype": self.dtype,
            "state_bytes": self.row_bytes,
            "tokens_per_state": self.tokens_per_row,
            "page_alignment": COMPRESSED_PAGE_ALIGNMENT,
            "state_format": "model_version=deepseek_v4" if self.row_bytes else "",
            "max_tp_shards": 1,
        }
        spec = SlidingWindowMLASpec(**common, window=self.window) if self.window else MLASpec(**common)
        return replace(spec, padded_page_bytes=spec.page_bytes)  # as vLLM states it


@dataclass(frozen=True, slots=True)
class State:
    """The shape of a layer with a recurrent state. Ranks divide the channels of the convolution and the heads of the
    state.

    Attributes:
        window: number of earlier tokens that the convolution reads.
        channels: number of channels of the convolution, without those of groups.
        heads: shape of the recurrent state; ranks divide its first dimension. Empty for a convolution alone.
        dtype: data type of the recurrent state; the convolution is in bfloat16.
        keeps_drafts: the convolution keeps a row for each draft token.
        has_checkpoints: a launch can also write a state inside its chunk.
        groups: groups of heads, which ranks divide; a single one is on every rank.
        group_channels: channels of the convolution for each group.
    """

    window: int
    channels: int
    heads: tuple[int, ...] = ()
    dtype: DType = DType.BFLOAT16
    keeps_drafts: bool = True
    has_checkpoints: bool = False
    groups: int = 0
    group_channels: int = 0

    def tensors(self, options: ModelOptions) -> tuple[tuple[tuple[int, ...], DType], ...]:
        """Return shape and data type of the convolution state and of the recurrent state on one rank."""
        ranks = options.tensor_parallel
        rows = self.window + (options.speculative_tokens if self.keeps_drafts else 0)
        groups = ranks if self.groups == 1 else self.groups
        grouped = _divided(groups, ranks, "groups of state heads") * self.group_channels if groups else 0
        convolution = (rows, _divided(self.channels, ranks, "channels") + grouped)
        if not self.heads:
            return ((convolution, DType.BFLOAT16),)
        recurrent = (_divided(self.heads[0], ranks, "state heads"), *self.heads[1:])
        return ((convolution, DType.BFLOAT16), (recurrent, self.dtype))

    def state(self, options: ModelOptions, block_size: int, page_bytes: int) -> MambaSpec:
        """Return the specification of this layer on one rank. The page is padded to `page_bytes`, that of the model's
        attention layers; 0 = there are none.
        """
        tensors = self.tensors(options)
        aligned = options.mamba_mode is MambaMode.ALIGN
        return MambaSpec(
            block_size=block_size if aligned else options.max_model_len,
            shapes=tuple(shape for shape, _ in tensors),
            dtypes=tuple(dtype for _, dtype in tensors),
            mode=options.mamba_mode,
            speculative_blocks=options.speculative_tokens,
            padded_page_bytes=page_bytes if page_bytes != _state_bytes(tensors) else 0,
            checkpoint_alignment=int(aligned and options.state_checkpoints and self.has_checkpoints),
        )


Shape = Full | Latent | Indexer | Compressed | State
LayerShapes = Shape | tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """A pattern of layers, repeated and truncated at `num_layers`.

    Attributes:
        num_layers: number of layers.
        pattern: the layers that repeat: the shape of its cache, several in a tuple, or () for a layer without one.
        attention_name, state_name: what follows "model.layers.<i>." in the name of an attention or a state layer.
        mtp: shape of the layer for multi-token prediction, None if there is none or it is not known.
        mtp_layers: number of layers for multi-token prediction that the model was published with.
        cache_dtype: data type of keys and values that the checkpoint was quantized for, "" if it states none.
        max_model_len: tokens that it has positions for, 0 if not known.
    """

    num_layers: int
    pattern: tuple[LayerShapes, ...]
    attention_name: str = "self_attn.attn"
    state_name: str = "linear_attn"
    mtp: Full | Latent | None = None
    mtp_layers: int = 0
    cache_dtype: str = ""
    max_model_len: int = 0

    def layers(self, options: ModelOptions) -> tuple[Layer, ...]:
        """Return the layers that one rank holds, the drafter's layers last. Raises InvalidArgument if the model has no
        such drafter.
        """
        if options.cache_dtype == AUTO and self.cache_dtype:
            options = replace(options, cache_dtype=self.cache_dtype)
        block_size = self._block_size(options)
        own = [
            Layer(f"model.layers.{index}.{self._name(shape)}", self._spec(shape, options, block_size))
            for index in range(self.num_layers)
            for shape in _caches(self.pattern[index % len(self.pattern)])
        ]
        return (*own, *self._draft_layers(options, block_size))

    def _draft_layers(self, options: ModelOptions, block_size: int) -> tuple[Layer, ...]:
        if options.drafter is Drafter.NONE:
            return ()
        shape = self.mtp if options.drafter is Drafter.MTP else self._full_attention()
        if shape is None:
            use = "for multi-token prediction" if options.drafter is Drafter.MTP else "that a drafter could be like"
            remedy = "use another drafter, or register the replica with a list of its layers"
            raise InvalidArgument(f"the model has no known layer {use}", field="drafter", remedy=remedy)
        name = f"model.layers.{self.num_layers}.{self.attention_name}"
        return (Layer(name, shape.attention(options, block_size), is_draft=True),)

    @property
    def layout(self) -> Layout:
        """The order of layers and blocks in memory: pages of compressed attention have sizes that share none but a
        block of them all.
        """
        is_compressed = any(isinstance(shape, Compressed) for shape in self._shapes)
        return Layout.BLOCK_OUTERMOST if is_compressed else Layout.LAYER_OUTERMOST

    @property
    def _shapes(self) -> list[Shape]:
        return [shape for layer in self.pattern for shape in _caches(layer)]

    def _full_attention(self) -> Full | Latent | None:
        attends = [shape for shape in self._shapes if isinstance(shape, Full | Latent)]
        return next((shape for shape in attends if type(shape) in (Full, Latent)), attends[0] if attends else None)

    def _name(self, shape: Shape) -> str:
        if isinstance(shape, State):
            return self.state_name
        if isinstance(shape, Compressed):
            return shape.name
        return "self_attn.indexer.k_cache" if isinstance(shape, Indexer) else self.attention_name

    def _spec(self, shape: Shape, options: ModelOptions, block_size: int) -> LayerSpec:
        if not isinstance(shape, State):
            return shape.attention(options, block_size)
        attention = self._attention()
        spec = attention.attention(options, block_size) if attention else None
        return shape.state(options, spec.block_size if spec else block_size, spec.page_bytes if spec else 0)

    def _block_size(self, options: ModelOptions) -> int:
        """Return the tokens per attention block. In a model with states, a block is large enough that its page can hold
        a state.

        Then states and attention share one page size with little padding (vLLM 0.33, platforms/interface.py).
        """
        states, attention = [shape for shape in self._shapes if isinstance(shape, State)], self._attention()
        if not states or attention is None:
            return options.block_size
        unit = max(options.block_size, KERNEL_BLOCK)
        if isinstance(attention, Latent):
            unit = max(unit, MLA_STATE_BLOCK)
        token_bytes = attention.attention(options, MLA_KERNEL_BLOCK).page_bytes // MLA_KERNEL_BLOCK
        largest = max(_state_bytes(state.tensors(options)) for state in states)
        return unit * ceil_div(largest, unit * token_bytes)

    def _attention(self) -> Full | Latent | None:
        return next((shape for shape in self._shapes if isinstance(shape, Full | Latent)), None)


def _caches(layer: LayerShapes) -> tuple[Shape, ...]:
    return layer if isinstance(layer, tuple) else (layer,)


def _heads_per_rank(kv_heads: int, ranks: int) -> int:
    """Return the key-value heads per rank: heads are divided over ranks; if there are fewer heads than ranks, each head
    is replicated on the same number of ranks.
    """
    if kv_heads < ranks and ranks % kv_heads == 0:
        return 1
    return _divided(kv_heads, ranks, "key-value heads")


def _divided(count: int, ranks: int, what: str) -> int:
    if count % ranks:
        raise InvalidArgument(
            f"the {count} {what} of the model cannot be divided evenly by {ranks} ranks",
            field="tensor_parallel",
            remedy=f"use a number of ranks that divides {count}",
        )
    return count // ranks


def _state_bytes(tensors: tuple[tuple[tuple[int, ...], DType], ...]) -> int:
    return sum(prod(shape) * dtype.num_bytes for shape, dtype in tensors)
