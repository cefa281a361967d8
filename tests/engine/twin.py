"""The dense model (twin): the reference model computed from the whole token sequence at once.

It has no cache, pages, chunks or ranks, and shares only the weights with the engine. Both must return equal tokens,
whatever the engine's cache does.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from kvplane_worker.engine.config import AttentionLayer, ModelConfig
from kvplane_worker.engine.weights import AttentionWeights, FeedForward, SelectiveWeights, Weights

MASKED = -math.inf


class Twin:
    """Logits of every position of a sequence."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self._config = config
        self._weights = as_float64(weights)

    def logits(self, tokens: list[int]) -> Tensor:
        """Logits [tokens, vocabulary]; row t is for the token after tokens[: t + 1]."""
        weights = self._weights
        stream = weights.embedding[torch.tensor(tokens)]
        for layer, mixer, block in zip(self._config.layers, weights.mixers, weights.feed_forwards, strict=True):
            if isinstance(layer, AttentionLayer):
                assert isinstance(mixer, AttentionWeights)
                stream = stream + self._attend(layer, mixer, unit_rms(stream))
            else:
                assert isinstance(mixer, SelectiveWeights)
                stream = stream + selective_scan(mixer, unit_rms(stream))
            stream = stream + feed_forward(block, unit_rms(stream))
        return unit_rms(stream) @ weights.head

    def count_wrong(self, prompt: list[int], output: list[int]) -> int:
        """Number of output tokens that are not the most likely ones."""
        expected = self.logits([*prompt, *output[:-1]])[len(prompt) - 1 :].argmax(dim=1).tolist()
        return sum(a != b for a, b in zip(expected, output, strict=True))

    def _attend(self, layer: AttentionLayer, weights: AttentionWeights, x: Tensor) -> Tensor:
        """Causal attention by a full matrix of logits per head, restricted to the window or the chunk."""
        count, heads = x.shape[0], self._config.q_heads
        query = rotated(torch.einsum("tw,whs->hts", x, weights.q))
        key = rotated(torch.einsum("tw,whs->hts", x, weights.k))
        value = torch.einsum("tw,whs->hts", x, weights.v)
        group = heads // layer.kv_heads
        out = torch.zeros_like(x)
        allowed = visible(layer, count)
        for head in range(heads):
            scores = query[head] @ key[head // group].T / math.sqrt(self._config.head_size)
            shares = torch.softmax(scores.masked_fill(~allowed, MASKED), dim=1)
            out = out + shares @ value[head // group] @ weights.out[head]
        return out


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
