"""A fake of FlashInfer's wrappers, written from its documentation, in float64 on the host. The real ones need a GPU.

`test_flashinfer` checks the calls against the real signatures.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Faults:
    """Faults that a version of FlashInfer could have.

    Attributes:
        window: tokens by which the window is too long.
        scale: scale that replaces the given one; 0 = none.
        reads_past_the_end: the last page is read to its end.
    """

    window: int = 0
    scale: float = 0.0
    reads_past_the_end: bool = False


def attend(query: Tensor, k: Tensor, v: Tensor, window_left: int, scale: float) -> Tensor:
    """Causal attention of [queries, q_heads, size] at the end of [tokens, kv_heads, size]."""
    group = query.shape[1] // k.shape[1]
    k, v = (part.double().repeat_interleave(group, dim=1) for part in (k, v))
    logits = scale * torch.einsum("qhd,thd->hqt", query.double(), k)
    at = torch.arange(len(k) - len(query), len(k))[:, None]
    token = torch.arange(len(k))
    seen = (token <= at) & ((token >= at - window_left) | (window_left < 0))
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqt,thd->qhd", weights, v)


class Wrapper:
    """Base of the wrappers: rows of pages.

    Attributes:
        plans: number of calls of `plan`, over all wrappers.
    """

    plans = 0
    faults = Faults()

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", backend: str = "auto") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert (kv_layout, backend) == ("NHD", "fa2")

    def keep(self, starts: Tensor, indptr: Tensor, indices: Tensor, lengths: Tensor, page_size: int) -> None:
        type(self).plans += 1
        assert {part.dtype for part in (starts, indptr, indices, lengths)} == {torch.int32}
        assert len(indices) == indptr[-1]
        assert (indptr.diff() == -(-lengths // page_size)).all(), "the number of pages must fit the tokens"
        self.starts, self.indptr, self.indices = starts.tolist(), indptr.tolist(), indices
        self.lengths = lengths.tolist()
        if self.faults.reads_past_the_end:
            self.lengths = (indptr.diff() * page_size).tolist()

    def attended(self, query: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty((*query.shape[:2], v.shape[-1]), dtype=query.dtype)
        for row, length in enumerate(self.lengths):
            pages = self.indices[self.indptr[row] : self.indptr[row + 1]].long()
            here = slice(self.starts[row], self.starts[row + 1])
            keys, values = (part[pages].flatten(0, 1)[:length] for part in (k, v))
            window = self.window_left + self.faults.window if self.window_left >= 0 else -1
            out[here] = attend(query[here], keys, values, window, self.faults.scale or self.sm_scale).to(query.dtype)
        return out

    window_left, sm_scale = -1, 1.0


class PagedWrapper(Wrapper):
    """Wrappers for keys and values."""

    def keep_heads(self, starts, paged, heads, rule) -> None:
        indptr, indices, last_page_len = paged
        self.keep(starts, indptr, indices, (indptr.diff() - 1) * heads[3] + last_page_len, heads[3])
        self.shape = heads
        self.window_left, self.sm_scale, self.types = rule["window_left"], rule["sm_scale"], rule["q_data_type"]

    def run(self, query: Tensor, pages: tuple[Tensor, Tensor]) -> Tensor:
        k, v = pages
        assert self.shape == (query.shape[1], k.shape[2], k.shape[3], k.shape[1])
        assert query.dtype == k.dtype == self.types
        assert query.shape[0] == self.starts[-1]
        return self.attended(query, k, v)


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    def __init__(self, workspace: Tensor, kv_layout: str, use_tensor_cores: bool, backend: str) -> None:
        super().__init__(workspace, kv_layout, backend)
        assert use_tensor_cores, "without tensor cores few numbers of heads are supported"

    def plan(self, indptr, indices, last_page_len, *heads, **rule) -> None:
        self.keep_heads(torch.arange(len(indptr), dtype=torch.int32), (indptr, indices, last_page_len), heads, rule)


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    def plan(self, starts, indptr, indices, last_page_len, *heads, causal=False, **rule) -> None:
        assert causal
        self.keep_heads(starts, (indptr, indices, last_page_len), heads, rule)


class BatchMLAPagedAttentionWrapper(Wrapper):
    def __init__(self, workspace: Tensor, backend: str) -> None:
        super().__init__(workspace, backend=backend)

    def plan(self, *, metadata, num_heads, page_size, causal, sm_scale, **rest) -> None:
        assert not causal
        starts, indptr, indices, lengths = metadata
        self.keep(starts, indptr, indices, lengths, page_size)
        self.sm_scale, self.shape = sm_scale, (num_heads, rest["head_dim_ckv"], rest["head_dim_kpe"], page_size)

    def run(self, *, query: tuple[Tensor, Tensor], kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        values, keys = kv_cache[0], torch.cat(kv_cache, dim=-1)
        assert self.shape == (query[0].shape[1], values.shape[2], kv_cache[1].shape[2], values.shape[1])
        return self.attended(torch.cat(query, dim=-1), keys[:, :, None], values[:, :, None])


def library(faults: Faults | None = None) -> SimpleNamespace:
    """A fake of the package; each instance counts its own plans."""
    kinds = BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper, BatchMLAPagedAttentionWrapper
    made = {kind.__name__: type(kind.__name__, (kind,), {"faults": faults or Faults(), "plans": 0}) for kind in kinds}
    metadata = SimpleNamespace(csr=lambda *columns: columns)
    latent = made.pop("BatchMLAPagedAttentionWrapper")
    mla = SimpleNamespace(BatchMLAPagedAttentionWrapper=latent, MLAPlanMetadata=metadata)
    return SimpleNamespace(mla=mla, **made)
