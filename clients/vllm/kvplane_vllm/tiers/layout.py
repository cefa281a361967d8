"""The pages of vLLM as bytes by block, by the strides of its allocation, and the pages in host memory.

vLLM places all layers in one allocation: the page of block b of the l-th layer of a tensor begins at offset + l *
layer_stride + b * block_stride bytes. A row of host memory has the pages of all layers of one block of a group. Each
view that vLLM registers must be where its config says, with all of its elements within the page of their block: else
rows would lack a part of a block, or have a part of another. A layer with recurrent states has several views, whose
parts of a page follow each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvplane.base.errors import InvalidArgument
from kvplane.base.layer_spec import DType
from kvplane.base.layers import FullAttentionSpec
from kvplane.base.rank_plan import GroupLayers, RankPlan, TensorPlacement
from kvplane_kernels.interface import GroupPages

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

Views = Mapping[str, Tensor | Sequence[Tensor]]  # by layer, as vLLM registers them
ALIGNMENT_BYTES = 8


class WrongLayout(InvalidArgument):
    """The pages of vLLM are not where its config says."""


def page_bytes(config: KVCacheConfig, group: int, layer: str) -> int:
    """Return the bytes of a page of a layer."""
    spec = config.kv_cache_groups[group].kv_cache_spec
    found: int = getattr(spec, "kv_cache_specs", {layer: spec})[layer].page_size_bytes
    return found


def row_bytes(config: KVCacheConfig) -> list[int]:
    """Return the bytes of a block of each group, over all of its layers."""
    groups = enumerate(config.kv_cache_groups)
    return [sum(page_bytes(config, number, layer) for layer in group.layer_names) for number, group in groups]


def host_plan(rows: Sequence[int], num_blocks: int) -> RankPlan:
    """Return the layout of the pages in host memory: a block of any group takes as much as the widest."""
    width = -(-max(rows) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    names = [f"group {number}" for number in range(len(rows))]
    specs = [
        FullAttentionSpec(block_size=1, num_kv_heads=1, head_size=size, state_bytes=size, dtype=DType.UINT8)
        for size in rows
    ]
    return RankPlan(
        num_blocks,
        width * num_blocks,
        width,
        tuple(GroupLayers((name,), (spec,)) for name, spec in zip(names, specs, strict=True)),
        tuple(TensorPlacement(number, (name,), 0, width, width) for number, name in enumerate(names)),
    )


def parts_of(view: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the views of a layer: one, or one of each of its states."""
    return (view,) if isinstance(view, Tensor) else tuple(view)


def device_pages(config: KVCacheConfig, views: Views) -> list[GroupPages]:
    """Return the pages of each group, of the views that vLLM registers. Raises WrongLayout."""
    places = {
        layer: (tensor, tensor.offset + number * tensor.layer_stride)
        for tensor in config.kv_cache_tensors
        for number, layer in enumerate(tensor.layers)
    }
    found = []
    for number, group in enumerate(config.kv_cache_groups):
        pages = []
        for layer in group.layer_names:
            if layer not in places or layer not in views:
                raise _wrong(layer, "it has no place")
            tensor, offset = places[layer]
            size, begin = page_bytes(config, number, layer), offset
            for part in parts_of(views[layer]):
                room = offset + size - begin
                if why := "; ".join(_misplaced(part, begin, tensor.block_stride, room, config.num_blocks)):
                    raise _wrong(layer, why)
                begin += part[0].nbytes * part.shape[0] // config.num_blocks
            raw = torch.empty(0, dtype=torch.uint8, device=part.device).set_(part.untyped_storage())
            pages.append(raw.as_strided((config.num_blocks, size), (tensor.block_stride, 1), offset))
        found.append(GroupPages(tuple(pages)))
    return found


def _misplaced(view: Tensor, offset: int, stride: int, size: int, num_blocks: int) -> Iterator[str]:
    """Yield what contradicts that this view has the pages of a layer, a block or equal parts of one per entry of its
    first axis.
    """
    width = view.element_size()
    if view.storage_offset() * width != offset:
        yield f"it begins at byte {view.storage_offset() * width}, not {offset}"
    if offset + (num_blocks - 1) * stride + size > view.untyped_storage().nbytes():
        yield "its last page ends behind the allocation"
    parts, rest = divmod(view.shape[0], num_blocks)
    if rest or not parts:
        yield f"it has {view.shape[0]} blocks, not {num_blocks}"
        return
    if view.stride(0) * width * parts != stride:
        yield f"its blocks are {view.stride(0) * width * parts} bytes apart, not {stride}"
    axes = zip(view.shape[1:], view.stride()[1:], strict=True)
    last = (parts - 1) * view.stride(0) + sum((length - 1) * step for length, step in axes)
    if (last + 1) * width > size:
        yield f"a block has elements up to byte {(last + 1) * width}, its page has {size}"
    if view[0].numel() * parts * width > size:
        yield f"a block has {view[0].numel() * parts * width} bytes, its page has {size}"


def _wrong(layer: str, why: str) -> WrongLayout:
    return WrongLayout(
        f"the pages of layer {layer} are not where vLLM's config says: {why}",
        field="kv_caches",
        remedy="leave --kv-transfer-config out, and report the model and the attention backend",
    )
