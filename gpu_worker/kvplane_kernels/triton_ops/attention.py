"""Attention over pages: kernel arguments, tile sizes, and the two launches of every call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvplane_kernels.checks import EIGHT_BIT
from kvplane_kernels.interface import AttentionPages, AttentionRule, Batch, LatentPages
from kvplane_kernels.triton_ops.kernels.arguments import (
    Heads,
    Logits,
    MergeShape,
    Paged,
    Results,
    Rows,
    Shape,
    power_of_two,
)
from kvplane_kernels.triton_ops.kernels.attention import attention_spans
from kvplane_kernels.triton_ops.kernels.merge import merge_parts
from kvplane_kernels.triton_ops.kernels.work import NUMBERS_PER_WORKER
from kvplane_kernels.triton_ops.launch import Chip, Fixed, Launch, current

TAKEN = (torch.float32, torch.bfloat16, torch.float16)
MAX_WIDTH = 256
MAX_LATENT = 512
MAX_GROUP = 64
VECTOR = 8
# Merges: most workers, less one, of an item that one program merges; of other items, most rows and elements of a
# program at a time, and workers that it reads at a time.
MERGED_BY_ONE = 4
MERGED_ROWS, MERGED_ELEMENTS, MERGED_AT_ONCE = 4, 8192, 16
# Small, so that a merge takes several rounds on the few workers of a test.
MERGED_BY_ONE_INTERPRETED, MERGED_AT_ONCE_INTERPRETED = 2, 4


@dataclass(frozen=True, slots=True)
class Tuning:
    """Launch parameters that affect speed, not results.

    Attributes:
        tile_bytes: bytes of keys and values in one step of the softmax.
        stages: depth of the software pipeline; all stages but one hold a tile in shared memory.
        warps: warps (32 threads) per program.
        residents: number of programs per multiprocessor; as many as its registers hold at once, or a multiple.
        max_tile: most tokens of a tile.
    """

    tile_bytes: int
    stages: int
    warps: int
    residents: int
    max_tile: int = 128

    def tile(self, token_bytes: int, chip: Chip) -> int:
        """Return the number of tokens of a tile: the largest power of two that fits into `tile_bytes` and into shared
        memory.
        """
        room = min(self.tile_bytes, (chip.shared_bytes - SHARED_OVERHEAD) // max(1, self.stages - 1))
        fitting = 1 << (max(1, room // token_bytes).bit_length() - 1)
        return max(MIN_TILE, min(self.max_tile, fitting))

    def programs(self, token_bytes: int, chip: Chip) -> int:
        """Return the number of programs that run concurrently on the chip."""
        needed = (self.stages - 1) * self.tile(token_bytes, chip) * token_bytes + SHARED_PER_PROGRAM
        return chip.multiprocessors * max(1, min(self.residents, chip.shared_bytes // needed))


# Chosen by speed on an H200; docs/kernels.md has the figures.
DECODE = Tuning(tile_bytes=32 << 10, stages=3, warps=4, residents=2)
DECODE_NARROW = Tuning(tile_bytes=32 << 10, stages=3, warps=4, residents=3)
DECODE_FP8 = Tuning(tile_bytes=32 << 10, stages=3, warps=4, residents=2)
DECODE_FP8_NARROW = Tuning(tile_bytes=8 << 10, stages=3, warps=4, residents=4, max_tile=64)
LATENT = Tuning(tile_bytes=72 << 10, stages=3, warps=8, residents=1)
LATENT_FP8 = Tuning(tile_bytes=36 << 10, stages=4, warps=8, residents=1)
LATENT_SEVERAL = Tuning(tile_bytes=36 << 10, stages=3, warps=8, residents=1)
# A few queries per row: products of 32 rows.
FEW = Tuning(tile_bytes=32 << 10, stages=3, warps=4, residents=2)
# Two programs per multiprocessor. With 8 warps they follow each other, so that their number is near a multiple of the
# multiprocessors for any number of heads.
PREFILL = Tuning(tile_bytes=32 << 10, stages=3, warps=8, residents=2, max_tile=64)
# Products of a warp group, which is 4 warps and 64 rows: with 8 warps Triton 3.6 computes each of them twice.
PREFILL_GROUP = Tuning(tile_bytes=32 << 10, stages=3, warps=4, residents=2, max_tile=64)
# With tiles of 64 tokens Triton 3.6 multiplies odd elements of 8-bit values wrongly if values are narrower than keys.
PREFILL_GROUP_SHORT = Tuning(tile_bytes=32 << 10, stages=3, warps=4, residents=2, max_tile=32)
PREFILL_SHORT = Tuning(tile_bytes=32 << 10, stages=3, warps=8, residents=2, max_tile=32)
INTERPRETED = Tuning(tile_bytes=1 << 19, stages=1, warps=4, residents=1, max_tile=64)
# Queries x heads per tile: few where a batch has few per row on average; most where products are accumulated in tensor
# memory (sm_100).
PREFILL_ROWS, PREFILL_ROWS_SMALL, PREFILL_ROWS_FEW = 128, 64, 32
LATENT_ROWS = 32
# Sizes of 8-bit heads, in elements, at which tile sizes change.
NARROW, WIDE = 64, 128
MIN_TILE = 16
# Shared memory for queries, weights and reductions, in addition to the tiles: at most, and per program.
SHARED_OVERHEAD = 40 << 10
SHARED_PER_PROGRAM = 7 << 10


def refusal(query: Tensor, pages: Tensor, group: int, widths: tuple[int, ...]) -> str:
    """Return why no kernel supports these pages and this query; "" if one does.

    `group` is the number of query heads per key, `widths` the elements of a key and of a value.
    """
    if pages.dtype in EIGHT_BIT:
        if query.dtype not in (torch.bfloat16, torch.float16):
            return f"no kernel multiplies {query.dtype} with pages of {pages.dtype}"
        if any(place % 2 for place in (pages.data_ptr(), *pages.stride()[:-1])):
            return "heads of 8-bit elements begin at odd addresses"
    elif query.dtype not in TAKEN or query.dtype != pages.dtype:
        return f"no kernel multiplies {query.dtype} with pages of {pages.dtype}"
    if any(width % VECTOR for width in widths):
        return f"a head of {max(widths)} elements is not a multiple of {VECTOR}"
    if group > MAX_GROUP:
        return f"{group} query heads share a key: at most {MAX_GROUP}"
    if query.stride(-1) != 1 or pages.stride(-1) != 1:
        return "the elements of a head are not contiguous"
    return ""


def pages_refusal(query: Tensor, pages: AttentionPages) -> str:
    """Return why no kernel supports these keys, values and query; "" if one does."""
    widths = (pages.k.shape[3], pages.v.shape[3])
    if max(widths) > MAX_WIDTH:
        return f"a head of {max(widths)} elements: at most {MAX_WIDTH}"
    if pages.v.dtype != pages.k.dtype or pages.v.stride(-1) != 1:
        return "values are not of the keys' type, or not contiguous"
    return refusal(query, pages.k, query.shape[1] // pages.k.shape[2], widths)


def latent_refusal(query: Tensor, pages: LatentPages, value_size: int) -> str:
    """Return why no kernel supports these latent rows and this query; "" if one does."""
    rest = pages.rows.shape[2] - value_size
    if value_size > MAX_LATENT or not 0 < rest <= MAX_WIDTH or value_size != power_of_two(value_size):
        return f"a latent of {value_size} + {rest} elements: a power of two up to {MAX_LATENT}, and up to {MAX_WIDTH}"
    return refusal(query, pages.rows, 1, (value_size, rest))


def paged(pages: Tensor, scale: Tensor | None) -> Paged:
    """Return the kernel argument for pages [blocks, block_size, heads, size], with pairs of 8-bit elements."""
    data = pages.view(torch.int16) if pages.dtype in EIGHT_BIT else pages
    per_head = scale is not None and scale.numel() > 1
    return Paged(data, (data.stride(0), data.stride(1), data.stride(2)), scale, int(per_head))


def rows(batch: Batch) -> Rows:
    """Return the kernel argument for a batch."""
    table = batch.block_table
    return Rows(table, table.stride(0), batch.seq_lens, batch.seq_lens.shape[0], batch.query_start, batch.tree)


@dataclass(frozen=True, slots=True)
class Call:
    """One attention call over pages of keys and values, or of latent rows.

    Attributes:
        query, keys, values, batch, rule: the arguments of the call.
        lse: float32 [queries, q_heads], written by the launches; None = not wanted.
        group: query heads per program.
        page: tokens of a page.
        width_k, width_v: elements of a key and of a value.
        dtype: element type of the pages.
        rest: for latent rows, whose first elements are also the value: number of elements that belong only to the key;
            otherwise 0.
    """

    query: Tensor
    keys: Paged
    values: Paged
    batch: Batch
    rule: AttentionRule
    lse: Tensor | None
    group: int
    page: int
    width_k: int
    width_v: int
    dtype: torch.dtype
    rest: int = 0

    @property
    def token_bytes(self) -> int:
        """The number of bytes of one token's keys and values for one group of heads."""
        elements = self.width_k + (self.rest or self.width_v)
        return elements * self.dtype.itemsize

    @property
    def is_fp8(self) -> bool:
        """Whether pages hold 8-bit elements."""
        return self.dtype in EIGHT_BIT

    def shape(self, tuning: Tuning, queries: int, chip: Chip) -> Shape:
        """Return the compile-time parameters of the kernel."""
        return Shape(
            page=self.page,
            width_k=self.width_k,
            width_v=self.width_v,
            group=self.group,
            queries=queries,
            rest=self.rest,
            paired=self.keys.strides == self.values.strides,
            window=self.rule.window,
            chunk=self.rule.chunk,
            soft_cap=self.rule.soft_cap,
            fp8=chip.fp8(self.dtype),
            upcast=chip.interpreted,
            tile=tuning.tile(self.token_bytes, chip),
            stages=tuning.stages,
            overlaps=chip.can_overlap,
        )


def tuning_of(call: Call, chip: Chip) -> tuple[Tuning, int]:
    """Return the launch parameters of a call, and the number of queries of a tile.

    They depend on the numbers of rows and queries, not on their lengths. Tiles are smaller where registers would
    otherwise spill.
    """
    if call.batch.query_start is None:
        return decode_tuning(call, chip), 1
    lanes = power_of_two(call.group, 1)
    packed = lanes * -(-call.query.shape[0] // max(1, call.batch.seq_lens.numel()))
    is_few = packed <= PREFILL_ROWS_FEW and chip.can_overlap and not call.rest
    tuning, rows = few_tuning(call) if is_few else prefill_tuning(call, chip)
    return tuning, max(2, rows // lanes)


def decode_tuning(call: Call, chip: Chip) -> Tuning:
    """Return the launch parameters of tiles of one query."""
    if chip.interpreted:
        return INTERPRETED
    if call.rest:
        return LATENT_FP8 if call.is_fp8 else LATENT
    is_narrow = call.width_k <= NARROW
    if call.is_fp8:
        return DECODE_FP8_NARROW if is_narrow else DECODE_FP8
    return DECODE_NARROW if is_narrow else DECODE


def few_tuning(call: Call) -> tuple[Tuning, int]:
    """Return the launch parameters of tiles of a few queries, and their queries x heads."""
    is_wide = call.dtype == torch.float32 or (call.is_fp8 and call.width_k > WIDE)
    return PREFILL_SHORT if is_wide else FEW, PREFILL_ROWS_FEW


def prefill_tuning(call: Call, chip: Chip) -> tuple[Tuning, int]:
    """Return the launch parameters of tiles of several queries, and their queries x heads."""
    most = PREFILL_ROWS if chip.has_tensor_memory or chip.interpreted else PREFILL_ROWS_SMALL
    if chip.interpreted:
        return INTERPRETED, LATENT_ROWS if call.rest else most
    if call.rest:
        return LATENT_SEVERAL, LATENT_ROWS
    if call.dtype == torch.float32:
        return PREFILL_SHORT, PREFILL_ROWS_SMALL
    if call.is_fp8 and call.width_k > WIDE:
        return PREFILL_SHORT, PREFILL_ROWS_FEW
    if call.is_fp8 and not chip.native_fp8:
        return PREFILL_SHORT, most
    if chip.has_tensor_memory:
        return PREFILL_SHORT, min(most, PREFILL_ROWS_SMALL) if call.width_k > WIDE else most
    if not chip.can_overlap:
        return PREFILL, most
    has_narrow_values = power_of_two(call.width_v) < power_of_two(call.width_k)
    return PREFILL_GROUP_SHORT if call.is_fp8 and has_narrow_values else PREFILL_GROUP, most


class Prepared:
    """The two launches of calls that differ in numbers of rows and queries, lengths and addresses alone: attention over
    spans of units, then the merge of what several spans share.
    """

    def __init__(self, call: Call, chip: Chip) -> None:
        tuning, queries = tuning_of(call, chip)
        shape = call.shape(tuning, queries, chip)
        self.keys, self.values, self.rule = call.keys, call.values, call.rule
        self._logits = Logits(call.rule.scale, call.rule.sinks, call.rule.slopes)
        self._q_heads, self._width = call.query.shape[1], call.width_v
        self._device = call.query.device
        # Triton's interpreter rounds to bfloat16 incorrectly.
        self._dtype = torch.float32 if chip.interpreted else call.query.dtype
        page_heads = self._q_heads // call.group
        workers = max(1, tuning.programs(call.token_bytes, chip) // page_heads)
        self._room = workers * (2 * page_heads * shape.rows * (shape.width_v + 2) + int(NUMBERS_PER_WORKER.value))
        merge = merge_shape(shape, chip)
        self._grids = (page_heads, workers, 1), (workers, page_heads, -(-queries * shape.lanes // merge.merged))
        self._spans = Fixed(attention_spans, {"S": shape}, tuning.warps)
        self._merge = Fixed(merge_parts, {"S": merge}, 4, overlaps=chip.can_overlap)

    def arguments(
        self, query: Tensor, batch: Rows, lse: Tensor | None
    ) -> tuple[Tensor, tuple[Any, ...], tuple[Any, ...]]:
        """Return memory for the result, and the arguments of both launches; `kernels.work` describes the second
        allocation.
        """
        heads, width, device = self._q_heads, self._width, self._device
        out = torch.empty((query.shape[0], heads, width), dtype=self._dtype, device=device)
        parts = torch.empty(self._room, dtype=torch.float32, device=device)
        results = Results(out, (heads * width, width), lse, heads)
        spans = (
            Heads(query, (query.stride(0), query.stride(1))),
            self.keys,
            self.values,
            *batch,
            self._logits,
            results,
            parts,
        )
        return out, spans, (self._logits, results, parts)

    def run(self, query: Tensor, batch: Rows, lse: Tensor | None) -> Tensor:
        """Compute attention. The caller guarantees that the kernels which the first call compiled suit this one."""
        out, spans, merge = self.arguments(query, batch, lse)
        if query.shape[0]:
            with current(self._device):
                self._spans(self._grids[0], *spans)
                self._merge(self._grids[1], *merge)
        return out if out.dtype is query.dtype else out.to(query.dtype)

    def launches(self, query: Tensor, batch: Rows, lse: Tensor | None) -> tuple[Launch, Launch]:
        """Return the launches as values, to compile or to inspect them."""
        _, spans, merge = self.arguments(query, batch, lse)
        return self._spans.launch(self._grids[0], spans), self._merge.launch(self._grids[1], merge)


def launches(call: Call, chip: Chip) -> tuple[Launch, Launch]:
    """Return the two launches of a call."""
    return Prepared(call, chip).launches(call.query, rows(call.batch), call.lse)


def kind_of(query: Tensor, batch: Batch) -> int:
    """Return what selects the sizes of tiles: 0 if each row has one query, else the queries per row on average, rounded
    up to a power of two; beyond the largest tile there is no difference.
    """
    if batch.query_start is None:
        return 0
    return min(PREFILL_ROWS, power_of_two(-(-query.shape[0] // max(1, batch.seq_lens.shape[0])), 1))


def merge_shape(shape: Shape, chip: Chip) -> MergeShape:
    """Return the compile-time parameters of the merge."""
    merged = min(MERGED_ROWS, shape.rows, max(1, MERGED_ELEMENTS // (MERGED_AT_ONCE * shape.padded_v)))
    return MergeShape(
        width_v=shape.width_v,
        padded_v=shape.padded_v,
        group=shape.group,
        queries=shape.queries,
        lanes=shape.lanes,
        rows=shape.rows,
        merged=merged,
        parts=MERGED_AT_ONCE_INTERPRETED if chip.interpreted else MERGED_AT_ONCE,
        few=MERGED_BY_ONE_INTERPRETED if chip.interpreted else MERGED_BY_ONE,
        overlaps=chip.can_overlap,
    )


def latent_group(q_heads: int) -> int:
    """Return the query heads per program for latent rows: the largest divisor up to 16, since latent rows are wide."""
    return next(group for group in range(min(16, q_heads), 0, -1) if q_heads % group == 0)


def keys_and_values(
    query: Tensor, pages: AttentionPages, batch: Batch, rule: AttentionRule, lse: Tensor | None = None
) -> Call:
    """Return the attention call for keys and values."""
    return Call(
        query=query,
        keys=paged(pages.k, pages.k_scale),
        values=paged(pages.v, pages.v_scale),
        batch=batch,
        rule=rule,
        lse=lse,
        group=query.shape[1] // pages.k.shape[2],
        page=pages.k.shape[1],
        width_k=pages.k.shape[3],
        width_v=pages.v.shape[3],
        dtype=pages.k.dtype,
    )


def latent(
    query: Tensor, pages: LatentPages, batch: Batch, scale: float, value_size: int, lse: Tensor | None = None
) -> Call:
    """Return the attention call for latent rows. A program computes a group of query heads; all groups read the same
    latent rows.
    """
    rows = paged(pages.rows.unsqueeze(2).expand(-1, -1, query.shape[1], -1), pages.scale)
    return Call(
        query=query,
        keys=rows,
        values=rows,
        batch=batch,
        rule=AttentionRule(scale),
        lse=lse,
        group=latent_group(query.shape[1]),
        page=pages.rows.shape[1],
        width_k=value_size,
        width_v=value_size,
        dtype=pages.rows.dtype,
        rest=pages.rows.shape[2] - value_size,
    )
