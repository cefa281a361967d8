"""The cuDNN backend: rows with many queries by cuDNN, from gathered keys and values, the rest by another backend."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvplane_kernels import checks
from kvplane_kernels.cudnn_ops.calls import Plan, Shape
from kvplane_kernels.cudnn_ops.kept import PerBatch
from kvplane_kernels.cudnn_ops.rows import Limits, LongRow, Split, split
from kvplane_kernels.interface import (
    AttentionPages,
    AttentionRule,
    Batch,
    GroupPages,
    LayerAttention,
    LayerUse,
    PagedOps,
    WarmUp,
)
from kvplane_kernels.triton_ops.remembered import ByForm, form_of, form_of_rule, form_of_sums

TYPES = (torch.bfloat16, torch.float16)
VECTOR, MAX_SIZE = 8, 256
ALIGNMENT_BYTES = 16
MAX_SPLITS = 32


class CudnnOps:
    """Compute prefill attention of long rows with cuDNN, and everything else with another backend.

    The workspace is shared by all calls, which therefore run on one stream, as the steps of an engine do.

    Attributes:
        other: the backend for everything else.
        fallbacks: maps an operation to the reason why it was last passed to the other backend whole, as in `TritonOps`.
        rows: number of rows that cuDNN computed.
    """

    name = "cudnn"

    def __init__(self, other: PagedOps, library: Any, limits: Limits = Limits()) -> None:  # noqa: ANN401, B008 - frozen
        self.other, self.fallbacks, self.rows = other, dict[str, str](), 0
        self._library, self._limits = library, limits
        self._prepared: ByForm[Prepared] = ByForm()
        self._splits: PerBatch[Split] = PerBatch(MAX_SPLITS)
        self._plans: dict[tuple[torch.device, Shape], Plan] = {}
        self._handles: dict[torch.device, Any] = {}
        self._rooms: dict[torch.device, Tensor] = {}
        self._warmed = 0
        self.decode_attention, self.mla_decode = other.decode_attention, other.mla_decode
        self.write_kv, self.write_latent = other.write_kv, other.write_latent
        self.state_step, self.convolve, self.selective_scan = other.state_step, other.convolve, other.selective_scan
        self.gated_delta_rule = other.gated_delta_rule
        self.copy_pages, self.zero_pages = other.copy_pages, other.zero_pages
        self.gather, self.scatter, self.checksum = other.gather, other.scatter, other.checksum

    def warm_up(
        self, groups: Sequence[GroupPages], operations: Collection[str], layers: Sequence[LayerUse] = ()
    ) -> WarmUp:
        """Compile the other backend's kernels, build the plans of these layers, and allocate the workspace."""
        done = self.other.warm_up(groups, operations, layers)
        begun, before = time.process_time(), len(self._plans)
        for layer in layers:
            if not isinstance(layer, LayerAttention) or refusal(layer.dtype, layer.pages, layer.rule):
                continue
            prepared = Prepared(self, layer.q_heads, layer.pages, layer.rule)
            prepared.plan(is_causal=True)
            blocks, block_size = layer.pages.k.shape[:2]
            if not layer.rule.window and blocks * block_size > prepared.shape.tokens:
                prepared.plan(is_causal=False)  # of the earlier spans of a row
        built = len(self._plans) - before
        self._warmed += built
        kernels = (*done.kernels, *("cudnn_attention",) * built)
        return WarmUp(kernels, done.cpu_s + time.process_time() - begun)

    @property
    def late_compiles(self) -> int:
        """The number of plans and kernels that were built for a call, and not in a warm-up."""
        return len(self._plans) - self._warmed + int(getattr(self.other, "late_compiles", 0))

    @property
    def explained(self) -> tuple[str, ...]:
        """The lines that explain what cuDNN computed, and the other backend's lines."""
        planned = f"{self._warmed} plans built before serving, {len(self._plans) - self._warmed} since"
        left = (f"{operation} by {self.other.name}: {why}" for operation, why in self.fallbacks.items())
        theirs: tuple[str, ...] = getattr(self.other, "explained", ())
        return (
            f"{self.rows} rows of prefill attention by cudnn; everything else by {self.other.name}",
            planned,
            *left,
            *(f"{self.other.name}: {line}" for line in theirs),
        )

    def prefill_attention(
        self, query: Tensor, pages: AttentionPages, batch: Batch, rule: AttentionRule, lse: Tensor | None = None
    ) -> Tensor:
        """Compute attention for any number of queries per row; see `AttentionOps.prefill_attention`."""
        divided, prepared = self._divided(query, pages, batch, rule, lse)
        if prepared is None or not divided.long:
            return self.other.prefill_attention(query, pages, batch, rule, lse)
        query = aligned(query)
        out = torch.empty_like(query)
        if divided.rest is not None:
            assert divided.index is not None
            index = divided.index
            few = None if lse is None else lse.new_empty((len(index), lse.shape[1]))
            found = self.other.prefill_attention(query.index_select(0, index), pages, divided.rest, rule, few)
            out.index_copy_(0, index, found)
            if lse is not None and few is not None:
                lse.index_copy_(0, index, few)
        for row in reversed(divided.long):  # so that results after the end of a row would be noticed
            sums = prepared.attend(query[row.queries], out[row.queries], pages, row)
            if lse is not None:
                lse[row.queries] = sums
        self.rows += len(divided.long)
        return out

    def _divided(
        self, query: Tensor, pages: AttentionPages, batch: Batch, rule: AttentionRule, lse: Tensor | None
    ) -> tuple[Split, Prepared | None]:
        """Return how a batch is divided, and what was prepared for its long rows; None if there are none."""
        if batch.query_start is None:
            return Split(()), None
        form = form_of_rule(rule), form_of(query), form_of_sums(lse, query)
        prepared = self._prepared.get(pages, form)
        if prepared is None:
            checks.check_attention(query, pages, batch, rule)
            checks.check_lse(lse, query)
            if why := refusal(query.dtype, pages, rule):
                self.fallbacks["prefill_attention"] = why
                return Split(()), None
            prepared = Prepared(self, query.shape[1], pages, rule)
            self._prepared.keep(pages, form, prepared)

        def make() -> Split:
            checks.check_batch(batch, query.shape[0], pages.k)
            return split(batch, prepared.shape, pages.k.shape[1], self._limits)

        if batch.tree is not None:
            self.fallbacks["prefill_attention"] = "trees are not supported"
            return Split(()), None
        return self._splits.of(batch, (prepared.shape, pages.k.shape[1], query.shape[0]), make), prepared

    def room(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the workspace for blocks of keys and of values, [blocks, block_size, kv_heads, size] each."""
        block, device = keys.shape[1:], keys.device
        if device not in self._rooms:
            # Zero, so that it holds no NaN before it is written.
            self._rooms[device] = torch.zeros(self._limits.room_bytes, dtype=torch.uint8, device=device)
        half = self._limits.room_bytes // (2 * block.numel() * keys.element_size()) * block.numel()
        room = self._rooms[device].view(keys.dtype)
        return room[:half].view(-1, *block), room[half : 2 * half].view(-1, *block)

    def plan(self, shape: Shape, device: torch.device) -> Plan:
        """Return the plan for a shape, which is built if there is none."""
        if (device, shape) not in self._plans:
            if device not in self._handles:
                self._handles[device] = self._library.create_handle()
            self._plans[device, shape] = Plan(self._library, self._handles[device], shape, device)
        return self._plans[device, shape]

    @property
    def most_queries(self) -> int:
        """The most queries of a row."""
        return self._limits.queries


class Prepared:
    """What the calls of layers with equal pages and rules share: plans, and the workspace.

    Attributes:
        shape: what the causal plan is built for.
    """

    def __init__(self, ops: CudnnOps, q_heads: int, pages: AttentionPages, rule: AttentionRule) -> None:
        _, block_size, kv_heads, size = pages.k.shape
        self._k, self._v = ops.room(pages.k)
        tokens, self._device = self._k.shape[0] * block_size, pages.k.device
        self.shape = Shape(
            q_heads, kv_heads, size, pages.k.dtype, rule.scale, rule.window, True, ops.most_queries, tokens
        )
        self._build = partial(ops.plan, device=self._device)
        self._plans: dict[bool, Plan] = {}

    def plan(self, is_causal: bool) -> Plan:
        """Return the plan of a row's last span, or of the earlier ones."""
        if is_causal not in self._plans:
            self._plans[is_causal] = self._build(self.shape if is_causal else self.shape.before)
        return self._plans[is_causal]

    def attend(self, query: Tensor, out: Tensor, pages: AttentionPages, row: LongRow) -> Tensor:
        """Compute attention of one row's queries, span by span, into `out`; return their log-sum-exps."""
        sums = query.new_empty(query.shape[:2], dtype=torch.float32)
        for number, span in enumerate(row.spans):
            for part, room in ((pages.k, self._k), (pages.v, self._v)):
                torch.index_select(part, 0, span.blocks, out=room[: span.blocks.shape[0]])
            plan = self.plan(is_causal=number == 0)
            if number == 0:
                plan.run(query, self._k, self._v, out, sums, span.numbers)
            else:
                more, more_sums = torch.empty_like(out), torch.empty_like(sums)
                plan.run(query, self._k, self._v, more, more_sums, span.numbers)
                fold(out, sums, more, more_sums)
        return sums


def refusal(dtype: torch.dtype, pages: AttentionPages, rule: AttentionRule) -> str:
    """Return why cuDNN does not compute attention of these queries, pages and rule; "" if it does."""
    if pages.k.dtype not in TYPES or dtype != pages.k.dtype:
        return f"pages of {checks.name_of(pages.k.dtype)}, supported are bfloat16 and float16"
    extras = {"sinks": rule.sinks is not None, "chunks": rule.chunk, "soft caps": rule.soft_cap}
    for what, is_there in (extras | {"slopes": rule.slopes is not None}).items():
        if is_there:
            return f"{what} are not supported"
    sizes = pages.k.shape[3], pages.v.shape[3]
    if sizes[0] != sizes[1] or sizes[0] % VECTOR or sizes[0] > MAX_SIZE:
        return f"heads of {sizes[0]} and {sizes[1]} elements, supported are equal multiples of {VECTOR} to {MAX_SIZE}"
    return ""


def aligned(query: Tensor) -> Tensor:
    """Return the queries, contiguous and at an address that is a multiple of 16 bytes: copied if they are not."""
    query = query.contiguous()
    return query.clone() if query.data_ptr() % ALIGNMENT_BYTES else query


def fold(out: Tensor, sums: Tensor, more: Tensor, more_sums: Tensor) -> None:
    """Merge results over more tokens [queries, heads, size], and their log-sum-exps, into results over others."""
    both = torch.logaddexp(sums, more_sums)
    out.lerp_(more, (more_sums - both).exp_().to(out.dtype)[..., None])
    sums.copy_(both)
