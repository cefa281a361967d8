"""The forward pass of the reference model. Each rank computes its heads from its pages, and the results are summed."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from kvplane_worker.engine.batch import Launch
from kvplane_worker.engine.config import AttentionLayer, ModelConfig, StateLayer, layer_name
from kvplane_worker.engine.weights import AttentionWeights, SelectiveWeights, Weights, share_of
from kvplane_worker.ops.interface import (
    AttentionRule,
    LayerAttention,
    LayerStates,
    PagedOps,
    StateInputs,
    StateWeights,
    WarmUp,
)
from kvplane_worker.pages import PageBuffers
from kvplane_worker.pages.dtypes import TORCH_DTYPES

ROTARY_BASE = 100.0
NORM_EPSILON = 1e-6


class RankModel:
    """The part of the model that one rank computes, with its share of the weights and its pages."""

    def __init__(self, config: ModelConfig, share: Weights, pages: PageBuffers, ops: PagedOps) -> None:
        self._config = config
        self._share = share
        self._pages = pages
        self._ops = ops

    def warm_up(self) -> WarmUp:
        """Compile the kernels with which this rank attends, writes, zeroes and copies."""
        groups = [self._pages.group(group) for group in range(self._pages.num_groups)]
        layers = [self._use(number, layer) for number, layer in enumerate(self._config.layers)]
        return self._ops.warm_up([group for group in groups if group.layers], ("copy_pages", "zero_pages"), layers)

    def _use(self, number: int, layer: AttentionLayer | StateLayer) -> LayerAttention | LayerStates:
        name, dtype = layer_name(number), TORCH_DTYPES[self._config.dtype]
        if isinstance(layer, StateLayer):
            return LayerStates(self._pages.state(name), dtype)
        heads = self._config.q_heads // self._config.num_ranks
        return LayerAttention(self._pages.attention(name), heads, dtype, _rule(self._config, layer))

    def mix(self, number: int, x: Tensor, launch: Launch) -> Tensor:
        """Compute this rank's part of a layer's output, [tokens, width], and write the tokens' keys and values, or
        states.
        """
        weights = self._share.mixers[number]
        if isinstance(weights, AttentionWeights):
            return self._attend(number, weights, x, launch)
        return self._advance(number, weights, x, launch)

    def feed(self, number: int, x: Tensor) -> Tensor:
        """Compute this rank's part of a feed-forward block's output, [tokens, width], from x [tokens, width]."""
        block = self._share.feed_forwards[number]
        return silu(x @ block.up) @ block.down

    def _attend(self, number: int, weights: AttentionWeights, x: Tensor, launch: Launch) -> Tensor:
        layer, name = self._config.layers[number], layer_name(number)
        assert isinstance(layer, AttentionLayer)
        place, pages = self._pages.layer(name), self._pages.attention(name)
        slots, batch = launch.attention(place.group, pages.k.shape[1])
        query = rotate(torch.einsum("tw,whs->ths", x, weights.q), launch.positions)
        key = rotate(torch.einsum("tw,whs->ths", x, weights.k), launch.positions)
        value = torch.einsum("tw,whs->ths", x, weights.v)
        self._ops.write_kv(pages, key, value, slots)
        attend = self._ops.decode_attention if launch.is_decode else self._ops.prefill_attention
        heads = attend(query, pages, batch, _rule(self._config, layer))
        return torch.einsum("ths,hsw->tw", heads, weights.out)

    def _advance(self, number: int, weights: SelectiveWeights, x: Tensor, launch: Launch) -> Tensor:
        place = self._pages.layer(layer_name(number))
        read, write = launch.states(place.group, place.spec.block_size)
        heads = torch.einsum("tw,whs->ths", x, weights.x).flatten(1)
        inputs = StateInputs(
            query_start=launch.query_start,
            read_block=read,
            write_block=write,
            x=torch.cat([heads, x @ weights.b, x @ weights.c], dim=1),
            dt=softplus(x @ weights.dt + weights.dt_bias),
        )
        taps = torch.cat([weights.conv_x.flatten(0, 1), weights.conv_b, weights.conv_c])
        parameters = StateWeights(taps, torch.zeros_like(taps[:, 0]), weights.a, weights.d)
        y = self._ops.state_step(self._pages.state(layer_name(number)), inputs, parameters)
        return torch.einsum("ths,hsw->tw", y, weights.out)


class Model:
    """The whole model, with all ranks in one process. A sum over the ranks replaces the all-reduce."""

    def __init__(self, config: ModelConfig, weights: Weights, ranks: list[PageBuffers], ops: PagedOps) -> None:
        self.device = ranks[0].memory.device
        self._num_layers = len(config.layers)
        shares = [share_of(weights, rank, len(ranks), self.device) for rank in range(len(ranks))]
        self._whole = shares[0]
        self._ranks = [RankModel(config, share, pages, ops) for share, pages in zip(shares, ranks, strict=True)]

    def warm_up(self) -> list[WarmUp]:
        """Compile the kernels of each rank, so that no launch waits for a compiler."""
        return [rank.warm_up() for rank in self._ranks]

    def logits(self, launch: Launch) -> Tensor:
        """Run a launch and return the logits, [outputs, vocabulary]."""
        stream = self._whole.embedding[launch.tokens]
        for number in range(self._num_layers):
            x = normalise(stream)
            stream = stream + sum(rank.mix(number, x, launch) for rank in self._ranks)
            x = normalise(stream)
            stream = stream + sum(rank.feed(number, x) for rank in self._ranks)
        return normalise(stream[launch.outputs]) @ self._whole.head


def normalise(x: Tensor) -> Tensor:
    """Return the RMS norm of x over its last dimension, without a gain."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPSILON)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Apply the rotary position embedding to x [tokens, heads, head_size]; positions is int64 [tokens].

    The two halves of a head are real and imaginary parts (Su et al., "RoFormer", 2021).
    """
    half = x.shape[-1] // 2
    exponents = torch.arange(half, device=x.device, dtype=x.dtype) / half
    angles = positions.to(x.dtype)[:, None] * ROTARY_BASE**-exponents
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


def _rule(config: ModelConfig, layer: AttentionLayer) -> AttentionRule:
    return AttentionRule(scale=config.head_size**-0.5, window=layer.window, chunk=layer.chunk)
