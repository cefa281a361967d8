"""The pages of one rank: typed tensor views of each layer's pages in one allocation, at the offsets that the memory
layout (`RankPlan`) states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvplane.base.errors import FailedPrecondition, InvalidArgument, NotFound
from kvplane.base.layer_spec import AttentionSpec, DType
from kvplane.base.layers import MambaSpec, MLASpec, SlidingWindowMLASpec
from kvplane.base.rank_plan import LayerPlace, RankPlan
from kvplane_kernels.interface import AttentionPages, GroupPages, LatentPages, StatePages
from kvplane_worker.pages.dtypes import SCALED, TORCH_DTYPES

if TYPE_CHECKING:
    import cupy

INCARNATION_BYTES = 8
# The allocation is a multiple of the largest element size, so that it can be viewed as any element type.
WORD_BYTES = 8


def allocation_bytes(plan: RankPlan) -> int:
    """Return the bytes to allocate for a memory layout, rounded up to a multiple of eight. An opaque layout gets eight
    more, for the incarnation: the engine may write every byte of such a layout.
    """
    return math.ceil(plan.size_bytes / WORD_BYTES) * WORD_BYTES + (INCARNATION_BYTES if plan.opaque_layout else 0)


class PageBuffers:
    """Tensor views of one rank's pages. The views of two groups overlap by design: a block belongs to one group at a
    time.

    A layer that shares the cache of another layer has a view under its own name too.

    Attributes:
        plan: the memory layout: offsets and strides of all layers.
        memory: the allocation, uint8 [allocation_bytes(plan)].
    """

    def __init__(self, plan: RankPlan, memory: Tensor) -> None:
        """Create views of `memory` according to the memory layout `plan`.

        Raises:
            InvalidArgument: the layout is impossible, or the memory has another type or size.
        """
        plan.validate()
        if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous():
            raise InvalidArgument(
                f"the memory is a tensor of {memory.dtype} {list(memory.shape)}",
                field="memory",
                remedy="give a contiguous uint8 tensor with one dimension",
            )
        if memory.numel() < allocation_bytes(plan):
            raise InvalidArgument(
                f"the memory has {memory.numel()} bytes, the layout needs {allocation_bytes(plan)}",
                field="memory",
                remedy="allocate allocation_bytes(plan) bytes",
            )
        self.plan = plan
        self.memory = memory[: allocation_bytes(plan)]
        self._places = {place.name: place for place in plan.places()}
        for shared in plan.shared_layers:
            self._places[shared.name] = self._places[shared.shares_with]
        for place in self._places.values():
            _check_alignment(place)
        self._groups: dict[int, GroupPages] = {}
        self._attention: dict[str, AttentionPages] = {}
        self._latents: dict[str, LatentPages] = {}

    @classmethod
    def allocate(cls, plan: RankPlan, device: str | torch.device = "cpu") -> PageBuffers:
        """Allocate zeroed memory that only this process uses. Raises the errors of the constructor."""
        plan.validate()
        return cls(plan, torch.zeros(allocation_bytes(plan), dtype=torch.uint8, device=device))

    def as_cupy(self) -> cupy.ndarray:
        """Return the memory as a CuPy array of the same bytes, uint8 [bytes]. Raises FailedPrecondition for
        CPU memory.
        """
        if not self.memory.is_cuda:
            raise FailedPrecondition(
                f"the pages are on {self.memory.device}, but CuPy needs a CUDA device",
                field="device",
                remedy="allocate the pages on a CUDA device",
            )
        import cupy

        return cupy.from_dlpack(self.memory)

    @property
    def num_blocks(self) -> int:
        """The number of blocks in the pool, including the null block."""
        return self.plan.num_blocks

    @property
    def num_groups(self) -> int:
        """The number of KV cache groups of the model."""
        return len(self.plan.groups)

    def layer(self, name: str) -> LayerPlace:
        """Return offset, stride and format of a layer's pages. Raises NotFound if this rank has no such layer."""
        place = self._places.get(name)
        if place is None:
            raise NotFound(
                f"this rank has no layer {name!r}",
                field="layer",
                remedy=f"give the name of one of its {len(self._places)} layers",
            )
        return place

    def attention(self, name: str) -> AttentionPages:
        """Return views of a layer's keys and values, with the scales of `set_scales`; for shapes see AttentionPages.

        Raises:
            NotFound: there is no such layer.
            InvalidArgument: the layer's pages contain something else, or have another binary form.
        """
        place = self.layer(name)
        if place.name not in self._attention:
            self._attention[place.name] = self._keys_and_values(place, self._unit, self._unit)
        return self._attention[place.name]

    def _keys_and_values(self, place: LayerPlace, k_scale: Tensor, v_scale: Tensor) -> AttentionPages:
        spec = place.spec
        if not isinstance(spec, AttentionSpec) or _is_latent(spec) or spec.state_bytes:
            raise _other_kind(place, "keys and values")
        entries = spec.block_size // spec.tokens_per_state
        k_shape = (entries, spec.num_kv_heads, spec.head_size)
        v_shape = (entries, spec.num_kv_heads, spec.head_size_v)
        k = self._view(place, k_shape, spec.dtype)
        v = self._view(place, v_shape, spec.dtype, math.prod(k_shape) * spec.dtype.num_bytes)
        return AttentionPages(k, v, k_scale, v_scale) if k.dtype in SCALED else AttentionPages(k, v)

    def latent(self, name: str) -> LatentPages:
        """Return a view of a layer's latent rows, with the scale of `set_scales`. Raises the errors of `attention`."""
        place = self.layer(name)
        if place.name not in self._latents:
            self._latents[place.name] = self._latent_rows(place, self._unit)
        return self._latents[place.name]

    def _latent_rows(self, place: LayerPlace, scale: Tensor) -> LatentPages:
        spec = place.spec
        if not isinstance(spec, AttentionSpec) or not _is_latent(spec) or spec.state_bytes:
            raise _other_kind(place, "latent rows")
        entries = spec.block_size // spec.tokens_per_state
        rows = self._view(place, (entries, spec.num_kv_heads * (spec.head_size + spec.head_size_v)), spec.dtype)
        return LatentPages(rows, scale) if rows.dtype in SCALED else LatentPages(rows)

    def set_scales(self, name: str, k_scale: Tensor, v_scale: Tensor | None = None) -> None:
        """Set the scales of a layer's 8-bit pages; without this call they are 1. Waits for the device.

        `set_all_scales` does so for several layers: for all of them, or for none if one is refused.

        Pages that hold tokens keep their bytes: an engine sets the same scales in each of its lives, before it reads or
        writes pages.

        Args:
            name: name of the layer.
            k_scale, v_scale: float32 [1] or [kv_heads]; for latent rows k_scale alone, [1].

        Raises:
            NotFound: there is no such layer.
            InvalidArgument: the layer's pages have no scale; or a scale has another type or shape, or is not positive
                and finite. Nothing is changed.
        """
        self.set_all_scales({name: (k_scale, v_scale)})

    def set_all_scales(self, scales: Mapping[str, tuple[Tensor, Tensor | None]]) -> None:
        """Set the scales of layers, (k_scale, v_scale) each. Raises the errors of `set_scales`, and changes nothing
        then.
        """
        scaled = [(self.layer(name).name, self._scaled(name, *pair)) for name, pair in scales.items()]
        for place, pages in scaled:
            if isinstance(pages, LatentPages):
                self._latents[place] = pages
            else:
                self._attention[place] = pages

    def _scaled(self, name: str, k_scale: Tensor, v_scale: Tensor | None) -> AttentionPages | LatentPages:
        place, spec = self.layer(name), self.layer(name).spec
        if not isinstance(spec, AttentionSpec) or TORCH_DTYPES[spec.dtype] not in SCALED:
            raise InvalidArgument(
                f"a scale is given, but the pages of {name} are not of 8-bit elements and have none",
                field="k_scale",
                remedy="give scales of 8-bit pages only",
            )
        if _is_latent(spec):
            if v_scale is not None:
                raise InvalidArgument("latent rows have one scale", field="v_scale", remedy="give k_scale alone")
            return self._latent_rows(place, self._scale("k_scale", 1, k_scale))
        k = self._scale("k_scale", spec.num_kv_heads, k_scale)
        v = self._scale("v_scale", spec.num_kv_heads, v_scale)
        return self._keys_and_values(place, k, v)

    def states(self, name: str) -> tuple[Tensor, ...]:
        """Return views of the tensors of a layer's recurrent state, [num_blocks, *shape] each, by block. Where a state
        takes several blocks, only multiples of their number name a state, and the views end with the last state.
        Raises the errors of `attention`.
        """
        place = self.layer(name)
        spec = place.spec
        if not isinstance(spec, MambaSpec):
            raise _other_kind(place, "states")
        views, offset = [], 0
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
            views.append(self._view(place, shape, dtype, offset))
            offset += math.prod(shape) * dtype.num_bytes
        return tuple(views)

    def state(self, name: str) -> StatePages:
        """Return a layer's convolution and states: shapes [width - 1, channels], as memory layouts have it, and one of
        two axes (Mamba-1) or three.

        Raises:
            NotFound: there is no such layer.
            InvalidArgument: the layer has no state, or a state of another form (use `states`).
        """
        tensors = self.states(name)
        if [tensor.dim() - 1 for tensor in tensors] not in ([2, 2], [2, 3]):
            raise InvalidArgument(
                f"the state of {name} has shapes {[tuple(tensor.shape[1:]) for tensor in tensors]}; expected a "
                "convolution of two axes and a state of two or three",
                field="layer",
                remedy="use states()",
            )
        conv, ssm = tensors
        return StatePages(conv.mT, ssm)

    def group(self, group: int) -> GroupPages:
        """Return views of the whole pages of a group as bytes. Raises InvalidArgument if there is no such group."""
        if self.plan.opaque_layout:
            raise FailedPrecondition(
                "only the engine knows where the pages of a block are: the layout is opaque",
                field="group",
                remedy="let the engine move its pages",
            )
        if not 0 <= group < self.num_groups:
            raise InvalidArgument(
                f"there is no KV cache group {group}",
                field="group",
                remedy=f"give a group from 0 to {self.num_groups - 1}",
            )
        if group not in self._groups:
            names = self.plan.groups[group].layer_names
            self._groups[group] = GroupPages(tuple(self._bytes(self._places[name]) for name in names))
        return self._groups[group]

    def write_incarnation(self, incarnation: int) -> None:
        """Write the incarnation, the random number that identifies this memory, into the first bytes of the null
        block's page; with an opaque layout, behind the pages.
        """
        row = torch.tensor(list(incarnation.to_bytes(INCARNATION_BYTES, "little")), dtype=torch.uint8)
        self._incarnation.copy_(row)

    def read_incarnation(self) -> int:
        """Return the incarnation (random number that identifies this memory) that `write_incarnation` wrote; 0 in new
        memory.
        """
        return int.from_bytes(bytes(self._incarnation.cpu().tolist()), "little")

    @property
    def _incarnation(self) -> Tensor:
        return self.memory[-INCARNATION_BYTES:] if self.plan.opaque_layout else self.memory[:INCARNATION_BYTES]

    def _bytes(self, place: LayerPlace) -> Tensor:
        size = (place.num_pages(self.num_blocks), place.spec.page_bytes)
        start = self.memory.storage_offset() + place.offset_bytes
        return self.memory.as_strided(size, (place.block_stride_bytes, 1), start)

    def _view(self, place: LayerPlace, shape: Sequence[int], dtype: DType, offset_bytes: int = 0) -> Tensor:
        """Return a view [num_blocks, *shape] that begins at `offset_bytes` in each page and is contiguous within a
        page. Where a page has the memory of several blocks, it ends with the last page.
        """
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        typed = self.memory.view(TORCH_DTYPES[dtype])
        width = dtype.num_bytes
        return typed.as_strided(
            (place.num_pages(self.num_blocks), *shape),
            (place.block_stride_bytes // width, *strides),
            typed.storage_offset() + (place.offset_bytes + offset_bytes) // width,
        )

    @cached_property
    def _unit(self) -> Tensor:
        """The scale 1, float32 [1]."""
        return torch.ones(1, dtype=torch.float32, device=self.memory.device)

    def _scale(self, field: str, heads: int, given: Tensor | None) -> Tensor:
        if given is None or given.dtype != torch.float32 or given.shape not in ((1,), (heads,)):
            found = "None" if given is None else f"a tensor of {given.dtype} {list(given.shape)}"
            raise InvalidArgument(f"the scale is {found}", field=field, remedy=f"give float32 [1] or [{heads}]")
        if not bool((given.isfinite() & (given > 0)).all()):
            raise InvalidArgument(
                f"a scale is zero, negative, infinite or NaN: {given.tolist()}",
                field=field,
                remedy="give finite scales above 0",
            )
        return given


def _is_latent(spec: AttentionSpec) -> bool:
    return isinstance(spec, (MLASpec, SlidingWindowMLASpec))


def _other_kind(place: LayerPlace, what: str) -> InvalidArgument:
    packed = isinstance(place.spec, AttentionSpec) and place.spec.state_bytes
    form = "another binary form of " if packed else ""
    return InvalidArgument(
        f"pages of {place.name} do not contain {what}: their format is {form}{place.spec.type_name}",
        field="layer",
        remedy="use group() for the bytes",
    )


def _check_alignment(place: LayerPlace) -> None:
    """Raise InvalidArgument unless each page is aligned to the size of its elements and the null block's page has room
    for the incarnation, a u64 that identifies the memory.
    """
    dtypes = place.spec.dtypes if isinstance(place.spec, MambaSpec) else (place.spec.precision,)
    offset = 0
    for index, dtype in enumerate(dtypes):
        width = dtype.num_bytes if dtype else 1
        for what, value in (("offset", place.offset_bytes + offset), ("stride", place.block_stride_bytes)):
            if value % width:
                raise InvalidArgument(
                    f"the {what} of {place.name}, {value} bytes, is not a multiple of its element size, {width} bytes",
                    field="tensors",
                    remedy=f"pad its page, or align its blocks (block_stride_alignment) to {width} bytes",
                )
        if isinstance(place.spec, MambaSpec):
            offset += math.prod(place.spec.shapes[index]) * width
    if place.offset_bytes == 0 and place.spec.page_bytes < INCARNATION_BYTES:
        raise InvalidArgument(
            f"pages of {place.name} have {place.spec.page_bytes} bytes, the minimum is {INCARNATION_BYTES}",
            field="tensors",
            remedy="pad its page: the page of block 0 contains the incarnation",
        )
