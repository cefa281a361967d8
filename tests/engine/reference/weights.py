"""The weights of the reference model: random numbers from a seed, divided over ranks by heads and hidden units."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kvplane_worker.pages.dtypes import TORCH_DTYPES
from tests.engine.reference.config import (
    VOCABULARY,
    AttentionLayer,
    DeltaLayer,
    LatentLayer,
    LayerConfig,
    ModelConfig,
    ScanLayer,
    StateLayer,
)

# Size of a layer's output relative to the residual stream: large enough that outputs depend on the context.
LAYER_GAIN = 0.7


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """The weights of an attention layer.

    Attributes:
        q: [width, q_heads, size].
        k, v: [width, kv_heads, size].
        out: [q_heads, size, width].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """The weights of a layer with latent attention, whose heads' projections of keys and values are absorbed.

    Attributes:
        q: [width, q_heads, latent size], to queries of latent rows.
        latent: [width, latent size], to latent rows; every rank has it.
        out: [q_heads, value_size, width].
    """

    q: Tensor
    latent: Tensor
    out: Tensor


@dataclass(frozen=True, slots=True)
class SelectiveWeights:
    """The weights of a state layer (Mamba-2).

    Attributes:
        x: [width, heads, head_size], projection to the inputs of the heads.
        b, c: [width, state_size], projections to B and C.
        dt: [width, heads], projection to the time step; dt_bias: [heads].
        conv_x: [heads, head_size, conv_width], convolution of the inputs; conv_b, conv_c: [state_size, conv_width]. The
            bias is 0.
        a, d: [heads], the decay, which is negative, and the skip connection.
        out: [heads, head_size, width], projection back to the residual stream.
    """

    x: Tensor
    b: Tensor
    c: Tensor
    dt: Tensor
    dt_bias: Tensor
    conv_x: Tensor
    conv_b: Tensor
    conv_c: Tensor
    a: Tensor
    d: Tensor
    out: Tensor


@dataclass(frozen=True, slots=True)
class ScanWeights:
    """The weights of a layer of Mamba-1, on one rank.

    Attributes:
        x, gate: [width, channels], projections to the input and to what gates the output.
        conv: [channels, conv_width], convolution of the input; conv_bias: [channels].
        inner: [channels, rank + 2 x state_size], from the convolved input to elements of the time step, B and C.
        dt: [rank, channels], projection to the time step; dt_bias: [channels].
        a: [channels, state_size], the decay, which is negative; d: [channels], the skip connection.
        out: [channels, width], projection back to the residual stream.
    """

    x: Tensor
    gate: Tensor
    conv: Tensor
    conv_bias: Tensor
    inner: Tensor
    dt: Tensor
    dt_bias: Tensor
    a: Tensor
    d: Tensor
    out: Tensor


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """The weights of a layer with the gated delta rule.

    Attributes:
        q, k: [width, key_heads, key_size]; v, gate: [width, heads, value_size], projections to the values and to what
            gates the output.
        conv_q, conv_k, conv_v: the same axes after the first, and [conv_width]; the bias is 0.
        decay: [width, heads, gates], with one gate per head or per element of a key; decay_bias: [heads, gates]; a:
            [heads, 1], negative: the logarithm of the decay is a x softplus(x decay + decay_bias).
        beta: [width, heads].
        out: [heads, value_size, width], projection back to the residual stream.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    conv_q: Tensor
    conv_k: Tensor
    conv_v: Tensor
    decay: Tensor
    beta: Tensor
    decay_bias: Tensor
    a: Tensor
    out: Tensor


MixerWeights = AttentionWeights | LatentWeights | SelectiveWeights | ScanWeights | DeltaWeights


@dataclass(frozen=True, slots=True)
class FeedForward:
    """The weights of a feed-forward block: up [width, hidden], down [hidden, width]."""

    up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of the whole model, or the share of one rank. Weights that are not divided are on every rank.

    Attributes:
        embedding: [vocabulary, width].
        head: [width, vocabulary].
        mixers: one per layer.
        feed_forwards: one per layer.
    """

    embedding: Tensor
    head: Tensor
    mixers: tuple[MixerWeights, ...]
    feed_forwards: tuple[FeedForward, ...]


def draw_weights(config: ModelConfig) -> Weights:
    """Return random weights of the whole model. They depend only on the configuration and are equal on every
    machine.
    """
    draw = _Draw(config)
    return Weights(
        embedding=draw.normal(VOCABULARY, config.width),
        head=draw.matrix(config.width, VOCABULARY),
        mixers=tuple(draw.mixer(layer) for layer in config.layers),
        feed_forwards=tuple(draw.feed_forward() for _ in config.layers),
    )


class _Draw:
    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._dtype = TORCH_DTYPES[config.dtype]
        self._generator = torch.Generator().manual_seed(config.seed)

    def normal(self, *shape: int) -> Tensor:
        return self._typed(torch.randn(shape, generator=self._generator, dtype=torch.float64))

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return self._typed(low + (high - low) * torch.rand(shape, generator=self._generator, dtype=torch.float64))

    def _typed(self, drawn: Tensor) -> Tensor:
        return drawn.to(self._dtype)

    def matrix(self, inputs: int, *outputs: int, gain: float = 1.0) -> Tensor:
        """Return a random matrix whose outputs have the variance of its inputs, times the square of the gain."""
        return self.normal(inputs, *outputs) * (gain / math.sqrt(inputs))

    def back(self, *inputs: int) -> Tensor:
        """Return a random matrix that projects heads or hidden units to the residual stream."""
        return self.normal(*inputs, self._config.width) * (LAYER_GAIN / math.sqrt(math.prod(inputs)))

    def mixer(self, layer: LayerConfig) -> MixerWeights:
        if isinstance(layer, LatentLayer):
            return self.latent(layer)
        if isinstance(layer, ScanLayer):
            return self.scan(layer)
        if isinstance(layer, DeltaLayer):
            return self.delta(layer)
        return self.attention(layer) if isinstance(layer, AttentionLayer) else self.selective(layer)

    def attention(self, layer: AttentionLayer) -> AttentionWeights:
        width, q_heads, size = self._config.width, self._config.q_heads, self._config.head_size
        return AttentionWeights(
            q=self.matrix(width, q_heads, size, gain=1.5),
            k=self.matrix(width, layer.kv_heads, size, gain=1.5),
            v=self.matrix(width, layer.kv_heads, size),
            out=self.back(q_heads, size),
        )

    def latent(self, layer: LatentLayer) -> LatentWeights:
        width, q_heads = self._config.width, self._config.q_heads
        return LatentWeights(
            q=self.matrix(width, q_heads, layer.size, gain=1.5),
            latent=self.matrix(width, layer.size, gain=1.5),
            out=self.back(q_heads, layer.value_size),
        )

    def selective(self, layer: StateLayer) -> SelectiveWeights:
        width, heads, size, states = self._config.width, layer.heads, layer.head_size, layer.state_size
        return SelectiveWeights(
            x=self.matrix(width, heads, size),
            b=self.matrix(width, states),
            c=self.matrix(width, states),
            dt=self.matrix(width, heads, gain=0.5),
            dt_bias=self.uniform(-2.0, 0.0, heads),
            conv_x=self.uniform(-1.0, 1.0, heads, size, layer.conv_width),
            conv_b=self.uniform(-1.0, 1.0, states, layer.conv_width),
            conv_c=self.uniform(-1.0, 1.0, states, layer.conv_width),
            a=-self.uniform(0.1, 1.0, heads),
            d=self.uniform(0.5, 1.5, heads),
            out=self.back(heads, size),
        )

    def scan(self, layer: ScanLayer) -> ScanWeights:
        width, channels, states = self._config.width, layer.channels, layer.state_size
        return ScanWeights(
            x=self.matrix(width, channels),
            gate=self.matrix(width, channels),
            conv=self.uniform(-1.0, 1.0, channels, layer.conv_width),
            conv_bias=self.uniform(-0.5, 0.5, channels),
            inner=self.matrix(channels, layer.rank + 2 * states, gain=2.0),
            dt=self.matrix(layer.rank, channels),
            dt_bias=self.uniform(-2.0, 0.0, channels),
            a=-self.uniform(0.1, 1.0, channels, states),
            d=self.uniform(0.5, 1.5, channels),
            out=self.back(channels),
        )

    def delta(self, layer: DeltaLayer) -> DeltaWeights:
        width, heads, gates = self._config.width, layer.heads, layer.key_size if layer.gates_of_keys else 1
        of_keys, of_values = (layer.key_heads, layer.key_size), (heads, layer.value_size)
        return DeltaWeights(
            q=self.matrix(width, *of_keys),
            k=self.matrix(width, *of_keys),
            v=self.matrix(width, *of_values),
            gate=self.matrix(width, *of_values),
            conv_q=self.uniform(-1.0, 1.0, *of_keys, layer.conv_width),
            conv_k=self.uniform(-1.0, 1.0, *of_keys, layer.conv_width),
            conv_v=self.uniform(-1.0, 1.0, *of_values, layer.conv_width),
            decay=self.matrix(width, heads, gates, gain=0.5),
            beta=self.matrix(width, heads),
            decay_bias=self.uniform(-2.0, 0.0, heads, gates),
            a=-self.uniform(0.1, 1.0, heads, 1),
            out=self.back(*of_values),
        )

    def feed_forward(self) -> FeedForward:
        width, hidden = self._config.width, self._config.hidden
        return FeedForward(up=self.matrix(width, hidden), down=self.back(hidden))


def share_of(weights: Weights, rank: int, num_ranks: int, device: torch.device) -> Weights:
    """Return the weights of one rank's heads and hidden units, on the rank's device."""

    def cut(tensor: Tensor, dim: int) -> Tensor:
        return tensor.chunk(num_ranks, dim)[rank].contiguous().to(device)

    def mixer(whole: MixerWeights) -> MixerWeights:
        if isinstance(whole, LatentWeights):
            return LatentWeights(cut(whole.q, 1), whole.latent.to(device), cut(whole.out, 0))
        if isinstance(whole, AttentionWeights):
            return AttentionWeights(cut(whole.q, 1), cut(whole.k, 1), cut(whole.v, 1), cut(whole.out, 0))
        if isinstance(whole, ScanWeights):  # one rank has all channels
            return ScanWeights(*(getattr(whole, one.name).to(device) for one in fields(whole)))
        if isinstance(whole, DeltaWeights):
            axis_of_heads = dict.fromkeys(("q", "k", "v", "gate", "decay", "beta"), 1)
            return DeltaWeights(
                *(cut(getattr(whole, one.name), axis_of_heads.get(one.name, 0)) for one in fields(whole))
            )
        return SelectiveWeights(
            x=cut(whole.x, 1),
            b=whole.b.to(device),
            c=whole.c.to(device),
            dt=cut(whole.dt, 1),
            dt_bias=cut(whole.dt_bias, 0),
            conv_x=cut(whole.conv_x, 0),
            conv_b=whole.conv_b.to(device),
            conv_c=whole.conv_c.to(device),
            a=cut(whole.a, 0),
            d=cut(whole.d, 0),
            out=cut(whole.out, 0),
        )

    return Weights(
        embedding=weights.embedding.to(device),
        head=weights.head.to(device),
        mixers=tuple(mixer(one) for one in weights.mixers),
        feed_forwards=tuple(FeedForward(cut(one.up, 1), cut(one.down, 0)) for one in weights.feed_forwards),
    )
