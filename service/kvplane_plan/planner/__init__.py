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

from kvplane_plan.planner.exports import to_groups as to_groups
from kvplane_plan.planner.exports import to_rank_plan as to_rank_plan
from kvplane_plan.planner.plan import CacheGroup as CacheGroup
from kvplane_plan.planner.plan import CachePlan as CachePlan
from kvplane_plan.planner.plan import Layout as Layout
from kvplane_plan.planner.plan import PlanOptions as PlanOptions
from kvplane_plan.planner.plan import PlanWarning as PlanWarning
from kvplane_plan.planner.plan import WarningCode as WarningCode
from kvplane_plan.planner.plan import Worker as Worker
from kvplane_plan.planner.plan import WorkerPlan as WorkerPlan
from kvplane_plan.planner.search import Cell as Cell
from kvplane_plan.planner.search import Comparison as Comparison
from kvplane_plan.planner.search import compare as compare
from kvplane_plan.planner.search import plan_cache as plan_cache
from kvplane_plan.planner.sizes import KERNEL_BLOCK as KERNEL_BLOCK
from kvplane_plan.planner.sizes import MLA_KERNEL_BLOCK as MLA_KERNEL_BLOCK
