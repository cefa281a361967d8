"""The calls of FlashInfer: the only module that creates, plans and runs its wrappers.

The module is written for flashinfer-python 0.7.2.post1: `BatchDecodeWithPagedKVCacheWrapper`,
`BatchPrefillWithPagedKVCacheWrapper` and `mla.BatchMLAPagedAttentionWrapper`, all with the "fa2" kernels, which support
every chip from sm_80 on; with tensor cores they decode any number of query heads per key. FlashInfer's `window_left`
counts the tokens before the query; the `window` of kvplane includes the query.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvplane_worker.ops.flashinfer_ops.indices import PagedRows

KERNELS, LAYOUT = "fa2", "NHD"

# (query, pages: keys and values or latent rows) -> result.
Planned = Callable[[Tensor, Any], Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """The parameters of a FlashInfer plan, in addition to the rows of the batch.

    Attributes:
        q_heads: number of query heads.
        kv_heads: number of key-value heads.
        size: elements of a head; for latent rows, the elements of a row that are also its value.
        block_size: tokens per page.
        scale: factor of the attention scores.
        dtype: element type of queries and pages.
        window: attended tokens, including the query's own; 0 = all.
        rest: elements of a latent row that are not values; 0 for keys and values.
    """

    q_heads: int
    kv_heads: int
    size: int
    block_size: int
    scale: float
    dtype: torch.dtype
    window: int = 0
    rest: int = 0


def decode(library: Any, workspace: Tensor, rows: PagedRows, shape: Shape) -> Planned:  # noqa: ANN401
    """Plan a decode (one query per row) and return a function that runs it."""
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        workspace, kv_layout=LAYOUT, use_tensor_cores=True, backend=KERNELS
    )
    wrapper.plan(rows.indptr, rows.indices, rows.last_page_len, *heads(shape), **rule(shape))
    return lambda query, pages: wrapper.run(query, pages)


def prefill(library: Any, workspace: Tensor, rows: PagedRows, shape: Shape) -> Planned:  # noqa: ANN401
    """Plan a causal prefill with different numbers of queries per row, and return a function that runs it."""
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout=LAYOUT, backend=KERNELS)
    columns = rows.query_start, rows.indptr, rows.indices, rows.last_page_len
    wrapper.plan(*columns, *heads(shape), causal=True, **rule(shape))
    return lambda query, pages: wrapper.run(query, pages)


def heads(shape: Shape) -> tuple[int, int, int, int]:
    """Return the positional arguments that FlashInfer's decode and prefill wrappers share: query heads, kv heads,
    elements of a head, tokens of a page.
    """
    return shape.q_heads, shape.kv_heads, shape.size, shape.block_size


def rule(shape: Shape) -> dict[str, Any]:
    """Return the keyword arguments that FlashInfer's decode and prefill wrappers share: window, scale and types."""
    types = {"q_data_type": shape.dtype, "kv_data_type": shape.dtype}
    return {"window_left": shape.window - 1, "sm_scale": shape.scale, **types}


def latent(library: Any, workspace: Tensor, rows: PagedRows, shape: Shape) -> Planned:  # noqa: ANN401
    """Plan a decode over latent rows and return a function that runs it."""
    wrapper = library.mla.BatchMLAPagedAttentionWrapper(workspace, backend=KERNELS)
    wrapper.plan(
        metadata=library.mla.MLAPlanMetadata.csr(rows.query_start, rows.indptr, rows.indices, rows.lengths),
        num_heads=shape.q_heads,
        head_dim_ckv=shape.size,
        head_dim_kpe=shape.rest,
        page_size=shape.block_size,
        causal=False,
        sm_scale=shape.scale,
        q_data_type=shape.dtype,
        kv_data_type=shape.dtype,
        query_layout="split",
        kv_cache_layout="split",
    )

    def run(query: Tensor, pages: Tensor) -> Tensor:
        """Run the plan. Query and pages are split into the two parts of a latent row."""
        out: Tensor = wrapper.run(query=parts(query, shape.size), kv_cache=parts(pages, shape.size))
        return out

    return run


def parts(tensor: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Split latent rows into the elements that are also values, and the other elements."""
    return tensor[..., :size], tensor[..., size:]
