"""What a backend does with pages: one interface, so that an engine's step reads the same on every device.

Shapes are written [rows, heads, size]. A *row* is one request of a batch; its new tokens are its *queries*. Block
tables hold block ids in token order, 0 is the null block: no kernel reads a page that the table does not name, and
what the null block's page holds never reaches a result. Unused slots of a page may hold anything, also NaN.

Every operation runs on the device of its tensors, on the current stream where there is one, writes only what it
names, and raises `InvalidArgument` for shapes and types that the backend does not take, before anything is written
(`checks` holds what all backends refuse). Queries and new tokens are of their pages' type; with 8-bit pages they are of
any other. Sums are kept in float32, in float64 where queries or tokens are float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionPages:
    """Keys and values of one layer, views of the page buffer.

    A page holds its keys [block_size, kv_heads, head_size], then its values [block_size, kv_heads, head_size_v]; the
    strides between blocks are the plan's. Element types: float64, float32, bfloat16, float16, float8_e4m3fn.

    Attributes:
        k, v: [num_blocks, block_size, kv_heads, head_size], [num_blocks, block_size, kv_heads, head_size_v].
        k_scale, v_scale: float32 [1] or [kv_heads], for 8-bit pages: stored value x scale = value. None otherwise.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StatePages:
    """Recurrent states of one layer (Mamba-2's form), views of the page buffer.

    Attributes:
        conv: [num_blocks, channels, width - 1], the last inputs of the causal convolution, oldest first.
        ssm: [num_blocks, heads, head_size, state_size].
    """

    conv: Tensor
    ssm: Tensor


@dataclass(frozen=True, slots=True)
class GroupPages:
    """The whole pages of one KV cache group as bytes, for moving them.

    Attributes:
        layers: per layer of the group, uint8 [num_blocks, page_bytes]; page sizes may differ between layers.
    """

    layers: tuple[Tensor, ...]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers: the width of a row of a staging buffer."""
        return sum(layer.shape[1] for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Batch:
    """Which pages the rows of a launch read.

    Attributes:
        block_table: int32 [rows, max_blocks], 0 where there is none (left the window) or none is needed. A token whose
            block is 0 is not attended to. Blocks past seq_lens may be named already; they are not read.
        seq_lens: int32 [rows]: tokens of the row up to and with its last query, all written to pages. 0: an empty row,
            whose output is 0.
        query_start: int32 [rows + 1]: queries of row r are [query_start[r], query_start[r + 1]); the last query of a
            row is its token seq_lens - 1. None: one query per row (decode), row r is query r.
    """

    block_table: Tensor
    seq_lens: Tensor
    query_start: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """Which of the earlier tokens a query attends to, and how logits become weights. Always causal.

    A query that attends to no token (an empty row's, or all blocks null) has output 0.

    Attributes:
        scale: logits are scale x (q . k).
        window: attended tokens, the query's own among them; 0 = all.
        chunk: only tokens of the query's own chunk of so many tokens; 0 = all. At most one of window and chunk.
        sinks: float32 [q_heads], one more logit per head that takes weight and has no value (gpt-oss); None = none.
    """

    scale: float
    window: int = 0
    chunk: int = 0
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StateInputs:
    """The tokens of a launch for a recurrent layer, rows one after the other.

    Attributes:
        query_start: int32 [rows + 1], as in `Batch`.
        read_block: int32 [rows]: the page of the state before the row's first token; 0 = the zero state.
        write_block: int32 [tokens]: the page that keeps the state after the token, 0 = it is not kept. Where a row
            names a page again, its last token counts; no two rows name the same.
        x: [tokens, channels] with channels = heads x head_size + 2 x state_size: input, B and C before the convolution.
        dt: [tokens, heads], positive (softplus and bias are the caller's).
    """

    query_start: Tensor
    read_block: Tensor
    write_block: Tensor
    x: Tensor
    dt: Tensor


@dataclass(frozen=True, slots=True)
class StateWeights:
    """Parameters of a recurrent layer.

    Attributes:
        conv_weight: [channels, width]; conv_bias: [channels]. The convolution is followed by SiLU.
        a: [heads], negative: the state decays by exp(dt x a) per token.
        d: [heads]: weight of the input itself in the output.
    """

    conv_weight: Tensor
    conv_bias: Tensor
    a: Tensor
    d: Tensor


class AttentionOps(Protocol):
    """Operations on keys, values and latents. Heads are grouped (GQA): q_heads is a multiple of kv_heads."""

    def write_kv(self, pages: AttentionPages, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Write tokens' keys [tokens, kv_heads, head_size] and values into pages.

        `slots` is int64 [tokens]: block id x block_size + offset, -1 = skip this token. 8-bit pages store value /
        scale, saturated to the type's range; a scale that is zero, negative or NaN is refused by `check_scales`.
        """

    def decode_attention(self, query: Tensor, pages: AttentionPages, batch: Batch, rule: AttentionRule) -> Tensor:
        """One query per row: [rows, q_heads, head_size] -> [rows, q_heads, head_size_v], in the query's type."""

    def prefill_attention(self, query: Tensor, pages: AttentionPages, batch: Batch, rule: AttentionRule) -> Tensor:
        """Ragged queries [queries, q_heads, head_size] -> [queries, q_heads, head_size_v], in the query's type."""

    def write_latent(self, pages: Tensor, latent: Tensor, slots: Tensor) -> None:
        """Write latent rows [tokens, latent_size] into pages [num_blocks, block_size, latent_size]; see `write_kv`."""

    def mla_decode(self, query: Tensor, pages: Tensor, batch: Batch, scale: float, value_size: int) -> Tensor:
        """Latent attention (DeepSeek-V2): keys are latent rows, values their first `value_size` elements.

        [rows, q_heads, latent_size] -> [rows, q_heads, value_size], in the query's type.
        """


class StateOps(Protocol):
    """Operations on recurrent states."""

    def state_step(self, pages: StatePages, inputs: StateInputs, weights: StateWeights) -> Tensor:
        """Advance each row's state over its tokens; returns y [tokens, heads, head_size] in the type of x.

        Per token: u = silu(conv(x)) split into v [heads, head_size], B and C [state_size];
        h = exp(dt a) h + dt v B^T; y = h C + d v (Dao and Gu, "Transformers are SSMs", 2024). All reads of states come
        before all writes.
        """


class PageOps(Protocol):
    """Operations on whole pages of a group. Blocks are given as ids, on the host. The null block is never written.

    Staging buffers lie on the pages' device or in host memory, rows strided as they may be, bytes of a row together.
    """

    def copy_pages(self, group: GroupPages, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy block src[i] to dst[i] in every layer, as if one after the other (chains and swaps too)."""

    def zero_pages(self, group: GroupPages, blocks: Sequence[int]) -> None:
        """Set every byte of the blocks to 0."""

    def gather(self, group: GroupPages, blocks: Sequence[int], staging: Tensor) -> None:
        """Copy blocks into rows of `staging`, uint8 [len(blocks), bytes_per_block], layers one after the other."""

    def scatter(self, group: GroupPages, blocks: Sequence[int], staging: Tensor) -> None:
        """The reverse of `gather`. A block may be named once."""

    def checksum(self, group: GroupPages, blocks: Sequence[int]) -> Tensor:
        """Checksum of each block over all layers, int64 [len(blocks)] with values below 2^32; equal on every backend.

        The bytes of a block in gather order, padded with zeroes to words of 4 and read little-endian: sum over i of
        mix(word[i] + (i + 1) x 0x9E3779B1), modulo 2^32, where mix is the finalizer of MurmurHash3.
        """


# What a worker does; attention and states are an engine's.
PAGE_OPERATIONS = ("copy_pages", "zero_pages", "gather", "scatter", "checksum")


class PagedOps(AttentionOps, StateOps, PageOps, Protocol):
    """A backend.

    Attributes:
        name: "torch", "triton", ...; shown by `Worker.Describe`.
    """

    name: str
