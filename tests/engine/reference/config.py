"""The configurations of the reference model: a decoder with several kinds of attention, small enough for float64."""

from __future__ import annotations

from dataclasses import dataclass

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import MambaMode
from kvplane.base.layer_spec import DType, LayerSpec
from kvplane.base.layers import ChunkedLocalSpec, FullAttentionSpec, Layer, MambaSpec, MLASpec, SlidingWindowSpec

NUM_BYTES = 256
BOS = NUM_BYTES  # begins every prompt
EOS = NUM_BYTES + 1  # ends an output
VOCABULARY = NUM_BYTES + 2
EIGHT_BIT = (DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2)
HALVES = (DType.BFLOAT16, DType.FLOAT16)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The configuration of an attention layer.

    Attributes:
        kv_heads: number of key-value heads over all ranks; divides the model's query heads.
        block_size: tokens per page.
        window: number of attended tokens, including the query's own; 0 = all.
        chunk: length of attention chunks in tokens; a query attends only to its own chunk; 0 = all tokens.
    """

    kv_heads: int
    block_size: int
    window: int = 0
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class LatentLayer:
    """The configuration of a layer with latent attention (MLA, DeepSeek-V2). Every rank has all latent rows.

    Attributes:
        value_size: first elements of a latent row, which are keys and values of all heads; a power of two.
        rotary_size: last elements, which are keys alone and have the rotary embedding.
        block_size: tokens per page.
    """

    value_size: int
    rotary_size: int
    block_size: int

    @property
    def size(self) -> int:
        """The elements of a latent row."""
        return self.value_size + self.rotary_size


@dataclass(frozen=True, slots=True)
class StateLayer:
    """The configuration of a layer with recurrent state, in the form of Mamba-2.

    Attributes:
        heads: number of heads over all ranks.
        head_size: a head's state has the shape [head_size, state_size].
        state_size: second dimension of a head's state.
        conv_width: tokens that the causal convolution covers.
        block_size: tokens between cached states.
    """

    heads: int
    head_size: int
    state_size: int
    block_size: int
    conv_width: int = 4


@dataclass(frozen=True, slots=True)
class ScanLayer:
    """The configuration of a layer of Mamba-1, as Jamba has it. B, C and time steps are sums over all channels, so one
    rank has them all.

    Attributes:
        channels: number of channels; each has a state of `state_size` elements.
        rank: elements from which the time steps are projected.
        block_size, conv_width: as in `StateLayer`.
    """

    channels: int
    state_size: int
    rank: int
    block_size: int
    conv_width: int = 4


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    """The configuration of a layer with the gated delta rule, as Qwen3-Next and Kimi Linear have it.

    Attributes:
        key_heads, heads: numbers of heads of queries and keys, and of values, over all ranks.
        key_size, value_size: a head's state has the shape [value_size, key_size].
        block_size, conv_width: as in `StateLayer`.
        gates_of_keys: whether there is a gate per element of a head's keys (Kimi Linear), not one per head.
    """

    key_heads: int
    heads: int
    key_size: int
    value_size: int
    block_size: int
    conv_width: int = 4
    gates_of_keys: bool = False


RecurrentLayer = StateLayer | ScanLayer | DeltaLayer
LayerConfig = AttentionLayer | LatentLayer | RecurrentLayer


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of a model.

    Attributes:
        layers: layers in order; each is followed by a feed-forward block.
        width: width of the residual stream.
        q_heads: query heads of every attention layer over all ranks.
        head_size: elements of a head.
        hidden: width of the feed-forward blocks, over all ranks.
        num_ranks: number of ranks over which heads and hidden units are divided.
        max_drafts: most draft tokens per step; this number of states is stored in addition to the state of the last
            accepted token.
        dtype: element type of weights, activations and pages.
        cache_dtype: element type of keys, values and latent rows in pages: of 16 bits, then also of the queries and
            results of attention; or of 8 bits, whose scales `Model.calibrate` sets. None = `dtype`.
        seed: seed of the random weights.
    """

    layers: tuple[LayerConfig, ...]
    width: int = 32
    q_heads: int = 4
    head_size: int = 8
    hidden: int = 48
    num_ranks: int = 2
    max_drafts: int = 3
    dtype: DType = DType.FLOAT64
    cache_dtype: DType | None = None
    seed: int = 1

    def __post_init__(self) -> None:
        if self.cache_dtype not in (None, *EIGHT_BIT, *HALVES):
            remedy = "give a type of 8 or 16 bits, or None for pages of `dtype`"
            raise InvalidArgument(f"pages cannot be of {self.cache_dtype}", field="cache_dtype", remedy=remedy)
        counts = {"q_heads": self.q_heads, "hidden": self.hidden}
        for number, layer in enumerate(self.layers):
            if isinstance(layer, ScanLayer) and self.num_ranks > 1:
                found = f"a selective scan needs sums over all channels, and there are {self.num_ranks} ranks"
                raise InvalidArgument(found, field=f"layers[{number}]", remedy="give num_ranks = 1")
            if isinstance(layer, DeltaLayer):
                counts[f"layers[{number}].key_heads"] = layer.key_heads
            elif isinstance(layer, AttentionLayer | StateLayer):
                heads = layer.kv_heads if isinstance(layer, AttentionLayer) else layer.heads
                counts[f"layers[{number}].heads"] = heads
        for name, count in counts.items():
            if count % self.num_ranks:
                remedy = f"give a multiple of {self.num_ranks}"
                raise InvalidArgument(
                    f"{count} cannot be divided over {self.num_ranks} ranks", field=name, remedy=remedy
                )

    def cache_layers(self) -> tuple[Layer, ...]:
        """Return the cache layers of one rank, for `kvplane.LayerSource`. The layers are the same on every rank."""
        return tuple(Layer(layer_name(at), self._format(layer)) for at, layer in enumerate(self.layers))

    def channels(self, layer: RecurrentLayer) -> int:
        """Return the channels of a layer's convolution on one rank: inputs of its heads, and B and C of Mamba-2, which
        every rank computes.
        """
        if isinstance(layer, ScanLayer):
            return layer.channels
        if isinstance(layer, DeltaLayer):
            of_all = 2 * layer.key_heads * layer.key_size + layer.heads * layer.value_size
            return of_all // self.num_ranks
        return layer.heads // self.num_ranks * layer.head_size + 2 * layer.state_size

    @property
    def product_dtype(self) -> DType:
        """The element type of queries, and of keys and values before they are written: that of pages of 16 bits;
        kernels multiply 8-bit elements with queries of two bytes.
        """
        if self.cache_dtype in HALVES:
            return self.cache_dtype
        return DType.FLOAT16 if self.cache_dtype and self.dtype is DType.FLOAT32 else self.dtype

    def _format(self, layer: LayerConfig) -> LayerSpec:
        if isinstance(layer, RecurrentLayer):
            return self._state_format(layer)
        dtype = self.cache_dtype or self.dtype
        if isinstance(layer, LatentLayer):
            return MLASpec(block_size=layer.block_size, num_kv_heads=1, head_size=layer.size, dtype=dtype)
        kv_heads, size = layer.kv_heads // self.num_ranks, self.head_size
        if layer.window:
            return SlidingWindowSpec(
                block_size=layer.block_size,
                num_kv_heads=kv_heads,
                head_size=size,
                dtype=dtype,
                window=layer.window,
            )
        if layer.chunk:
            return ChunkedLocalSpec(
                block_size=layer.block_size, num_kv_heads=kv_heads, head_size=size, dtype=dtype, chunk=layer.chunk
            )
        return FullAttentionSpec(block_size=layer.block_size, num_kv_heads=kv_heads, head_size=size, dtype=dtype)

    def _state_format(self, layer: RecurrentLayer) -> LayerSpec:
        return MambaSpec(
            block_size=layer.block_size,
            shapes=((layer.conv_width - 1, self.channels(layer)), self._state_shape(layer)),
            dtypes=(self.dtype, self.dtype),
            mode=MambaMode.ALIGN,
            speculative_blocks=self.max_drafts,
        )

    def _state_shape(self, layer: RecurrentLayer) -> tuple[int, ...]:
        """Return the shape of a state on one rank."""
        if isinstance(layer, ScanLayer):
            return layer.channels, layer.state_size
        heads = layer.heads // self.num_ranks
        if isinstance(layer, DeltaLayer):
            return heads, layer.value_size, layer.key_size
        return heads, layer.head_size, layer.state_size


def layer_name(number: int) -> str:
    """Return the name of a layer in the memory layout."""
    return f"layers.{number}"


# Layers of every kind. All pages have the same size, but pages of full-attention and state layers cover twice as many
# tokens, so that a hit can end inside them.
MIXED = ModelConfig(
    (
        StateLayer(heads=4, head_size=4, state_size=8, block_size=16),
        AttentionLayer(kv_heads=4, block_size=8, window=20),
        AttentionLayer(kv_heads=2, block_size=16),
        AttentionLayer(kv_heads=4, block_size=8, chunk=24),
        StateLayer(heads=4, head_size=4, state_size=8, block_size=16),
        AttentionLayer(kv_heads=2, block_size=16),
    )
)
# Attention alone, also latent.
LATENT = ModelConfig(
    (
        LatentLayer(value_size=16, rotary_size=8, block_size=16),
        AttentionLayer(kv_heads=2, block_size=16),
        LatentLayer(value_size=16, rotary_size=8, block_size=16),
    )
)
# One block size: hits end at block boundaries.
EVEN = ModelConfig(
    (
        AttentionLayer(kv_heads=2, block_size=16, window=37),
        StateLayer(heads=4, head_size=4, state_size=8, block_size=16),
        AttentionLayer(kv_heads=2, block_size=16),
        AttentionLayer(kv_heads=2, block_size=16, chunk=32),
    )
)
# No recurrent state, so that chunks and drafts may end at any token.
ATTENTION = ModelConfig(
    (
        AttentionLayer(kv_heads=4, block_size=8, window=20),
        AttentionLayer(kv_heads=4, block_size=8),
        AttentionLayer(kv_heads=4, block_size=8, chunk=24),
        AttentionLayer(kv_heads=4, block_size=8, window=20),
    )
)
