"""The catalogue: known models by name, as the layers that one tensor-parallel rank holds.

Attention patterns, heads and sizes are those of the published model configurations. A model is a repeated pattern of
layer shapes. A shape becomes a layer specification for a given number of ranks, data type and block size.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from math import prod
from typing import Any

from kvplane.base.errors import InvalidArgument, NotFound
from kvplane.base.groups import Drafter, MambaMode
from kvplane.base.layer_spec import AttentionSpec, DType, LayerSpec, ceil_div, round_up
from kvplane.base.layers import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    Layer,
    MambaSpec,
    MLASpec,
    SlidingWindowSpec,
)
from kvplane_service.core.planner import KERNEL_BLOCK, MLA_KERNEL_BLOCK

CACHE_DTYPES = {
    "bfloat16": DType.BFLOAT16,
    "float16": DType.FLOAT16,
    "fp8": DType.FLOAT8_E4M3FN,
}


MAX_SPECULATIVE_TOKENS = 128


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
        cache_dtype: data type of keys and values, one of CACHE_DTYPES; recurrent states stay in the model's
            bfloat16.
        block_size: tokens per attention block; raised if kernels or states need larger blocks.
        max_model_len: longest request in tokens; also the block size of a recurrent state that is not cached.
        mamba_mode: how recurrent states are cached.
        speculative_tokens: most draft tokens per decode step; one recurrent state is kept for each.
        drafter: drafter whose layer is added to the model.
    """

    tensor_parallel: int = 1
    cache_dtype: str = "bfloat16"
    block_size: int = KERNEL_BLOCK
    max_model_len: int = 32768
    mamba_mode: MambaMode = MambaMode.ALIGN
    speculative_tokens: int = 0
    drafter: Drafter = Drafter.NONE

    def __post_init__(self) -> None:
        check_speculation(self.speculative_tokens, self.drafter)
        for name in ("tensor_parallel", "block_size", "max_model_len"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"it is {getattr(self, name)}", field=name, remedy="give 1 or more")
        if self.cache_dtype not in CACHE_DTYPES:
            known = ", ".join(CACHE_DTYPES)
            what = f"the data type {self.cache_dtype!r} is unknown"
            raise InvalidArgument(what, field="cache_dtype", remedy=f"use one of {known}")

    @property
    def dtype(self) -> DType:
        """Element type of keys and values."""
        return CACHE_DTYPES[self.cache_dtype]


@dataclass(frozen=True, slots=True)
class Full:
    """The shape of a full attention layer: number of key-value heads of the whole model, and head size."""

    kv_heads: int
    head_size: int

    def attention(self, options: ModelOptions, block_size: int) -> AttentionSpec:
        """Return the specification of this layer on one rank, with `block_size` tokens per block."""
        return FullAttentionSpec(**self._common(options, block_size))

    def _common(self, options: ModelOptions, block_size: int) -> dict[str, Any]:
        return {
            "block_size": block_size,
            "num_kv_heads": _heads_per_rank(self.kv_heads, options.tensor_parallel),
            "head_size": self.head_size,
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
    """

    row_size: int

    def attention(self, options: ModelOptions, block_size: int) -> AttentionSpec:
        """Return the specification of this layer on one rank, with at least `block_size` tokens per block."""
        return MLASpec(
            block_size=round_up(block_size, MLA_KERNEL_BLOCK),
            num_kv_heads=1,
            head_size=self.row_size,
            dtype=options.dtype,
            max_tp_shards=1,
        )


@dataclass(frozen=True, slots=True)
class State:
    """The shape of a layer with a recurrent state. Ranks divide the channels of the convolution and the heads of the
    state.

    Attributes:
        window: number of earlier tokens that the convolution reads.
        channels: number of channels of the convolution.
        heads: shape of the recurrent state; ranks divide its first dimension.
    """

    window: int
    channels: int
    heads: tuple[int, ...]

    def shapes(self, tensor_parallel: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the convolution state and of the recurrent state on one rank."""
        channels = _divided(self.channels, tensor_parallel, "channels")
        heads = _divided(self.heads[0], tensor_parallel, "state heads")
        return ((self.window, channels), (heads, *self.heads[1:]))

    def state(self, options: ModelOptions, attention: AttentionSpec) -> MambaSpec:
        """Return the specification of this layer on one rank, with the page padded to the page size of the model's
        attention layers.
        """
        shapes = self.shapes(options.tensor_parallel)
        aligned = options.mamba_mode is MambaMode.ALIGN
        padded = attention.page_bytes if attention.page_bytes != _state_bytes(shapes) else 0
        return MambaSpec(
            block_size=attention.block_size if aligned else options.max_model_len,
            shapes=shapes,
            dtypes=(DType.BFLOAT16,) * len(shapes),
            mode=options.mamba_mode,
            speculative_blocks=options.speculative_tokens,
            padded_page_bytes=padded,
        )


@dataclass(frozen=True, slots=True)
class Model:
    """A pattern of layers, repeated and truncated at `num_layers`.

    Attributes:
        num_layers: number of layers that own a cache.
        pattern: the shapes that repeat.
        attention_name, state_name: what follows "model.layers.<i>." in the name of an attention or a state layer.
        mtp: shape of the layer for multi-token prediction, None if the model was published without one.
    """

    num_layers: int
    pattern: tuple[Full | Latent | State, ...]
    attention_name: str = "self_attn.attn"
    state_name: str = "linear_attn"
    mtp: Full | Latent | None = None

    def layers(self, options: ModelOptions) -> tuple[Layer, ...]:
        """Return the layers that one rank holds, the drafter's layers last. Raises InvalidArgument if the model has no
        such drafter.
        """
        block_size = self._block_size(options)
        own = tuple(self._layer(index, options, block_size) for index in range(self.num_layers))
        return own + self._draft_layers(options, block_size)

    def _draft_layers(self, options: ModelOptions, block_size: int) -> tuple[Layer, ...]:
        if options.drafter is Drafter.NONE:
            return ()
        shape = self.mtp if options.drafter is Drafter.MTP else self._full_attention()
        if shape is None:
            remedy = f"use one of the models that have it: {', '.join(sorted(n for n, m in MODELS.items() if m.mtp))}"
            raise InvalidArgument("the model has no layer for multi-token prediction", field="drafter", remedy=remedy)
        name = f"model.layers.{self.num_layers}.{self.attention_name}"
        return (Layer(name, shape.attention(options, block_size), is_draft=True),)

    def _full_attention(self) -> Full | Latent:
        attends = [shape for shape in self.pattern if not isinstance(shape, State)]
        return next((shape for shape in attends if type(shape) in (Full, Latent)), attends[0])

    def _layer(self, index: int, options: ModelOptions, block_size: int) -> Layer:
        shape = self.pattern[index % len(self.pattern)]
        is_state = isinstance(shape, State)
        name = f"model.layers.{index}.{self.state_name if is_state else self.attention_name}"
        return Layer(name, self._spec(shape, options, block_size))

    def _spec(self, shape: Full | Latent | State, options: ModelOptions, block_size: int) -> LayerSpec:
        if isinstance(shape, State):
            return shape.state(options, self._attention().attention(options, block_size))
        return shape.attention(options, block_size)

    def _block_size(self, options: ModelOptions) -> int:
        """Return the tokens per attention block. In a model with states, a block is large enough that its page can hold
        a state.

        Then states and attention share one page size with little padding (vLLM 0.33, platforms/interface.py).
        """
        states = [shape for shape in self.pattern if isinstance(shape, State)]
        if not states:
            return options.block_size
        unit = max(options.block_size, KERNEL_BLOCK)
        token_bytes = self._attention().attention(options, 1).page_bytes
        largest = max(_state_bytes(state.shapes(options.tensor_parallel)) for state in states)
        return unit * ceil_div(largest, unit * token_bytes)

    def _attention(self) -> Full | Latent:
        return next(shape for shape in self.pattern if not isinstance(shape, State))


_LLAMA = Full(kv_heads=8, head_size=128)
_GPT_OSS = (Sliding(kv_heads=8, head_size=64, window=128), Full(kv_heads=8, head_size=64))
_GEMMA_3 = (*(Sliding(kv_heads=16, head_size=128, window=1024),) * 5, Full(kv_heads=16, head_size=128))
_SCOUT = (*(Chunked(kv_heads=8, head_size=128, chunk=8192),) * 3, Full(kv_heads=8, head_size=128))
_JAMBA_STATE = State(window=3, channels=8192, heads=(8192, 16))
_JAMBA = (*(_JAMBA_STATE,) * 4, Full(kv_heads=8, head_size=128), *(_JAMBA_STATE,) * 3)
_QWEN3_NEXT_STATE = State(window=3, channels=8192, heads=(32, 128, 128))
_QWEN3_NEXT = (*(_QWEN3_NEXT_STATE,) * 3, Full(kv_heads=2, head_size=256))

MODELS: dict[str, Model] = {
    "llama-3.1-8b": Model(32, (_LLAMA,)),
    "llama-3.1-70b": Model(80, (_LLAMA,)),
    "gpt-oss-20b": Model(24, _GPT_OSS, attention_name="attn.attn"),
    "gpt-oss-120b": Model(36, _GPT_OSS, attention_name="attn.attn"),
    "gemma-3-27b": Model(62, _GEMMA_3),
    "llama-4-scout": Model(48, _SCOUT),
    "jamba-v0.1": Model(32, _JAMBA, state_name="mamba"),
    "qwen3-next-80b": Model(48, _QWEN3_NEXT, mtp=Full(kv_heads=2, head_size=256)),
    "deepseek-v3": Model(61, (Latent(row_size=576),), mtp=Latent(row_size=576)),
}


def model_layers(name: str, options: ModelOptions) -> tuple[Layer, ...]:
    """Return the layers of a model that each tensor-parallel rank holds. The layers are the same on all ranks.

    Raises:
        NotFound: no model has this name; the remedy gives the most similar name.
        InvalidArgument: the number of ranks does not divide the model's heads.
    """
    model = MODELS.get(name)
    if model is None:
        nearest = difflib.get_close_matches(name, MODELS, n=1, cutoff=0.0)[0]
        others = ", ".join(sorted(MODELS))
        raise NotFound(
            f"the catalogue has no model {name!r}",
            field="model",
            remedy=f"the most similar name is {nearest}; the catalogue has {others}",
        )
    return model.layers(options)


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


def _state_bytes(shapes: tuple[tuple[int, ...], ...]) -> int:
    return sum(prod(shape) for shape in shapes) * DType.BFLOAT16.num_bytes
