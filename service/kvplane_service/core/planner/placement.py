"""Where pages lie. A worker has one allocation; every group's layers are laid over it from byte 0.

layer outermost    group 0: | A [ block 0 | block 1 | .. ] | B [ block 0 | block 1 | .. ] |
                   group 1: | C [ block 0 | block 1 | .. ] | D [ block 0 | block 1 | .. ] |

block outermost    group 0: | block 0 [ A | B | - ] | block 1 [ A | B | - ] | ..
                   group 1: | block 0 [  C  |  D  ] | block 1 [  C  |  D  ] | ..
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvplane.base.layer_spec import LayerSpec, round_up
from kvplane.base.rank_plan import TensorPlacement
from kvplane_service.core.planner.options import Layout
from kvplane_service.core.planner.plan import CacheGroup, WorkerPlan


def bytes_per_block(groups: Sequence[CacheGroup], layout: Layout) -> int:
    """Bytes of one block of the pool: the widest group, aligned; 0 without groups."""
    if not groups:
        return 0
    if layout is Layout.LAYER_OUTERMOST:
        return max(sum(_stride(spec, groups) for spec in group.specs) for group in groups)
    return round_up(max(group.bytes_per_block for group in groups), _common_alignment(groups))


def projected(groups: Sequence[CacheGroup], layer_names: set[str]) -> tuple[CacheGroup, ...]:
    """The groups with only the layers of one worker; a group may become empty and keeps its id."""
    return tuple(_projected(group, layer_names) for group in groups)


def place(groups: Sequence[CacheGroup], num_blocks: int, layout: Layout) -> WorkerPlan:
    """Strides and offsets of a worker's layers. `groups` are projected to it."""
    block_bytes = bytes_per_block(groups, layout)
    tensors: list[TensorPlacement] = []
    for index, group in enumerate(groups):
        offset = 0
        for spec, names in _by_format(group).items():
            if layout is Layout.LAYER_OUTERMOST:
                block_stride = _stride(spec, groups)
                layer_stride = region = block_stride * num_blocks
            else:
                layer_stride, block_stride, region = spec.page_bytes, block_bytes, spec.page_bytes
            tensors.append(TensorPlacement(index, tuple(names), offset, layer_stride, block_stride))
            offset += len(names) * region
    return WorkerPlan(block_bytes, block_bytes * num_blocks, tuple(tensors))


def _stride(spec: LayerSpec, groups: Sequence[CacheGroup]) -> int:
    """From block to block in a layer of its own. Groups that share blocks have equal pages and need equal strides."""
    alone = sum(bool(group.specs) for group in groups) == 1
    return round_up(spec.page_bytes, spec.block_stride_alignment if alone else _common_alignment(groups))


def _common_alignment(groups: Sequence[CacheGroup]) -> int:
    return math.lcm(*(spec.block_stride_alignment for group in groups for spec in group.specs))


def _projected(group: CacheGroup, layer_names: set[str]) -> CacheGroup:
    kept = [i for i, name in enumerate(group.layer_names) if name in layer_names]
    names = tuple(group.layer_names[i] for i in kept)
    return CacheGroup(names, tuple(group.specs[i] for i in kept), group.one_format, group.is_draft)


def _by_format(group: CacheGroup) -> dict[LayerSpec, list[str]]:
    names_of: dict[LayerSpec, list[str]] = {}
    for name, spec in zip(group.layer_names, group.specs, strict=True):
        names_of.setdefault(spec, []).append(name)
    return names_of
