"""How many blocks there are, and whether the longest request fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvplane.base.errors import InvalidArgument
from kvplane.base.layer_spec import RequestLimits
from kvplane_service.core.planner.options import PlanOptions
from kvplane_service.core.planner.plan import CacheGroup

# Block 0 stands for "no block" and is never handed out.
NULL_BLOCKS = 1


def blocks_per_request(groups: Sequence[CacheGroup], limits: RequestLimits) -> int:
    """Blocks that one request of the longest length holds, over all groups: they draw from one pool."""
    return sum(max(spec.blocks_per_request(limits) for spec in group.specs) for group in groups)


def fitting_options(groups: Sequence[CacheGroup], num_blocks: int, options: PlanOptions) -> PlanOptions:
    """The options, with max_model_len shortened to what fits where that was asked for.

    Raises:
        InvalidArgument: not even one request fits beside the null block.
    """
    if _fits(groups, num_blocks, options, options.max_model_len):
        return options
    longest = _longest(groups, num_blocks, options)
    if options.fit_max_model_len and longest:
        return replace(options, max_model_len=longest)
    needed = blocks_per_request(groups, options.limits) + NULL_BLOCKS
    shorten = f"shorten max_model_len to {longest} or " if longest else ""
    raise InvalidArgument(
        f"a request of {options.max_model_len} tokens needs {needed} blocks with the null block, "
        f"there are {num_blocks}",
        field="num_blocks" if options.num_blocks else "memory_bytes",
        remedy=f"{shorten}give more",
    )


def _fits(groups: Sequence[CacheGroup], num_blocks: int, options: PlanOptions, max_model_len: int) -> bool:
    limits = replace(options.limits, max_model_len=max_model_len)
    return num_blocks >= NULL_BLOCKS + blocks_per_request(groups, limits)


def _longest(groups: Sequence[CacheGroup], num_blocks: int, options: PlanOptions) -> int:
    """The longest request that fits, by bisection (need never falls with length); 0 when none does."""
    fits, too_long = 0, options.max_model_len
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if _fits(groups, num_blocks, options, middle):
            fits = middle
        else:
            too_long = middle
    return fits
