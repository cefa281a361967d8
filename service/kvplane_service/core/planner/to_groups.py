"""A plan reduced to what the allocator needs: how each group spends blocks over tokens."""

from __future__ import annotations

from kvplane.base.groups import GroupSpec
from kvplane.base.layer_spec import LayerSpec
from kvplane_service.core.planner.granularity import effective_block_size
from kvplane_service.core.planner.plan import CacheGroup, CachePlan


def to_groups(plan: CachePlan) -> tuple[GroupSpec, ...]:
    """One GroupSpec per group of the plan, in its order."""
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
    """Groups whose first layers have equal formats are looked up jointly: one number per such set."""
    number_of: dict[LayerSpec, int] = {}
    return [number_of.setdefault(group.spec, len(number_of)) for group in groups]


def _dropping_classes(plan: CachePlan, classes: list[int]) -> set[int]:
    """Look-up classes that drop a block: those with a draft group, or all when no group is one."""
    if not plan.options.drop_draft_block:
        return set()
    with_drafts = {c for group, c in zip(plan.groups, classes, strict=True) if group.is_draft}
    return with_drafts or set(classes)
