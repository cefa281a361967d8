"""The operations that a backend provides, and the types of the operations' arguments. Both are the same for every
device.

Shapes are written [rows, heads, size]. A *row* is one request of a batch; its new tokens are its *queries*. Block
tables contain block ids in token order, 0 is the null block. An operation reads no page that is not in the table, and
the content of the null block's page never affects a result. Unused slots of a page may contain any bytes, also NaN.

Every operation runs on the device of its tensors, on the current stream, and writes only the slots or blocks that its
arguments list. An operation raises `InvalidArgument` for shapes and types that the backend does not support, before it
writes (`checks` has the checks that all backends share). Queries and new tokens have the element type of the pages;
with 8-bit pages, any wider type. Sums are computed in float32; in float64 if queries or tokens are float64.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class AttentionPages:
    """The keys and values of one layer, as views of the page buffer.

    A page contains its keys [block_size, kv_heads, head_size], then its values [block_size, kv_heads, head_size_v]; the
    memory layout determines the strides between blocks. Element types: float64, float32, bfloat16, float16, and the
    8-bit types float8_e4m3fn and float8_e5m2.

    Attributes:
        k: [num_blocks, block_size, kv_heads, head_size].
        v: [num_blocks, block_size, kv_heads, head_size_v].
        k_scale, v_scale: float32 [1] or [kv_heads], for 8-bit pages: value = stored value x scale. None otherwise.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LatentPages:
    """The latent rows of one layer, as a view of the page buffer. Element types as in `AttentionPages`.

    Attributes:
        rows: [num_blocks, block_size, latent_size].
        scale: float32 [1], for 8-bit pages: value = stored value x scale. None otherwise.
    """

    rows: Tensor
    scale: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StatePages:
    """The recurrent states of one layer, as views of the page buffer.

    Attributes:
        conv: [num_blocks, channels, width - 1], the last inputs of the causal convolution, oldest first. In memory,
            either channels or tokens are next to each other.
        ssm: the states: [num_blocks, heads, head_size, state_size] of Mamba-2, [num_blocks, channels, state_size] of
            Mamba-1, [num_blocks, heads, value_size, key_size] of the gated delta rule.
    """

    conv: Tensor
    ssm: Tensor


class HostRun(NamedTuple):
    """Layers whose pages of a block follow each other in host memory.

    Attributes:
        address, stride: of block 0, and from there to the next one.
        offset, size: of these bytes in a staging buffer's row.
    """

    address: int
    stride: int
    offset: int
    size: int


@dataclass(frozen=True)  # without slots: what is derived from the layers is kept
class GroupPages:
    """The whole pages of one KV cache group, as bytes.

    Attributes:
        layers: uint8 [num_blocks, page_bytes] for each layer of the group; page sizes may differ between layers.
    """

    layers: tuple[Tensor, ...]

    @cached_property
    def bytes_per_block(self) -> int:
        """The bytes of one block over all layers, which is the width of a staging buffer's row."""
        return sum(layer.shape[1] for layer in self.layers)

    @cached_property
    def host_runs(self) -> tuple[HostRun, ...]:
        """Where the pages are in host memory, in the order of the layers; empty if they are not, or not contiguous."""
        if any(layer.device.type != "cpu" or layer.stride(1) != 1 for layer in self.layers):
            return ()
        runs, offset = list[HostRun](), 0
        for layer in self.layers:
            address, stride, size = layer.data_ptr(), layer.stride(0), layer.shape[1]
            last = runs[-1] if runs else None
            if last is not None and (last.address + last.size, last.stride) == (address, stride):
                runs[-1] = last._replace(size=last.size + size)
            else:
                runs.append(HostRun(address, stride, offset, size))
            offset += size
        return tuple(runs)


@dataclass(frozen=True, slots=True)
class HostTables:
    """The tables of a batch in host memory, for backends that plan there. Values as in `Batch`.

    Attributes:
        block_table: int32 [rows, max_blocks].
        seq_lens: int64 [rows].
        query_start: int64 [rows + 1].
    """

    block_table: Tensor
    seq_lens: Tensor
    query_start: Tensor


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Batch:
    """The rows of a launch, and the pages that they read.

    Attributes:
        block_table: int32 [rows, max_blocks]; 0 where a block left the window or is not needed. A token whose block is
            0 is not attended to. The table may already contain blocks after the row's last token (seq_lens); such
            blocks are not read.
        seq_lens: int32 [rows]: number of tokens of the row including its last query; all of them are written to pages.
            0 = an empty row; its output is 0.
        query_start: int32 [rows + 1]: the queries of row r are [query_start[r], query_start[r + 1]); the last query of
            a row is its token seq_lens - 1. None: one query per row (decode), row r is query r.
        tree: int64 [queries], for trees of drafts: bit i of a query's mask = it attends to query i of its row, if that
            precedes it. Earlier tokens of the row are attended to as always. At most 64 queries of a row are
            distinguished; -1 = all. Needs `query_start`. None = no tree.
        host: the same tables in host memory; without them a backend that plans on the host waits for the device.
    """

    block_table: Tensor
    seq_lens: Tensor
    query_start: Tensor | None = None
    tree: Tensor | None = None
    host: HostTables | None = None

    def on_host(self) -> HostTables:
        """Return the tables in host memory: those that were given, or copies from the device, which wait for it."""
        if self.host is not None:
            return self.host
        lengths = self.seq_lens.cpu().long()
        starts = torch.arange(len(lengths) + 1) if self.query_start is None else self.query_start.cpu().long()
        return HostTables(self.block_table.cpu(), lengths, starts)


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """Which earlier tokens a query attends to, and how logits become weights. Attention is always causal.

    A query that attends to no token (its row is empty, or all its blocks are null) has output 0.

    Attributes:
        scale: logits are scale x (q . k).
        window: number of attended tokens, including the query's own; 0 = all.
        chunk: length in tokens of the chunks into which a sequence is divided: a query attends only to its own chunk; 0
            = all tokens. At most one of window and chunk is set.
        sinks: float32 [q_heads], one extra logit per head, which takes part in the softmax and has no value (gpt-oss);
            None = none.
        soft_cap: logits become soft_cap x tanh(logits / soft_cap) (Gemma 2); 0 = no cap.
        slopes: float32 [q_heads]; slope x (position of the token - position of the query) is added to the logits
            (ALiBi, Press et al., 2021), after the soft cap; None = nothing is added.
    """

    scale: float
    window: int = 0
    chunk: int = 0
    sinks: Tensor | None = None
    soft_cap: float = 0.0
    slopes: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """The attention of layers with equal pages and rules.

    Attributes:
        pages: the pages of one of these layers.
        q_heads: query heads of the rank.
        dtype: element type of queries and new tokens.
        rule: the rule, with tensors of its sinks and slopes if there are any.
    """

    pages: AttentionPages
    q_heads: int
    dtype: torch.dtype
    rule: AttentionRule


@dataclass(frozen=True, slots=True)
class LayerLatents:
    """The latent attention of layers with equal pages.

    Attributes:
        pages: the pages of one of these layers.
        q_heads, dtype: as in `LayerAttention`.
        value_size: elements of a latent row that are values.
    """

    pages: LatentPages
    q_heads: int
    dtype: torch.dtype
    value_size: int


@dataclass(frozen=True, slots=True)
class LayerStates:
    """Layers with recurrent states of equal shape.

    Attributes:
        pages: the pages of one of these layers.
        dtype: element type of new tokens and weights.
        operation: the operation of `StateOps` that advances the states; all but `state_step` follow `convolve`.
        gates_of_keys: whether a gated delta rule has a gate per element of a key.
    """

    pages: StatePages
    dtype: torch.dtype
    operation: str = "state_step"
    gates_of_keys: bool = False


LayerUse = LayerAttention | LayerLatents | LayerStates


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What a warm-up did.

    Attributes:
        kernels: the name of each kernel that was compiled or loaded from a cache; of a family, once per kernel.
        cpu_s: CPU time of this process and of the compilers that it started, in seconds.
    """

    kernels: tuple[str, ...] = ()
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StateRows:
    """The rows of a launch for a recurrent layer, and the blocks of their states.

    Attributes:
        query_start: int32 [rows + 1], as in `Batch`.
        read_block: int32 [rows]: the block with the state before the row's first token; 0 = the zero state.
        write_block: int32 [tokens]: the block that receives the state after the token, 0 = the state is not stored. If
            two tokens of a row have the same block, the state after the later token is stored; two rows never have the
            same block.
    """

    query_start: Tensor
    read_block: Tensor
    write_block: Tensor


@dataclass(frozen=True, slots=True)
class StateInputs(StateRows):
    """The tokens of a launch for a layer of Mamba-2, in the order of the rows.

    Attributes:
        x: [tokens, channels] with channels = heads x head_size + 2 x state_size: input, B and C before the convolution.
        dt: [tokens, heads], positive time steps: the caller applies bias and softplus.
    """

    x: Tensor
    dt: Tensor


@dataclass(frozen=True, slots=True)
class ScanInputs(StateRows):
    """The tokens of a launch for a layer of Mamba-1, in the order of the rows.

    Attributes:
        x: [tokens, channels], after the convolution.
        dt: [tokens, channels], positive time steps: the caller applies bias and softplus.
        b, c: [tokens, state_size].
    """

    x: Tensor
    dt: Tensor
    b: Tensor
    c: Tensor


@dataclass(frozen=True, slots=True)
class DeltaInputs(StateRows):
    """The tokens of a launch for a layer with the gated delta rule, in the order of the rows, after the convolution.

    Attributes:
        q, k: [tokens, key_heads, key_size]; the caller normalises keys and queries, and scales queries. Heads are
            grouped: heads is a multiple of key_heads.
        v: [tokens, heads, value_size].
        g: logarithms of decays, finite and not above 0: [tokens, heads], one per head; or [tokens, heads, key_size],
            one per element of a key (KDA, Kimi Linear).
        beta: [tokens, heads]: strengths of writing, from 0 to 2.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


@dataclass(frozen=True, slots=True)
class StateWeights:
    """The weights of a recurrent layer.

    Attributes:
        conv_weight: [channels, width], weights of the convolution, which is followed by SiLU.
        conv_bias: [channels].
        a: [heads], negative: the state decays by exp(dt x a) per token.
        d: [heads]: weight of the input in the output (skip connection).
    """

    conv_weight: Tensor
    conv_bias: Tensor
    a: Tensor
    d: Tensor


class AttentionOps(Protocol):
    """The operations on keys, values and latent rows. Heads are grouped (GQA): q_heads is a multiple of kv_heads.

    Attention writes to `lse`, float32 [queries, q_heads], if it is given: the natural logarithm of the sum of
    exp(logit) over the attended tokens and the sink; -inf if there are none. With it, results over parts of the tokens
    can be merged.
    """

    def write_kv(self, pages: AttentionPages, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Write the keys [tokens, kv_heads, head_size] and values of new tokens into pages.

        `slots` is int64 [tokens]: block id x block_size + offset, -1 = skip this token. 8-bit pages store value /
        scale, saturated to the range of their type; `check_scales` refuses a scale that is zero, negative or NaN.
        """

    def decode_attention(
        self, query: Tensor, pages: AttentionPages, batch: Batch, rule: AttentionRule, lse: Tensor | None = None
    ) -> Tensor:
        """Compute attention for one query per row: [rows, q_heads, head_size] -> [rows, q_heads, head_size_v], in the
        query's type.
        """

    def prefill_attention(
        self, query: Tensor, pages: AttentionPages, batch: Batch, rule: AttentionRule, lse: Tensor | None = None
    ) -> Tensor:
        """Compute attention for any number of queries per row.

        Shapes: [queries, q_heads, head_size] -> [queries, q_heads, head_size_v], in the query's type.
        """

    def write_latent(self, pages: LatentPages, latent: Tensor, slots: Tensor) -> None:
        """Write latent rows [tokens, latent_size] into pages; for `slots` and 8-bit pages see `write_kv`."""

    def mla_decode(
        self, query: Tensor, pages: LatentPages, batch: Batch, scale: float, value_size: int, lse: Tensor | None = None
    ) -> Tensor:
        """Compute latent attention (DeepSeek-V2) for any number of queries per row: latent rows are the keys, their
        first `value_size` elements the values.

        Shapes: [queries, q_heads, latent_size] -> [queries, q_heads, value_size], in the query's type.
        """


class StateOps(Protocol):
    """The operations on recurrent states."""

    def state_step(self, pages: StatePages, inputs: StateInputs, weights: StateWeights) -> Tensor:
        """Advance each row's state over its tokens, and return y [tokens, heads, head_size] in the type of x.

        For each token: u = silu(conv(x)), split into v [heads, head_size], B and C [state_size]; h = exp(dt a) h + dt v
        B^T; y = h C + d v (Dao and Gu, "Transformers are SSMs", 2024). All states are read before any is written.
        """

    def convolve(self, conv: Tensor, rows: StateRows, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return silu(conv(x)) in the type of x, [tokens, channels], and store the last inputs as states.

        The convolution is causal, per channel: conv is `StatePages.conv`; x [tokens, channels], of its type; weight
        [channels, width]; bias [channels]. All states are read before any is written.
        """

    def selective_scan(self, states: Tensor, inputs: ScanInputs, a: Tensor, d: Tensor) -> Tensor:
        """Advance the states of Mamba-1 over each row's tokens, and return y [tokens, channels] in the type of x.

        For each token and channel, h [state_size] = exp(dt a) h + dt x B; y = h . C + d x (Gu and Dao, "Mamba", 2023).
        states is `StatePages.ssm`; a [channels, state_size], negative; d [channels], weight of the input in the output.
        All states are read before any is written.
        """

    def gated_delta_rule(self, states: Tensor, inputs: DeltaInputs) -> Tensor:
        """Advance the states of the gated delta rule over each row's tokens, and return y [tokens, heads, value_size]
        in the type of v.

        For each token and head, S [value_size, key_size] = exp(g) S; S = S + beta (v - S k) k^T; y = S q (Yang et al.,
        "Gated Delta Networks", 2025); exp(g) is one number per head, or one per column of S ("Kimi Linear", 2025).
        states is `StatePages.ssm`. All states are read before any is written.
        """


class PageOps(Protocol):
    """The operations on whole pages of a group. Block ids are host integers. The null block is never written.

    A staging buffer is on the pages' device or in host memory. Its rows may have any stride; the bytes of a row are
    contiguous.
    """

    def copy_pages(self, group: GroupPages, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy block src[i] to dst[i] in every layer. The result is the same as copying one pair after the other (also
        for chains and swaps).
        """

    def zero_pages(self, group: GroupPages, blocks: Sequence[int]) -> None:
        """Set every byte of the blocks to 0."""

    def gather(self, group: GroupPages, blocks: Sequence[int], staging: Tensor) -> None:
        """Copy blocks into the rows of `staging`, uint8 [len(blocks), bytes_per_block], layer after layer."""

    def scatter(self, group: GroupPages, blocks: Sequence[int], staging: Tensor) -> None:
        """Copy the rows of `staging` into blocks, the reverse of `gather`. Each block is listed once."""

    def checksum(self, group: GroupPages, blocks: Sequence[int]) -> Tensor:
        """Return a checksum of each block over all layers: int64 [len(blocks)], below 2^32, equal on every backend.

        The bytes of a block, in the order of `gather` and padded with zeroes, form little-endian words of 4 bytes. The
        checksum is the sum over i of mix(word[i] + (i + 1) x 0x9E3779B1), modulo 2^32; mix is the finalizer of
        MurmurHash3.
        """


# The operations that a worker uses. Engines also use attention and states.
PAGE_OPERATIONS = ("copy_pages", "zero_pages", "gather", "scatter", "checksum")


class PagedOps(AttentionOps, StateOps, PageOps, Protocol):
    """A backend: all operations in one class.

    Attributes:
        name: "torch", "triton", ...; returned by `Worker.Describe`.
    """

    name: str

    def warm_up(
        self,
        groups: Sequence[GroupPages],
        operations: Collection[str],
        layers: Sequence[LayerUse] = (),
    ) -> WarmUp:
        """Compile the kernels that these operations need on the pages of these groups, and attention, writes and steps
        of these layers, so that no later call waits for a compiler. `operations` are names of methods of `PageOps`.
        """
