"""The arguments of the kernels: tuples of pointers and numbers, and a frozen shape with the compile-time constants."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


class Heads(NamedTuple):
    """Queries or results [rows, heads, size], with the strides of a row and of a head, in elements."""

    data: Tensor
    strides: tuple[int, int]


class Paged(NamedTuple):
    """Keys, values or latent rows [blocks, block_size, heads, size].

    Attributes:
        data: the elements; where 8-bit ones are read, pairs of them as int16, where they are written, bytes.
        strides: strides of a block, a token and a head, in elements of `data`.
        scale: float32, one for all heads or one per head, for 8-bit elements; None for others.
        scale_stride: 1 if `scale` has one entry per head, otherwise 0.
    """

    data: Tensor
    strides: tuple[int, int, int]
    scale: Tensor | None = None
    scale_stride: int = 0


class Rows(NamedTuple):
    """The rows of a batch: block table, its stride in elements, lengths, and number of rows.

    `starts` has the index of each row's first query; None if each row has one query. `tree` is `Batch.tree`.
    """

    table: Tensor
    table_stride: int
    lengths: Tensor
    num_rows: int
    starts: Tensor | None = None
    tree: Tensor | None = None


class Logits(NamedTuple):
    """How logits become weights: scale, and per query head sinks and slopes (see `AttentionRule`), float32 or None."""

    scale: float
    sinks: Tensor | None = None
    slopes: Tensor | None = None


class Results(NamedTuple):
    """Memory for results [queries, q_heads, size], with the strides of a query and of a head, in elements; and for the
    log-sum-exps, float32 [queries, q_heads], or None.
    """

    data: Tensor
    strides: tuple[int, int]
    lse: Tensor | None
    q_heads: int


class Constants:
    """Base of compile-time constants.

    Triton names a kernel on disk by the text of its constants: their fields, and not what their properties compute.
    With the digest of this file in it, a cache that outlives an upgrade serves no kernel of earlier properties.
    """

    def __str__(self) -> str:
        return f"{self!r}, {SOURCE}"


@dataclass(frozen=True)
class Shape(Constants):
    """Compile-time constants of the attention kernels.

    Attributes:
        page: tokens of a page.
        width_k, width_v: elements of a key and of a value. For latent rows both are the elements that are key and
            value.
        rest: elements of a latent row that belong only to the key; 0 for separate keys and values.
        paired: whether keys and values have equal strides, so that both use one offset.
        group: query heads per program, all of one kv head.
        queries: queries of a tile; 1 = each row has one query.
        window, chunk, soft_cap: see `AttentionRule`.
        fp8, upcast: how elements are converted (see `numbers`).
        tile: tokens of one step of the softmax.
        stages: depth of the software pipeline.
        scan: rows read at a time when tiles are counted.
        overlaps: whether the merge may begin before this launch has ended.
    """

    page: int
    width_k: int
    width_v: int
    group: int
    queries: int = 1
    rest: int = 0
    paired: bool = False
    window: int = 0
    chunk: int = 0
    soft_cap: float = 0.0
    fp8: int = 0
    upcast: bool = False
    tile: int = 64
    stages: int = 2
    scan: int = 256
    overlaps: bool = False

    @property
    def masked_stages(self) -> int:
        """The depth of the pipeline for tiles that some queries attend to in part; less where few tiles of
        16-bit elements are such, since another tile in flight takes registers.
        """
        return self.stages if self.window or self.chunk or self.fp8 else max(1, self.stages - 1)

    @property
    def step(self) -> int:
        """The elements that are loaded together: 2 of an 8-bit type."""
        return 2 if self.fp8 else 1

    @property
    def padded_k(self) -> int:
        """The elements of a key, padded to a power of two that a matrix product supports."""
        return power_of_two(self.width_k, 16 * self.step)

    @property
    def padded_v(self) -> int:
        """The elements of a value, padded as `padded_k`."""
        return power_of_two(self.width_v, 16 * self.step)

    @property
    def padded_rest(self) -> int:
        """The elements of a latent row that belong only to the key, padded as `padded_k`."""
        return power_of_two(self.rest, 16 * self.step)

    @property
    def lanes(self) -> int:
        """The query heads per program, padded to a power of two."""
        return power_of_two(self.group, 1)

    @property
    def rows(self) -> int:
        """The rows of the matrix products, queries x heads of a tile, padded as `padded_k`."""
        return power_of_two(self.queries * self.lanes)


@dataclass(frozen=True)
class MergeShape(Constants):
    """Compile-time constants of the merge: the members of `Shape` with the same names, and how it is divided.

    Attributes:
        few: most workers of an item, less one, whose results one program merges.
        merged, parts: of other items, the rows of a program, and the workers whose results it reads at a time.
    """

    width_v: int
    padded_v: int
    group: int
    queries: int
    lanes: int
    rows: int
    merged: int
    parts: int
    few: int
    overlaps: bool = False


class StateBlocks(NamedTuple):
    """The tensors of `StateRows`."""

    starts: Tensor
    read: Tensor
    write: Tensor


class StateTokens(NamedTuple):
    """The tensors of `StateRows`, and inputs of a convolution with the stride of a token; of Mamba-2 also dt."""

    starts: Tensor
    read: Tensor
    write: Tensor
    x: Tensor
    x_stride: int
    dt: Tensor | None = None
    dt_stride: int = 0


class ScanTokens(NamedTuple):
    """The tensors of `ScanInputs`, with the strides of a token, and the weights of a selective scan, contiguous."""

    x: Tensor
    dt: Tensor
    b: Tensor
    c: Tensor
    strides: tuple[int, int, int, int]
    a: Tensor
    d: Tensor


class DeltaTokens(NamedTuple):
    """The tokens of `DeltaInputs`, with the strides of a token."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    strides: tuple[int, int, int, int, int]


class StateMemory(NamedTuple):
    """The pages of `StatePages`, with the strides of a block, a channel and a token of a convolution's inputs, and of a
    block of states, in elements. An operation has only those that it uses.
    """

    conv: Tensor | None = None
    conv_stride: int = 0
    channel_stride: int = 0
    token_stride: int = 0
    ssm: Tensor | None = None
    ssm_stride: int = 0


class ConvolutionWeights(NamedTuple):
    """The weights of a convolution, contiguous."""

    conv: Tensor
    bias: Tensor


class StateVectors(NamedTuple):
    """The weights a and d of `StateWeights`, contiguous."""

    a: Tensor
    d: Tensor


class HeldStates(NamedTuple):
    """Copies of what rows read: the inputs of convolutions [rows, width - 1, channels]; whether another row overwrites
    a row's block, int32 [rows]; and states, float32 [rows, ...], before the row where another row overwrites them. The
    scans by matrix products then store them after each chunk that another follows.
    """

    conv: Tensor | None = None
    is_shared: Tensor | None = None
    ssm: Tensor | None = None


class HeldChunks(NamedTuple):
    """`HeldStates` of the gated delta rule, and the matrices of chunks that depend on no state, float32 [tokens, heads,
    chunk]: a row per token.
    """

    is_shared: Tensor | None
    ssm: Tensor | None
    inverse: Tensor
    products: Tensor


@dataclass(frozen=True)
class ConvolutionShape(Constants):
    """Compile-time constants of the kernels that hold states, convolve, and keep the inputs of convolutions.

    Attributes:
        channels, width: channels of a convolution, and tokens that it covers; 0 and 1 without a convolution.
        state: elements of a state; 0 = none is held.
        chunk: tokens in which blocks are looked for at a time.
        tokens, columns: size of a tile of the convolution; piece: elements copied by a program.
        scan, scan_rows: tokens and rows that are looked at in one step.
    """

    channels: int = 0
    width: int = 1
    state: int = 0
    chunk: int = 64
    tokens: int = 16
    columns: int = 256
    piece: int = 4096
    scan: int = 1024
    scan_rows: int = 32


@dataclass(frozen=True)
class StateShape(Constants):
    """Compile-time constants of the scan of Mamba-2.

    Attributes:
        heads, head_size, state_size: see `StatePages`.
        chunk: tokens of a step of the scan.
        padded_v: elements of a head per program; part_n: columns of a state that one product takes.
        round_bfloat16: whether states must be rounded before they are stored.
        precision: of the products of states: float32 in three products of tensor cores; precision_y: of those of y.
    """

    heads: int
    head_size: int
    state_size: int
    chunk: int
    padded_v: int
    part_n: int
    round_bfloat16: bool
    precision: str
    precision_y: str

    @property
    def channels(self) -> int:
        """The channels of the convolution: inputs of all heads, B and C."""
        return self.heads * self.head_size + 2 * self.state_size


@dataclass(frozen=True)
class ScanShape(Constants):
    """Compile-time constants of the selective scan of Mamba-1.

    Attributes:
        channels, state_size: see `StatePages`; padded_n: elements of a state, padded to a power of two.
        columns: channels of a program.
        chunk: tokens that are scanned at a time; 0 = tokens are taken one by one.
        short: most tokens of a row that are taken one by one.
        round_bfloat16: whether states must be rounded before they are stored.
    """

    channels: int
    state_size: int
    padded_n: int
    columns: int
    chunk: int
    short: int
    round_bfloat16: bool


@dataclass(frozen=True)
class DeltaShape(Constants):
    """Compile-time constants of the kernels of the gated delta rule.

    Attributes:
        heads, value_size, key_size: see `StatePages`; group: heads per head of keys and queries.
        by_key: whether a gate is one number per element of a key; otherwise one per head.
        padded_v: elements of a value per program; padded_k: elements of a key, padded to a power of two; part_k:
            columns of a state that one product takes.
        chunk: tokens of a step of the scan; 0 = tokens are taken one by one. strip: rows of an inverse that are
            computed together.
        short: most tokens of a row that are taken one by one.
        round_bfloat16: whether states must be rounded before they are stored.
        precision, precision_y: as in `StateShape`; precision_k: of products of keys and queries, which have 11 bits or
            fewer in 16-bit types.
        scan_rows: rows that are looked at in one step.
    """

    heads: int
    group: int
    value_size: int
    key_size: int
    by_key: bool
    padded_v: int
    padded_k: int
    part_k: int
    chunk: int
    strip: int
    short: int
    round_bfloat16: bool
    precision: str
    precision_y: str
    precision_k: str
    scan_rows: int = 32

    @property
    def levels(self) -> int:
        """The steps in which blocks of an inverse double up to a strip."""
        return self.strip.bit_length() - 1


@dataclass(frozen=True)
class WriteShape(Constants):
    """Compile-time constants of the kernel that writes tokens.

    Attributes:
        page: tokens of a page.
        size_k, size_v: elements of a head.
        width_k, width_v: elements of a token over all heads; width_v is 0 for latent rows.
        fp8: how numbers are converted to 8-bit elements (see `numbers`).
        tokens, columns: size of the tile of one program.
    """

    page: int
    size_k: int
    size_v: int
    width_k: int
    width_v: int
    fp8: int
    tokens: int
    columns: int


def power_of_two(size: int, least: int = 16) -> int:
    """Return the smallest power of two that is at least `size` and `least`; a matrix product needs 16 or more."""
    return max(least, 1 << (size - 1).bit_length())
