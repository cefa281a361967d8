"""The calls of FlashInfer: its wrappers are made, planned and run here and nowhere else.

As of flashinfer-python 0.7.2.post1: `BatchDecodeWithPagedKVCacheWrapper`, `BatchPrefillWithPagedKVCacheWrapper` and
`mla.BatchMLAPagedAttentionWrapper`. All go to its "fa2" kernels, which every chip from sm_80 on has; on tensor cores
these decode any number of query heads per key. `window_left` counts the tokens before the query, ours the query too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvplane_worker.ops.flashinfer_ops.indices import PagedRows

KERNELS, LAYOUT = "fa2", "NHD"

# Query and pages (keys and values, or latents) to the result.
Planned = Callable[[Tensor, Any], Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a plan depends on beside the rows.

    Attributes:
        size: of a head; of the values of a latent. rest: of a latent beyond its values.
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
    """One query per row."""
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        workspace, kv_layout=LAYOUT, use_tensor_cores=True, backend=KERNELS
    )
    wrapper.plan(rows.indptr, rows.indices, rows.last_page_len, *heads(shape), **rule(shape))
    return lambda query, pages: wrapper.run(query, pages)


def prefill(library: Any, workspace: Tensor, rows: PagedRows, shape: Shape) -> Planned:  # noqa: ANN401
    """Ragged queries, each attending to the tokens up to its own."""
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout=LAYOUT, backend=KERNELS)
    columns = rows.query_start, rows.indptr, rows.indices, rows.last_page_len
    wrapper.plan(*columns, *heads(shape), causal=True, **rule(shape))
    return lambda query, pages: wrapper.run(query, pages)


def heads(shape: Shape) -> tuple[int, int, int, int]:
    """Query heads, key-value heads, elements of a head, tokens of a page: as both wrappers take them."""
    return shape.q_heads, shape.kv_heads, shape.size, shape.block_size


def rule(shape: Shape) -> dict[str, Any]:
    """Window, scale and types: as both wrappers take them."""
    types = {"q_data_type": shape.dtype, "kv_data_type": shape.dtype}
    return {"window_left": shape.window - 1, "sm_scale": shape.scale, **types}


def latent(library: Any, workspace: Tensor, rows: PagedRows, shape: Shape) -> Planned:  # noqa: ANN401
    """One query per row on latents."""
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
        """Both in the two parts of a latent."""
        out: Tensor = wrapper.run(query=parts(query, shape.size), kv_cache=parts(pages, shape.size))
        return out

    return run


def parts(tensor: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The elements that are values too, and the rest."""
    return tensor[..., :size], tensor[..., size:]
