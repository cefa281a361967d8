"""Cache plans: from a model's layers and memory to KV cache groups, blocks and their placement in memory.

plan                   what goes in, what comes out
planner                plan_with: the order of the steps; workers' layers as one model; checks of options
formats, grouping      formats before they are grouped, and the rules that group them
search                 plan_cache: the plan as in vLLM, or the cheapest of several (planner BEST)
packing                the rule for pages of different sizes in one block
sizes                  tokens per block and hash, number of blocks, bytes and their placement
exports                what the allocator and a worker need of a plan

Plans equal those of vLLM 0.33 except where vLLM fails or places wrongly: vLLM refuses or crashes on full layers with
different windows, on latent windows without hybrid allocation, and on buckets that are not a pattern but must be cut.
vLLM merges latent windows of different row sizes into the first, gives a pipeline stage memory for layers of other
stages, and includes cross attention in the hash granularity.
"""

from kvplane_plan.planner.exports import to_groups, to_rank_plan
from kvplane_plan.planner.plan import (
    CacheGroup,
    CachePlan,
    Layout,
    PlanOptions,
    PlanWarning,
    WarningCode,
    Worker,
    WorkerPlan,
)
from kvplane_plan.planner.search import Cell, Comparison, compare, plan_cache
from kvplane_plan.planner.sizes import KERNEL_BLOCK, MLA_KERNEL_BLOCK

__all__ = [
    "KERNEL_BLOCK",
    "MLA_KERNEL_BLOCK",
    "CacheGroup",
    "CachePlan",
    "Cell",
    "Comparison",
    "Layout",
    "PlanOptions",
    "PlanWarning",
    "WarningCode",
    "Worker",
    "WorkerPlan",
    "compare",
    "plan_cache",
    "to_groups",
    "to_rank_plan",
]
