"""The dense model (twin): the reference model computed from the whole token sequence at once.

It has no cache, pages, chunks or ranks, and shares only the weights with the engine. Both must return equal tokens,
whatever the engine's cache does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from kvplane_worker.pages import PageBuffers
from kvplane_worker.pages.dtypes import TORCH_DTYPES
from tests.engine.reference.config import EIGHT_BIT, AttentionLayer, LatentLayer, ModelConfig, layer_name
from tests.engine.reference.weights import (
    AttentionWeights,
    DeltaWeights,
    FeedForward,
    LatentWeights,
    ScanWeights,
    SelectiveWeights,
    Weights,
)
from tests.kernels.formats import FORMATS

MASKED = -math.inf
FORM_OF = {form.torch_dtype: form for form in FORMATS}


class Twin:
    """Logits of every position of a sequence. With 8-bit pages, keys and values are rounded with the scales of `pages`,
    by rank; without `pages` they are exact. With pages of 16 bits they are rounded, as queries and results are.

    Attributes:
        largest: by layer, the largest absolute keys and values per head so far, or latent rows [1]; not rounded.
    """

    def __init__(self, config: ModelConfig, weights: Weights, pages: Sequence[PageBuffers] = ()) -> None:
        self._config = config
        self._weights = as_float64(weights)
        self._pages = pages
        self.largest: dict[int, tuple[Tensor, ...]] = {}

    def logits(self, tokens: list[int]) -> Tensor:
        """Logits [tokens, vocabulary]; row t is for the token after tokens[: t + 1]."""
        weights = self._weights
        stream = weights.embedding[torch.tensor(tokens)]
        for number, (mixer, block) in enumerate(zip(weights.mixers, weights.feed_forwards, strict=True)):
            if isinstance(mixer, AttentionWeights):
                stream = stream + self._attend(number, mixer, unit_rms(stream))
            elif isinstance(mixer, LatentWeights):
                stream = stream + self._attend_latents(number, mixer, unit_rms(stream))
            else:
                stream = stream + recurrence(mixer, unit_rms(stream))
            stream = stream + feed_forward(block, unit_rms(stream))
        return unit_rms(stream) @ weights.head

    def count_wrong(self, prompt: list[int], output: list[int]) -> int:
        """Number of output tokens that are not the most likely ones."""
        expected = self.logits([*prompt, *output[:-1]])[len(prompt) - 1 :].argmax(dim=1).tolist()
        return sum(a != b for a, b in zip(expected, output, strict=True))

    def _attend(self, number: int, weights: AttentionWeights, x: Tensor) -> Tensor:
        """Causal attention by a full matrix of logits per head, restricted to the window or the chunk."""
        layer = self._config.layers[number]
        assert isinstance(layer, AttentionLayer)
        count, heads = x.shape[0], self._config.q_heads
        query = self._narrowed(rotated(torch.einsum("tw,whs->hts", x, weights.q)))
        key = rotated(torch.einsum("tw,whs->hts", x, weights.k))
        key, value = self._stored(number, key, torch.einsum("tw,whs->hts", x, weights.v))
        group = heads // layer.kv_heads
        out = torch.zeros_like(x)
        allowed = visible(layer, count)
        for head in range(heads):
            scores = query[head] @ key[head // group].T / math.sqrt(self._config.head_size)
            shares = torch.softmax(scores.masked_fill(~allowed, MASKED), dim=1)
            out = out + self._narrowed(shares @ value[head // group]) @ weights.out[head]
        return out

    def _attend_latents(self, number: int, weights: LatentWeights, x: Tensor) -> Tensor:
        """Causal attention to latent rows, whose first elements are also the values."""
        layer = self._config.layers[number]
        assert isinstance(layer, LatentLayer)
        size, allowed = layer.value_size, torch.ones(x.shape[0], x.shape[0]).tril().bool()
        rows = (x @ weights.latent)[None]
        (rows,) = self._stored(number, torch.cat([rows[..., :size], rotated(rows[..., size:])], dim=2))
        out = torch.zeros_like(x)
        for head in range(self._config.q_heads):
            query = (x @ weights.q[:, head])[None]
            query = self._narrowed(torch.cat([query[..., :size], rotated(query[..., size:])], dim=2))[0]
            scores = query @ rows[0].T / math.sqrt(layer.size)
            shares = torch.softmax(scores.masked_fill(~allowed, MASKED), dim=1)
            out = out + self._narrowed(shares @ rows[0, :, :size]) @ weights.out[head]
        return out

    def _stored(self, number: int, *parts: Tensor) -> tuple[Tensor, ...]:
        """Keys and values [heads, tokens, size], or latent rows, as a read of 8-bit pages returns them."""
        found = tuple(part.abs().amax((1, 2)) for part in parts)
        self.largest[number] = tuple(map(torch.maximum, self.largest.get(number, found), found))
        if self._config.cache_dtype not in EIGHT_BIT or not self._pages:
            return tuple(map(self._narrowed, parts))
        form = FORM_OF[TORCH_DTYPES[self._config.cache_dtype]]
        return tuple(
            torch.from_numpy(form.rounded((self._narrowed(part) / scale).numpy())) * scale
            for part, scale in zip(parts, self.scales(number), strict=True)
        )

    def scales(self, number: int) -> list[Tensor]:
        """Scales of a layer's keys and values, [heads, 1, 1], or of its latent rows."""
        name, layer = layer_name(number), self._config.layers[number]
        if isinstance(layer, LatentLayer):
            scale = self._pages[0].latent(name).scale
            assert scale is not None
            return [scale.cpu().double()[:, None, None]]
        of_ranks = [pages.attention(name) for pages in self._pages]
        heads = layer.kv_heads // len(of_ranks) if isinstance(layer, AttentionLayer) else 0
        parts = [[one.k_scale for one in of_ranks], [one.v_scale for one in of_ranks]]
        whole = [[scale.cpu().double().expand(heads) for scale in part if scale is not None] for part in parts]
        return [torch.cat(scales)[:, None, None] for scales in whole]

    def _narrowed(self, x: Tensor) -> Tensor:
        """Round x as kernels multiply it: to 16 bits where pages have 16 or 8 bits and the model float32."""
        if self._config.product_dtype is self._config.dtype:
            return x
        return torch.from_numpy(FORM_OF[TORCH_DTYPES[self._config.product_dtype]].rounded(x.numpy()))


def as_float64(weights: Any) -> Any:
    """The same weights, with float64 elements at every level."""
    if isinstance(weights, Tensor):
        return weights.double()
    if isinstance(weights, tuple):
        return tuple(map(as_float64, weights))
    values = {one.name: as_float64(getattr(weights, one.name)) for one in fields(weights)}
    return replace(weights, **values)


def visible(layer: AttentionLayer, count: int) -> Tensor:
    """Mask [query, key]: whether the query attends to the key."""
    query, key = torch.arange(count)[:, None], torch.arange(count)[None, :]
    seen = key <= query
    if layer.window:
        seen &= query - key < layer.window
    if layer.chunk:
        seen &= query // layer.chunk == key // layer.chunk
    return seen


def rotated(x: Tensor) -> Tensor:
    """Rotary embedding of x [heads, tokens, size]: rotate elements i, i + size / 2 by position / 100^(2 i / size)."""
    half = x.shape[-1] // 2
    frequency = torch.tensor([100.0 ** (-i / half) for i in range(half)], dtype=x.dtype)
    angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * frequency
    first, second = x[..., :half], x[..., half:]
    turned = (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin())
    return torch.cat(turned, dim=-1)


def recurrence(weights: SelectiveWeights | ScanWeights | DeltaWeights, x: Tensor) -> Tensor:
    if isinstance(weights, ScanWeights):
        return channel_scan(weights, x)
    return delta_rule(weights, x) if isinstance(weights, DeltaWeights) else selective_scan(weights, x)


def channel_scan(weights: ScanWeights, x: Tensor) -> Tensor:
    """Mamba-1, per channel and element: h[t] = exp(dt[t] a) h[t - 1] + dt[t] u[t] B[t]; y[t] = h[t] . C[t] + d u[t].

    h[t] is the sum of what each earlier token added, times the decay since then.
    """
    u = silu(causal_convolution(x @ weights.x, weights.conv) + weights.conv_bias)
    rank, size = weights.dt.shape[0], weights.a.shape[1]
    inner = u @ weights.inner
    into, out_of = inner[:, rank : rank + size], inner[:, rank + size :]
    step = torch.log1p(torch.exp(inner[:, :rank] @ weights.dt + weights.dt_bias))
    added = (step * u)[:, :, None] * into[:, None]
    total = torch.cumsum(step, 0)
    y = weights.d * u
    for t in range(x.shape[0]):
        since = (total[t] - total[: t + 1])[:, :, None] * weights.a
        y[t] += ((torch.exp(since) * added[: t + 1]).sum(0) * out_of[t]).sum(1)
    return (y * silu(x @ weights.gate)) @ weights.out


def delta_rule(weights: DeltaWeights, x: Tensor) -> Tensor:
    """S[t] = S[t - 1] exp(g[t]) (1 - beta[t] k[t] k[t]^T) + beta[t] v[t] k[t]^T from S = 0, then y[t] = S[t] q[t].

    exp(g) is a number, or a diagonal matrix.
    """
    q, k, v = (
        silu(causal_convolution(torch.einsum("tw,whs->ths", x, part), taps))
        for part, taps in ((weights.q, weights.conv_q), (weights.k, weights.conv_k), (weights.v, weights.conv_v))
    )
    heads, size = v.shape[1], k.shape[2]
    q, k = unit_rms(q) / size, unit_rms(k) / math.sqrt(size)
    gates = torch.einsum("tw,whg->thg", x, weights.decay) + weights.decay_bias
    decay = torch.exp(weights.a * torch.log1p(torch.exp(gates))).expand(-1, -1, size)
    beta = 1 / (1 + torch.exp(-x @ weights.beta))
    y = torch.zeros_like(v)
    for head in range(heads):
        key = k[:, head // (heads // k.shape[1])]
        state = torch.zeros(v.shape[2], size, dtype=x.dtype)
        for t in range(x.shape[0]):
            erased = torch.eye(size, dtype=x.dtype) - beta[t, head] * torch.outer(key[t], key[t])
            state = (state * decay[t, head]) @ erased + beta[t, head] * torch.outer(v[t, head], key[t])
            y[t, head] = state @ q[t, head // (heads // k.shape[1])]
    y = unit_rms(y) * silu(torch.einsum("tw,whs->ths", x, weights.gate))
    return torch.einsum("ths,hsw->tw", y, weights.out)


def selective_scan(weights: SelectiveWeights, x: Tensor) -> Tensor:
    """h[t] = exp(dt[t] a) h[t - 1] + dt[t] v[t] B[t]^T from h = 0, then y[t] = h[t] C[t] + d v[t]."""
    value = silu(causal_convolution(torch.einsum("tw,whs->ths", x, weights.x), weights.conv_x))
    into = silu(causal_convolution(x @ weights.b, weights.conv_b))
    out_of = silu(causal_convolution(x @ weights.c, weights.conv_c))
    step = torch.log1p(torch.exp(x @ weights.dt + weights.dt_bias))
    decay = torch.exp(step * weights.a)[:, :, None, None]
    added = (step[:, :, None] * value)[..., None] * into[:, None, None, :]
    states = [added[0]]
    for t in range(1, x.shape[0]):
        states.append(decay[t] * states[-1] + added[t])
    y = torch.einsum("thsn,tn->ths", torch.stack(states), out_of) + weights.d[:, None] * value
    return torch.einsum("ths,hsw->tw", y, weights.out)


def causal_convolution(x: Tensor, taps: Tensor) -> Tensor:
    """out[t] = sum over i of taps[..., i] x[t - (width - 1) + i], with zeroes before the first token."""
    width = taps.shape[-1]
    padded = torch.cat([torch.zeros(width - 1, *x.shape[1:], dtype=x.dtype), x])
    out = torch.zeros_like(x)
    for i in range(width):
        out = out + padded[i : i + x.shape[0]] * taps[..., i]
    return out


def feed_forward(weights: FeedForward, x: Tensor) -> Tensor:
    return silu(x @ weights.up) @ weights.down


def unit_rms(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + 1e-6)


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))
