"""The reference: every operation of the interface in numpy and float64, written for clarity.

It uses neither PyTorch nor a backend. Pages are decoded: stored value x scale, float64 [num_blocks, ...]. Each result
has a *magnitude*: the same sum over absolute values. Rounding errors are a small multiple of the magnitude, so a
tolerance is (a factor of the element type) x magnitude, for every shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class Rule:
    """See `interface.AttentionRule`."""

    scale: float
    window: int = 0
    chunk: int = 0
    sinks: np.ndarray | None = None
    soft_cap: float = 0.0
    slopes: np.ndarray | None = None

    def first_attended(self, position: int) -> int:
        """The earliest token that the query at `position` attends to."""
        if self.window:
            return max(0, position - self.window + 1)
        if self.chunk:
            return position // self.chunk * self.chunk
        return 0


@dataclass(frozen=True, slots=True)
class Tables:
    """See `interface.Batch`; `query_start` is always there."""

    block_table: np.ndarray
    seq_lens: np.ndarray
    query_start: np.ndarray
    tree: np.ndarray | None = None

    def positions(self, row: int) -> range:
        """Positions of the row's queries in its sequence; negative for the padding of an empty row."""
        count = int(self.query_start[row + 1] - self.query_start[row])
        return range(int(self.seq_lens[row]) - count, int(self.seq_lens[row]))


@dataclass(frozen=True, slots=True)
class Result:
    """A result, the sum of absolute values for each of its elements, and log-sum-exps of attention."""

    values: np.ndarray
    magnitude: np.ndarray
    lse: np.ndarray = field(default_factory=lambda: np.zeros(0))


def attention(query: np.ndarray, keys: np.ndarray, values: np.ndarray, tables: Tables, rule: Rule) -> Result:
    """Decode and prefill: query [queries, q_heads, head_size], keys and values [num_blocks, block_size, ...]."""
    num_queries, q_heads, _ = query.shape
    block_size, kv_heads, head_size_v = values.shape[1:]
    out = np.zeros((num_queries, q_heads, head_size_v))
    magnitude = np.zeros_like(out)
    lse = np.full((num_queries, q_heads), -np.inf if rule.sinks is None else rule.sinks)
    for row, table in enumerate(tables.block_table):
        for index, position in enumerate(tables.positions(row), start=int(tables.query_start[row])):
            tokens = np.arange(rule.first_attended(position), position + 1) if position >= 0 else np.arange(0)
            tokens = tokens[table[tokens // block_size] != 0]
            if tables.tree is not None:
                first = tables.positions(row)[0]
                tokens = np.array(
                    [t for t in tokens if t < first or int(tables.tree[index]) >> int(t - first) & 1], int
                )
            if len(tokens) == 0:
                continue
            blocks, offsets = table[tokens // block_size], tokens % block_size
            for head in range(q_heads):
                kv_head = head // (q_heads // kv_heads)
                value = values[blocks, offsets, kv_head]
                logits = rule.scale * (keys[blocks, offsets, kv_head] @ query[index, head])
                if rule.soft_cap:
                    logits = rule.soft_cap * np.tanh(logits / rule.soft_cap)
                if rule.slopes is not None:
                    logits = logits + rule.slopes[head] * (tokens - position)
                sink = None if rule.sinks is None else float(rule.sinks[head])
                weights = softmax(logits, sink)
                lse[index, head] = np.logaddexp.reduce(logits if sink is None else [*logits, sink])
                out[index, head] = weights @ value
                magnitude[index, head] = weights @ np.abs(value)
    return Result(out, magnitude, lse)


def softmax(logits: np.ndarray, sink: float | None) -> np.ndarray:
    """Softmax weights; a sink takes weight and has no value."""
    highest = logits.max() if sink is None else max(logits.max(), sink)
    raised = np.exp(logits - highest)
    total = raised.sum() + (0.0 if sink is None else np.exp(sink - highest))
    return np.asarray(raised / total)


def mla_decode(query: np.ndarray, latents: np.ndarray, tables: Tables, scale: float, value_size: int) -> Result:
    """Latent attention: attention with one kv head, whose values are the first elements of the keys."""
    keys = latents[:, :, None, :]
    return attention(query, keys, keys[..., :value_size], tables, Rule(scale))


# ---- whole pages, as bytes: a group is a list of layers, uint8 [num_blocks, page_bytes]


def copy_pages(layers: Sequence[np.ndarray], src: Sequence[int], dst: Sequence[int]) -> None:
    """Copy in order, in place."""
    for source, target in zip(src, dst, strict=True):
        for layer in layers:
            layer[target] = layer[source].copy()


def block_bytes(layers: Sequence[np.ndarray], block: int) -> bytes:
    """A block in gather order."""
    return b"".join(layer[block].tobytes() for layer in layers)


def checksum(data: bytes) -> int:
    """Sum of the mixed words, as `interface.PageOps.checksum` defines it."""
    padded = data + bytes(-len(data) % 4)
    words = np.frombuffer(padded, "<u4").astype(np.uint64)
    numbers = np.arange(1, len(words) + 1, dtype=np.uint64)
    return int(sum(murmur3_finalizer(int(word)) for word in (words + numbers * 0x9E3779B1) % 2**32) % 2**32)


def murmur3_finalizer(h: int) -> int:
    """Austin Appleby's fmix32, in Python integers."""
    h ^= h >> 16
    h = h * 0x85EBCA6B % 2**32
    h ^= h >> 13
    h = h * 0xC2B2AE35 % 2**32
    return h ^ h >> 16
