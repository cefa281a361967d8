"""Converts a cache plan for other components: group specs for the allocator, a rank plan for a worker."""

from __future__ import annotations

from kvplane.base.groups import GroupSpec
from kvplane.base.layer_spec import LayerSpec
from kvplane.base.rank_plan import GroupLayers, RankPlan
from kvplane_plan.planner.plan import CacheGroup, CachePlan
from kvplane_plan.planner.sizes import effective_block_size


def to_groups(plan: CachePlan) -> tuple[GroupSpec, ...]:
    """Return one GroupSpec per group of the plan, in the plan's order."""
    classes = _lookup_classes(plan.groups)
    dropping = _dropping_classes(plan, classes)
    return tuple(
        GroupSpec(
            kind=group.kind,
            block_size=effective_block_size(group.spec, plan.options.dcp_size),
            is_draft=group.is_draft,
            drops_last_block=lookup_class in dropping,
            admission_cap_blocks=group.spec.admission_cap_blocks(plan.options.limits),
            zero_new_blocks=plan.needs_zeroing and group.spec.zeroes_new_blocks,
            lookup_class=lookup_class,
            layer_names=group.layer_names,
            page_bytes=group.bytes_per_block,
            **group.spec.group_fields(),
        )
        for group, lookup_class in zip(plan.groups, classes, strict=True)
    )


def _lookup_classes(groups: tuple[CacheGroup, ...]) -> list[int]:
    """Return a number per group: its look-up class. Groups whose first layers have equal formats get the same number.

    Groups of one look-up class are looked up jointly.
    """
    number_of: dict[LayerSpec, int] = {}
    return [number_of.setdefault(group.spec, len(number_of)) for group in groups]


def _dropping_classes(plan: CachePlan, classes: list[int]) -> set[int]:
    """Return the look-up classes whose hits leave out the last matched block, which drafters compute again.

    These are the classes with a group of draft layers; all classes if no group has draft layers.
    """
    if not plan.options.drops_last_block:
        return set()
    with_drafts = {c for group, c in zip(plan.groups, classes, strict=True) if group.is_draft}
    return with_drafts or set(classes)


def to_rank_plan(plan: CachePlan, worker: int = 0) -> RankPlan:
    """Return the memory plan of the worker with this index.

    A group of which the worker has no layer is in the plan without layers, so that group ids stay the same.
    """
    own = plan.workers[worker]
    held = {name for tensor in own.tensors for name in tensor.layer_names}
    groups = []
    for group in plan.groups:
        kept = [(n, spec) for n, spec in zip(group.layer_names, group.specs, strict=True) if n in held]
        groups.append(GroupLayers(tuple(n for n, _ in kept), tuple(spec for _, spec in kept)))
    return RankPlan(
        num_blocks=plan.num_blocks,
        size_bytes=own.size_bytes,
        bytes_per_block=own.bytes_per_block,
        groups=tuple(groups),
        tensors=own.tensors,
        shared_layers=tuple(layer for layer in plan.shared_layers if layer.shares_with in held),
    )
