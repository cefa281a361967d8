"""A plan reduced to what one worker allocates."""

from __future__ import annotations

from kvplane.base.rank_plan import GroupLayers, RankPlan
from kvplane_service.core.planner.plan import CachePlan


def to_rank_plan(plan: CachePlan, worker: int = 0) -> RankPlan:
    """The memory of the plan's worker with this index; a group of which it holds no layer stays, empty."""
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
