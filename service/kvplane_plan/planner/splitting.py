"""Split pages: blocks of attention as small as its kernel permits, several of which have the memory of a state.

    reference   block of 544 tokens, as large as a state of Qwen3-Next; a request of 100 tokens takes all of it
    split       34 blocks of 16 tokens: a request of 100 tokens takes 7, and others the rest

In the memory of a layer, block j of superblock b is the (34 b + j)-th, and a state in superblock b begins at the block
34 b: kernels need no other addressing. So only the layout with all blocks of a layer together can be split.
"""

from __future__ import annotations

import math
from dataclasses import replace

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import GroupKind
from kvplane.base.layers import MambaSpec
from kvplane_plan.planner.plan import CacheGroup, Layout, PlanOptions, WorkerPlan
from kvplane_plan.planner.sizes import KERNEL_BLOCK, MLA_KERNEL_BLOCK, common_alignment, is_latent

_DIVISIBLE = (
    GroupKind.FULL_ATTENTION,
    GroupKind.MLA,
    GroupKind.SLIDING_WINDOW,
    GroupKind.SLIDING_WINDOW_MLA,
)


def split_groups(groups: tuple[CacheGroup, ...], options: PlanOptions) -> tuple[tuple[CacheGroup, ...], int]:
    """Return the groups with smaller blocks of attention, and how many of these have the memory of a state.

    Raises:
        InvalidArgument: the model has no state, or layers whose blocks cannot be divided.
    """
    if options.layout is not Layout.LAYER_OUTERMOST:
        _refuse("the layout has all layers of a block together", "store all blocks of a layer together")
    if options.dcp_size > 1:
        _refuse("context-parallel ranks share blocks", "use the planner reference")
    others = [group for group in groups if not group.spec.is_state]
    if len(others) in (0, len(groups)):
        what = "attention" if not others else "a recurrent state"
        _refuse(f"the model has no layer of {what}", "use the planner best or reference")
    for group in groups:
        if not (isinstance(group.spec, MambaSpec) or group.kind in _DIVISIBLE):
            _refuse(f"blocks of kind {group.kind.value} are not divided", "use the planner best or reference")
    pages = {spec.page_bytes for group in groups for spec in group.specs}
    elements = (dtype.num_bytes for group in groups if isinstance(group.spec, MambaSpec) for dtype in group.spec.dtypes)
    alignment = math.lcm(common_alignment(groups), *elements)
    count = math.gcd(*(page // alignment for page in pages), *(_parts(group) for group in others))
    if len(pages) > 1 or pages.pop() % alignment or count == 1:
        sizes = sorted({group.block_size for group in others})
        _refuse(f"blocks of {sizes} tokens cannot be divided for the kernel", "use the planner reference")
    return tuple(group if group.spec.is_state else _divided(group, count) for group in groups), count


def _parts(group: CacheGroup) -> int:
    """Return into how many blocks of the kernel a block can be divided; 1 if it cannot be."""
    unit = MLA_KERNEL_BLOCK if is_latent(group) else KERNEL_BLOCK
    return group.block_size // unit if group.block_size % unit == 0 else 1


def _divided(group: CacheGroup, count: int) -> CacheGroup:
    specs = []
    for spec in group.specs:
        page_bytes = spec.page_bytes // count
        divided = replace(spec, block_size=spec.block_size // count, padded_page_bytes=0)
        if divided.page_bytes > page_bytes:
            _refuse("its pages are aligned and cannot be divided", "use the planner reference")
        specs.append(divided if divided.page_bytes == page_bytes else replace(divided, padded_page_bytes=page_bytes))
    return replace(group, specs=tuple(specs))


def split_worker(plan: WorkerPlan, count: int) -> WorkerPlan:
    """Return the placement of groups that are divided, from that of the groups before."""
    tensors = (replace(tensor, block_stride_bytes=tensor.block_stride_bytes // count) for tensor in plan.tensors)
    return WorkerPlan(plan.bytes_per_block // count, plan.size_bytes, tuple(tensors))


def _refuse(what: str, remedy: str) -> None:
    raise InvalidArgument(f"it is 'split', but {what}", field="planner", remedy=remedy)
