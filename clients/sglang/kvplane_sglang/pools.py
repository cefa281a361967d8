"""The memory of SGLang that is one page: rows of tensors, one tensor per layer and part.

A page of attention is `rows` consecutive entries of the indices that SGLang names, a page of states one. No page needs
to be in one piece: rows are read and written by index, also where a tensor is a view with strides of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvplane.base.errors import InvalidArgument
from kvplane_sglang.settings import LEAVE_OUT

KV, SWA, MAMBA = "kv", "swa", "mamba"  # names of SGLang's pools


@dataclass(frozen=True)  # without slots: what is derived from the tensors is kept
class PagePool:
    """The pages of one pool.

    Attributes:
        name: of SGLang's pool.
        tensors: [entries, ...] of each layer and part.
        rows: entries of a page.
    """

    name: str
    tensors: tuple[Tensor, ...]
    rows: int

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """The bytes of a page in each tensor."""
        return tuple(one[0].numel() * one.element_size() * self.rows for one in self.tensors)

    @cached_property
    def page_bytes(self) -> int:
        """The bytes of a page."""
        return sum(self.widths)

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self.tensors[0].device

    @property
    def total_bytes(self) -> int:
        """The bytes of all pages."""
        return min(len(one) for one in self.tensors) // self.rows * self.page_bytes

    @property
    def layout(self) -> tuple[object, ...]:
        """What decides which byte of a page means what."""
        return self.name, self.rows, [(str(one.dtype), tuple(one.shape[1:])) for one in self.tensors]

    def holds(self, indices: Tensor, num_pages: int) -> bool:
        """Whether indices in host memory are those of this number of pages of the pool."""
        most = min(len(one) for one in self.tensors)
        is_whole = indices.dim() == 1 and len(indices) == num_pages * self.rows
        return is_whole and (not len(indices) or (int(indices.min()) >= 0 and int(indices.max()) < most))

    def gather(self, indices: Tensor, target: Tensor) -> None:
        """Copy pages into rows of host memory, uint8 [pages, page_bytes]. Waits for the device."""
        at, indices = 0, indices.to(self.device)
        for tensor, width in zip(self.tensors, self.widths, strict=True):
            part = tensor.index_select(0, indices).view(torch.uint8).reshape(len(target), width)
            target[:, at : at + width].copy_(part)
            at += width

    def scatter(self, indices: Tensor, source: Tensor) -> None:
        """Copy rows of host memory into pages, the reverse of `gather`."""
        at, indices = 0, indices.to(self.device)
        for tensor, width in zip(self.tensors, self.widths, strict=True):
            part = torch.empty((len(source), width), dtype=torch.uint8, device=self.device)
            part.copy_(source[:, at : at + width])
            tensor.index_copy_(0, indices, part.view(-1).view(tensor.dtype).view(len(indices), *tensor.shape[1:]))
            at += width


def pools_of(params: Any, components: Sequence[str]) -> list[PagePool]:
    """Return the pools of an engine, of its tree's components. Raises InvalidArgument for memory of a kind that the
    linker does not know. Exact types: what a subclass adds to a page would be missing in a slot.
    """
    memory = params.token_to_kv_pool_allocator.get_kvcache()
    kind, names = type(memory).__name__, sorted(components)
    inner = {"SWAKVPool": "full_kv_pool", "HybridLinearKVPool": "full_kv_pool"}.get(kind)
    full = memory if inner is None else getattr(memory, inner)
    found = [PagePool(KV, _attention(full), params.page_size)]
    if kind == "SWAKVPool":
        if not params.swa_gates_prefix_match or params.decoder_swa_bounded_replay or params.draft_swa_window:
            raise _unknown("windows that are replayed, or that a draft reads")
        found.append(PagePool(SWA, _attention(memory.swa_kv_pool), params.page_size))
    if MAMBA in components:
        found.append(PagePool(MAMBA, _states(params.req_to_token_pool), 1))
    if sorted(one.name for one in found) != names:
        raise _unknown(f"a tree of {', '.join(names)} on a {kind}")
    if params.mtp_draft_device_pools or params.sidecar_draft_device_pools or params.is_eagle:
        raise _unknown("the pages of a draft model")
    return found


def _attention(pool: Any) -> tuple[Tensor, ...]:
    if type(pool).__name__ != "MHATokenToKVPool" or pool.kv_cache_layout != "nhd":
        raise _unknown(f"{type(pool).__name__} in the layout {getattr(pool, 'kv_cache_layout', 'of its own')}")
    if pool.k_scale_buffer is not None or pool.native_k_scale_buffer is not None or pool.dq_k_buffer is not None:
        raise _unknown("scales next to the keys and values")
    return (*pool.k_buffer, *pool.v_buffer)


def _states(pool: Any) -> tuple[Tensor, ...]:
    if type(pool).__name__ != "HybridReqToTokenPool" or type(pool.mamba_pool).__name__ != "MambaPool":
        raise _unknown(f"states in a {type(pool).__name__}")
    cache = pool.mamba_pool.mamba_cache
    if pool.mamba_ckpt_pool is not None or pool.short_conv_pool.enabled or pool.ngram_pool.enabled:
        raise _unknown("states with checkpoints in 8 bits, or with others next to them")
    if cache.replayssm_d is not None:
        raise _unknown("states with a ring of inputs that are replayed")
    parts = [one for one in (cache.temporal, *cache.conv) if one.numel()]
    return tuple(part[layer] for part in parts for layer in range(part.shape[0]))


def _unknown(what: str) -> InvalidArgument:
    return InvalidArgument(
        f"kvplane's tiers hold no pages of this kind: {what}", field="token_to_kv_pool_allocator", remedy=LEAVE_OUT
    )
