"""The FlashInfer backend: supported attention by FlashInfer's kernels, everything else by another backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvplane_worker.ops import checks
from kvplane_worker.ops.flashinfer_ops import calls
from kvplane_worker.ops.flashinfer_ops.calls import Planned, Shape
from kvplane_worker.ops.flashinfer_ops.indices import PagedRows, paged_rows
from kvplane_worker.ops.flashinfer_ops.plans import PerBatch
from kvplane_worker.ops.interface import AttentionPages, AttentionRule, Batch, LatentPages, PagedOps

TYPES = (torch.bfloat16, torch.float16)
SIZES = (64, 128, 256)
LATENT_SIZE, LATENT_REST = 512, 64
ALIGNMENT_BYTES = 16
# Shared by all plans. This is safe because their kernels run on one stream, one after the other.
WORKSPACE_BYTES = 128 << 20
# A plan uses 8 MiB on the device and 8 MiB of pinned memory.
MAX_PLANS, MAX_ROWS = 16, 32

Planner = Callable[[Any, Tensor, PagedRows, Shape], Planned]


class FlashInferOps:
    """Compute attention with FlashInfer, and everything else with another backend.

    Block tables and lengths are copied to the host once per batch and step. The copy waits for the device, so steps
    cannot be captured in a CUDA graph.

    Attributes:
        other: the backend for everything that FlashInfer does not support.
        fallbacks: maps an attention operation to the reason why it was last passed to the other backend; returned by
            `Worker.Describe`.
    """

    name = "flashinfer"

    def __init__(self, other: PagedOps, library: Any) -> None:  # noqa: ANN401
        self.other = other
        self.fallbacks: dict[str, str] = {}
        self._library = library
        self._rows: PerBatch[PagedRows | str] = PerBatch(MAX_ROWS)
        self._plans: PerBatch[Planned] = PerBatch(MAX_PLANS, synchronize)
        self._workspaces: dict[torch.device, Tensor] = {}
        self.write_kv, self.write_latent = other.write_kv, other.write_latent
        self.state_step, self.convolve, self.selective_scan = other.state_step, other.convolve, other.selective_scan
        self.gated_delta_rule = other.gated_delta_rule
        self.copy_pages, self.zero_pages = other.copy_pages, other.zero_pages
        self.gather, self.scatter, self.checksum = other.gather, other.scatter, other.checksum
        self.warm_up = other.warm_up

    @property
    def explained(self) -> tuple[str, ...]:
        """The lines that explain which operations the other backend computes and why, one line for each attention
        operation that was passed to it.
        """
        left = (f"{operation} by {self.other.name}: {why}" for operation, why in self.fallbacks.items())
        theirs: tuple[str, ...] = getattr(self.other, "explained", ())
        return (
            f"everything but attention by {self.other.name}",
            *left,
            *(f"{self.other.name}: {line}" for line in theirs),
        )

    def decode_attention(
        self, query: Tensor, pages: AttentionPages, batch: Batch, rule: AttentionRule, lse: Tensor | None = None
    ) -> Tensor:
        """Compute attention of one query per row; see `AttentionOps.decode_attention`."""
        checks.check_one_query_per_row(batch)
        return self.prefill_attention(query, pages, batch, rule, lse)

    def prefill_attention(
        self, query: Tensor, pages: AttentionPages, batch: Batch, rule: AttentionRule, lse: Tensor | None = None
    ) -> Tensor:
        """Compute attention of several queries per row; see `AttentionOps.prefill_attention`."""
        checks.check_attention(query, pages, batch, rule)
        checks.check_lse(lse, query)
        operation, plan = ("decode_attention", calls.decode)
        if batch.query_start is not None:
            operation, plan = ("prefill_attention", calls.prefill)
        shape = shape_of(query, pages.k, rule)
        rows = self._taken(operation, asked_too_much(batch, lse) or refusal(query, pages, rule), batch, shape)
        if rows is None:
            return self.other.prefill_attention(query, pages, batch, rule, lse)
        return self._planned(plan, rows, batch, shape, query)(query, (pages.k, pages.v))

    def mla_decode(
        self, query: Tensor, pages: LatentPages, batch: Batch, scale: float, value_size: int, lse: Tensor | None = None
    ) -> Tensor:
        """Compute attention over latent rows; see `AttentionOps.mla_decode`."""
        checks.check_mla(query, pages, batch, value_size)
        checks.check_lse(lse, query)
        rest = pages.rows.shape[2] - value_size
        shape = Shape(query.shape[1], 1, value_size, pages.rows.shape[1], scale, query.dtype, rest=rest)
        several = "" if batch.query_start is None else "several queries per row"
        why_not = several or asked_too_much(batch, lse) or latent_refusal(query, pages.rows, value_size)
        rows = self._taken("mla_decode", why_not, batch, shape)
        if rows is None:
            return self.other.mla_decode(query, pages, batch, scale, value_size, lse)
        return self._planned(calls.latent, rows, batch, shape, query)(query, pages.rows)

    def _taken(self, operation: str, why_not: str, batch: Batch, shape: Shape) -> PagedRows | None:
        """Return the batch in FlashInfer's form, or None if the other backend must compute it; `fallbacks` then has the
        reason.
        """
        if not why_not:
            block_size, window = shape.block_size, shape.window
            rows = self._rows.of(batch, (block_size, window), partial(paged_rows, batch, block_size, window))
            if isinstance(rows, PagedRows):
                return rows
            why_not = rows
        self.fallbacks[operation] = why_not
        return None

    def _planned(self, plan: Planner, rows: PagedRows, batch: Batch, shape: Shape, query: Tensor) -> Planned:
        """Return a function that runs FlashInfer's plan for the batch and sets the results of empty rows to 0. All
        layers of a step share the plan.
        """

        def make() -> Planned:
            run, empty = plan(self._library, self._workspace(query), rows, shape), rows.empty.to(query.device)
            return partial(run_and_clear, run, empty) if len(empty) else run

        return self._plans.of(batch, (plan, shape), make)

    def _workspace(self, like: Tensor) -> Tensor:
        if like.device not in self._workspaces:
            self._workspaces[like.device] = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=like.device)
        return self._workspaces[like.device]


def run_and_clear(run: Planned, empty: Tensor, query: Tensor, pages: Any) -> Tensor:  # noqa: ANN401
    """Run a FlashInfer plan, and set the results of the queries with the indices `empty` to 0."""
    return run(query, pages).index_fill_(0, empty, 0)


def synchronize() -> None:
    """Wait for the device: a plan copies from its pinned memory, which must not be freed before the copy ends."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def shape_of(query: Tensor, keys: Tensor, rule: AttentionRule) -> Shape:
    """Return the parameters of a FlashInfer plan for separate keys and values."""
    _, block_size, kv_heads, size = keys.shape
    return Shape(query.shape[1], kv_heads, size, block_size, rule.scale, query.dtype, rule.window)


def asked_too_much(batch: Batch, lse: Tensor | None) -> str:
    """Return why FlashInfer does not compute what is asked of it; "" if it does."""
    if lse is not None:
        return "log-sum-exps are not supported"
    return "" if batch.tree is None else "trees are not supported"


def refusal(query: Tensor, pages: AttentionPages, rule: AttentionRule) -> str:
    """Return why FlashInfer does not support these pages and this query; "" if it does."""
    if pages.k.dtype not in TYPES:
        return f"pages of {checks.name_of(pages.k.dtype)}, supported are bfloat16 and float16"
    extras = {"sinks": rule.sinks is not None, "chunks": rule.chunk, "soft caps": rule.soft_cap}
    for what, is_there in (extras | {"slopes": rule.slopes is not None}).items():
        if is_there:
            return f"{what} are not supported"
    if pages.k.shape[3] not in SIZES or pages.v.shape[3] != pages.k.shape[3]:
        return (
            f"heads of {pages.k.shape[3]} and {pages.v.shape[3]} elements, supported are {', '.join(map(str, SIZES))}"
        )
    if pages.k.stride() != pages.v.stride():
        return "keys and values have different strides"
    return misaligned(query, pages.k, pages.v)


def latent_refusal(query: Tensor, pages: Tensor, value_size: int) -> str:
    """Return why FlashInfer does not support these latent rows and this query; "" if it does."""
    if pages.dtype not in TYPES:
        return f"latent rows of {checks.name_of(pages.dtype)}, supported are bfloat16 and float16"
    rest = pages.shape[2] - value_size
    if (value_size, rest) != (LATENT_SIZE, LATENT_REST):
        return f"latent rows of {value_size} + {rest} elements, supported are {LATENT_SIZE} + {LATENT_REST}"
    return misaligned(query, pages)


def misaligned(*tensors: Tensor) -> str:
    """Return why the kernels' 16-byte accesses do not work on one of the tensors; "" if they work on all of them."""
    for tensor in tensors:
        steps = (stride * tensor.element_size() for stride in tensor.stride()[:-1])
        if tensor.stride(-1) != 1 or any(place % ALIGNMENT_BYTES for place in (tensor.data_ptr(), *steps)):
            return f"heads are not contiguous, or not aligned to {ALIGNMENT_BYTES} bytes"
    return ""
