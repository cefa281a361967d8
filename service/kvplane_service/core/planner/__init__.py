"""The cache plan: from layers and memory to KV cache groups, blocks and places in memory.

options, plan          what goes in, what comes out
planner                the straight line: plan_cache
whole_model            workers' layers as one model
grouping               which rule decides; its rules are packing, equal_pages, full_allocation, hidden
formats                layers on their way to groups
granularity, checks    block sizes in tokens; options that do not suit
capacity, placement    blocks; bytes
to_groups              what the allocator core needs of a plan

Plans equal those of vLLM 0.33 except where it fails or places wrongly. It refuses or crashes on full layers
that compute with different windows, on latent windows without hybrid allocation, and on buckets that are no
pattern but must be cut. It merges latent windows of different row sizes into the first one's, gives a pipeline
stage places for layers of other stages, and counts cross attention among what is hashed.
"""

from kvplane_service.core.planner.options import Layout, PlanOptions, Worker
from kvplane_service.core.planner.plan import (
    CacheGroup,
    CachePlan,
    PlanWarning,
    WarningCode,
    WorkerPlan,
)
from kvplane_service.core.planner.planner import plan_cache
from kvplane_service.core.planner.to_groups import to_groups
from kvplane_service.core.planner.to_rank_plan import to_rank_plan

__all__ = [
    "CacheGroup",
    "CachePlan",
    "Layout",
    "PlanOptions",
    "PlanWarning",
    "WarningCode",
    "Worker",
    "WorkerPlan",
    "plan_cache",
    "to_groups",
    "to_rank_plan",
]
