"""The forward pass of the reference model. Each rank computes its heads from its pages, and the results are summed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from kvplane_kernels.interface import (
    AttentionPages,
    AttentionRule,
    Batch,
    DeltaInputs,
    LatentPages,
    LayerAttention,
    LayerLatents,
    LayerStates,
    LayerUse,
    PagedOps,
    ScanInputs,
    StateInputs,
    StatePages,
    StateRows,
    StateWeights,
    WarmUp,
)
from kvplane_kernels.torch_ops import TorchOps
from kvplane_worker.pages import PageBuffers
from kvplane_worker.pages.calibration import Calibration
from kvplane_worker.pages.dtypes import TORCH_DTYPES
from tests.engine.reference.batch import Launch, Row
from tests.engine.reference.config import (
    AttentionLayer,
    DeltaLayer,
    LatentLayer,
    LayerConfig,
    ModelConfig,
    RecurrentLayer,
    ScanLayer,
    StateLayer,
    layer_name,
)
from tests.engine.reference.weights import (
    AttentionWeights,
    DeltaWeights,
    LatentWeights,
    ScanWeights,
    SelectiveWeights,
    Weights,
    share_of,
)

ROTARY_BASE = 100.0
NORM_EPSILON = 1e-6
# The operation that advances the states of a layer.
OPERATIONS = {StateLayer: "state_step", ScanLayer: "selective_scan", DeltaLayer: "gated_delta_rule"}


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

    def _use(self, number: int, layer: LayerConfig) -> LayerUse:
        name, dtype = layer_name(number), self._product_dtype
        if isinstance(layer, RecurrentLayer):
            by_key = isinstance(layer, DeltaLayer) and layer.gates_of_keys
            pages, element = self._pages.state(name), TORCH_DTYPES[self._config.dtype]
            return LayerStates(pages, element, OPERATIONS[type(layer)], by_key)
        heads = self._config.q_heads // self._config.num_ranks
        if isinstance(layer, LatentLayer):
            return LayerLatents(self._pages.latent(name), heads, dtype, layer.value_size)
        return LayerAttention(self._pages.attention(name), heads, dtype, _rule(self._config, layer))

    def mix(self, number: int, x: Tensor, launch: Launch) -> Tensor:
        """Compute this rank's part of a layer's output, [tokens, width], and write the tokens' keys and values, or
        states.
        """
        weights = self._share.mixers[number]
        if isinstance(weights, AttentionWeights):
            return self._attend(number, weights, x, launch)
        if isinstance(weights, LatentWeights):
            return self._attend_latents(number, weights, x, launch)
        if isinstance(weights, ScanWeights):
            return self._scan(number, weights, x, launch)
        if isinstance(weights, DeltaWeights):
            return self._correct(number, weights, x, launch)
        return self._advance(number, weights, x, launch)

    def feed(self, number: int, x: Tensor) -> Tensor:
        """Compute this rank's part of a feed-forward block's output, [tokens, width], from x [tokens, width]."""
        block = self._share.feed_forwards[number]
        return silu(x @ block.up) @ block.down

    def _attend(self, number: int, weights: AttentionWeights, x: Tensor, launch: Launch) -> Tensor:
        query = rotate(torch.einsum("tw,whs->ths", x, weights.q), launch.positions)
        key = rotate(torch.einsum("tw,whs->ths", x, weights.k), launch.positions)
        value = torch.einsum("tw,whs->ths", x, weights.v)
        query, key, value = (part.to(self._product_dtype) for part in (query, key, value))
        pages, slots, batch = self._written(number, key, value, launch)
        self._ops.write_kv(pages, key, value, slots)
        layer = self._config.layers[number]
        assert isinstance(layer, AttentionLayer)
        attend = self._ops.decode_attention if launch.is_decode else self._ops.prefill_attention
        heads = attend(query, pages, batch, _rule(self._config, layer))
        return torch.einsum("ths,hsw->tw", heads.to(x.dtype), weights.out)

    def _attend_latents(self, number: int, weights: LatentWeights, x: Tensor, launch: Launch) -> Tensor:
        layer = self._config.layers[number]
        assert isinstance(layer, LatentLayer)
        query = rotate_last(torch.einsum("tw,whs->ths", x, weights.q), layer.rotary_size, launch.positions)
        row = rotate_last((x @ weights.latent)[:, None], layer.rotary_size, launch.positions)[:, 0]
        query, row = query.to(self._product_dtype), row.to(self._product_dtype)
        pages, slots, batch = self._written_latents(number, row, launch)
        self._ops.write_latent(pages, row, slots)
        heads = self._ops.mla_decode(query, pages, batch, layer.size**-0.5, layer.value_size)
        return torch.einsum("ths,hsw->tw", heads.to(x.dtype), weights.out)

    def _advance(self, number: int, weights: SelectiveWeights, x: Tensor, launch: Launch) -> Tensor:
        pages, read, write = self._states(number, launch)
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
        y = self._ops.state_step(pages, inputs, parameters)
        return torch.einsum("ths,hsw->tw", y, weights.out)

    def _scan(self, number: int, weights: ScanWeights, x: Tensor, launch: Launch) -> Tensor:
        pages, read, write = self._states(number, launch)
        rows = StateRows(launch.query_start, read, write)
        u = self._ops.convolve(pages.conv, rows, x @ weights.x, weights.conv, weights.conv_bias)
        steps, b, c = torch.split(u @ weights.inner, [len(weights.dt), *[weights.a.shape[1]] * 2], dim=1)
        dt = softplus(steps @ weights.dt + weights.dt_bias)
        inputs = ScanInputs(launch.query_start, read, write, u, dt, b, c)
        y = self._ops.selective_scan(pages.ssm, inputs, weights.a, weights.d)
        return (y * silu(x @ weights.gate)) @ weights.out

    def _correct(self, number: int, weights: DeltaWeights, x: Tensor, launch: Launch) -> Tensor:
        pages, read, write = self._states(number, launch)
        parts = [torch.einsum("tw,whs->ths", x, part) for part in (weights.q, weights.k, weights.v)]
        taps = torch.cat([part.flatten(0, 1) for part in (weights.conv_q, weights.conv_k, weights.conv_v)])
        mixed = torch.cat([part.flatten(1) for part in parts], dim=1)
        rows = StateRows(launch.query_start, read, write)
        u = self._ops.convolve(pages.conv, rows, mixed, taps, torch.zeros_like(taps[:, 0]))
        sizes = [part.shape[1] * part.shape[2] for part in parts]
        q, k, v = (one.view_as(part) for one, part in zip(torch.split(u, sizes, dim=1), parts, strict=True))
        g = weights.a * softplus(torch.einsum("tw,whg->thg", x, weights.decay) + weights.decay_bias)
        g = g if g.shape[2] > 1 else g[..., 0]
        beta = torch.sigmoid(x @ weights.beta)
        size = q.shape[2]  # a normalised vector has the RMS norm 1, and the norm size ** 0.5
        inputs = DeltaInputs(launch.query_start, read, write, normalise(q) / size, normalise(k) / size**0.5, v, g, beta)
        y = normalise(self._ops.gated_delta_rule(pages.ssm, inputs))
        return torch.einsum("ths,hsw->tw", y * silu(torch.einsum("tw,whs->ths", x, weights.gate)), weights.out)

    @property
    def _product_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self._config.product_dtype]

    def _written(self, number: int, key: Tensor, value: Tensor, launch: Launch) -> tuple[AttentionPages, Tensor, Batch]:
        """Return a layer's pages, the slots of a launch's tokens in them, and the batch that reads them."""
        pages = self._pages.attention(layer_name(number))
        return pages, *launch.attention(self._pages.layer(layer_name(number)).group, pages.k.shape[1])

    def _written_latents(self, number: int, row: Tensor, launch: Launch) -> tuple[LatentPages, Tensor, Batch]:
        pages = self._pages.latent(layer_name(number))
        return pages, *launch.attention(self._pages.layer(layer_name(number)).group, pages.rows.shape[1])

    def _states(self, number: int, launch: Launch) -> tuple[StatePages, Tensor, Tensor]:
        """Return a layer's pages, and the blocks that rows read and tokens write."""
        place = self._pages.layer(layer_name(number))
        return self._pages.state(place.name), *launch.states(place.group, place.spec.block_size)


class SampledRank(RankModel):
    """The same on one whole prompt, with pages of the model's element type that exist for one call: it takes keys,
    values and latent rows into account for scales.
    """

    def __init__(self, config: ModelConfig, share: Weights, pages: PageBuffers) -> None:
        super().__init__(replace(config, cache_dtype=None), share, pages, TorchOps())
        self._found = Calibration()

    def set_scales(self) -> None:
        """Set the scales of the pages."""
        self._found.apply(self._pages)

    def _written(self, number: int, key: Tensor, value: Tensor, launch: Launch) -> tuple[AttentionPages, Tensor, Batch]:
        self._found.observe(layer_name(number), key, value)
        return AttentionPages(_two_blocks(key), _two_blocks(value)), *_second_block(launch)

    def _written_latents(self, number: int, row: Tensor, launch: Launch) -> tuple[LatentPages, Tensor, Batch]:
        self._found.observe(layer_name(number), row[:, None])
        return LatentPages(_two_blocks(row)), *_second_block(launch)

    def _states(self, number: int, launch: Launch) -> tuple[StatePages, Tensor, Tensor]:
        pages = self._pages.state(layer_name(number))
        nowhere = torch.zeros_like(launch.tokens, dtype=torch.int32)
        empty = StatePages(torch.zeros_like(pages.conv[:1]), torch.zeros_like(pages.ssm[:1]))
        return empty, nowhere[:1], nowhere


def _two_blocks(tokens: Tensor) -> Tensor:
    """Return memory for the tokens in block 1, after the null block."""
    return tokens.new_zeros((2, *tokens.shape))


def _second_block(launch: Launch) -> tuple[Tensor, Batch]:
    count = len(launch.tokens)
    one = torch.ones((1, 1), dtype=torch.int32, device=launch.tokens.device)
    return count + launch.positions, Batch(one, one[0] * count, launch.query_start)


class Model:
    """The whole model, with all ranks in one process. A sum over the ranks replaces the all-reduce."""

    def __init__(self, config: ModelConfig, weights: Weights, ranks: list[PageBuffers], ops: PagedOps) -> None:
        self._ops = ops
        self.device = ranks[0].memory.device
        self._config = config
        self._num_layers = len(config.layers)
        self._pages = ranks
        self.replace_weights(weights)

    def replace_weights(self, weights: Weights) -> None:
        """Compute with these weights from the next launch on. What pages hold stays that of the old ones."""
        pages, number = self._pages, len(self._pages)
        self._shares = [share_of(weights, rank, number, self.device) for rank in range(number)]
        self._whole = self._shares[0]
        of_ranks = zip(self._shares, pages, strict=True)
        self._ranks = [RankModel(self._config, share, buffers, self._ops) for share, buffers in of_ranks]

    def warm_up(self) -> list[WarmUp]:
        """Compile the kernels of each rank, so that no launch waits for a compiler."""
        return [rank.warm_up() for rank in self._ranks]

    def calibrate(self, prompts: Sequence[list[int]]) -> None:
        """Set the scales of 8-bit pages from the keys, values and latent rows that the model computes for sample
        prompts without a cache.

        An engine calls this before it writes or reads pages. Equal prompts give equal scales in each engine life.
        """
        sampled = [SampledRank(self._config, *rank) for rank in zip(self._shares, self._pages, strict=True)]
        for prompt in prompts:
            self._logits(sampled, Launch([Row(prompt, 0, 1, ())], self.device))
        for rank in sampled:
            rank.set_scales()

    @property
    def config(self) -> ModelConfig:
        """The configuration of the model."""
        return self._config

    @property
    def ranks(self) -> Sequence[PageBuffers]:
        """The pages of each rank."""
        return self._pages

    def fill(self, pages: Sequence[PageBuffers], launches: Iterable[Launch]) -> None:
        """Run launches on other pages, one `PageBuffers` for each rank. The pages of the model stay as they are."""
        ranks = [RankModel(self._config, *rank, self._ops) for rank in zip(self._shares, pages, strict=True)]
        for launch in launches:
            self._logits(ranks, launch)

    def logits(self, launch: Launch) -> Tensor:
        """Run a launch and return the logits, [outputs, vocabulary]."""
        return self._logits(self._ranks, launch)

    def _logits(self, ranks: Sequence[RankModel], launch: Launch) -> Tensor:
        stream = self._whole.embedding[launch.tokens]
        for number in range(self._num_layers):
            x = normalise(stream)
            stream = stream + sum(rank.mix(number, x, launch) for rank in ranks)
            x = normalise(stream)
            stream = stream + sum(rank.feed(number, x) for rank in ranks)
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


def rotate_last(x: Tensor, size: int, positions: Tensor) -> Tensor:
    """Apply the rotary position embedding to the last `size` elements of x [tokens, heads, elements]."""
    return torch.cat([x[..., :-size], rotate(x[..., -size:], positions)], dim=-1)


def _rule(config: ModelConfig, layer: AttentionLayer) -> AttentionRule:
    return AttentionRule(scale=config.head_size**-0.5, window=layer.window, chunk=layer.chunk)
