"""Planning from end to end: merge the workers' layers, group them, count blocks, check, place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from kvplane.base.errors import InvalidArgument
from kvplane_service.core.planner.capacity import NULL_BLOCKS, blocks_per_request, fitting_options
from kvplane_service.core.planner.checks import check_options
from kvplane_service.core.planner.granularity import granularity
from kvplane_service.core.planner.grouping import group_layers
from kvplane_service.core.planner.options import PlanOptions, Worker
from kvplane_service.core.planner.placement import bytes_per_block, place, projected
from kvplane_service.core.planner.plan import CacheGroup, CachePlan, PlanWarning, WarningCode
from kvplane_service.core.planner.whole_model import WholeModel, whole_model


def plan_cache(workers: Sequence[Worker], options: PlanOptions) -> CachePlan:
    """The plan of a replica. Groups are those of the whole model; every worker gets the fewest blocks of any.

    Raises:
        InvalidArgument: naming the field at fault: layers that contradict each other or cannot share a pool,
            memory that does not hold the longest request, options that do not suit the model.
    """
    model = whole_model(workers)
    formats = {layer.name: layer.spec.retaining(max(0, options.prefill_lookahead - 1)) for layer in model.layers}
    grouping = group_layers(formats, hybrid=options.hybrid, layout=options.layout)
    groups, draft_warnings = _with_draft_groups(grouping.groups, model, options)
    sizes = granularity(groups, options)
    check_options(groups, sizes, options)
    per_worker = [projected(groups, {layer.name for layer in worker.layers}) for worker in workers]
    num_blocks = _num_blocks(workers, per_worker, options)
    options = fitting_options(groups, num_blocks, options)
    return CachePlan(
        options=options,
        groups=groups,
        workers=tuple(place(own, num_blocks, options.layout) for own in per_worker),
        bytes_per_block=bytes_per_block(groups, options.layout),
        num_blocks=num_blocks,
        blocks_per_request=blocks_per_request(groups, options.limits),
        scheduler_block_size=sizes.scheduler_block_size,
        hash_block_size=sizes.hash_block_size,
        partial_hits=sizes.partial_hits,
        needs_zeroing=_needs_zeroing(groups, per_worker[0]),
        tp_replicas=_tp_replicas(groups, options),
        shared_layers=model.shared_layers,
        warnings=grouping.warnings + draft_warnings,
    )


def _with_draft_groups(
    groups: tuple[CacheGroup, ...], model: WholeModel, options: PlanOptions
) -> tuple[tuple[CacheGroup, ...], tuple[PlanWarning, ...]]:
    """Mark the groups that hold draft layers, when drafts make a look-up drop a block."""
    if not options.drop_draft_block:
        return groups, ()
    drafts = {layer.name for layer in model.layers if layer.is_draft}
    marked = tuple(replace(group, is_draft=not drafts.isdisjoint(group.layer_names)) for group in groups)
    if drafts or not any(group.spec.is_state for group in groups):
        return marked, ()
    message = "no layer is marked as a draft layer: every group drops its last matched block"
    return marked, (PlanWarning(WarningCode.NO_DRAFT_LAYERS, message),)


def _num_blocks(workers: Sequence[Worker], per_worker: Sequence[Sequence[CacheGroup]], options: PlanOptions) -> int:
    """Blocks that every worker can hold; a model without caches needs the null block alone."""
    if not per_worker[0]:
        return NULL_BLOCKS
    block_bytes = [bytes_per_block(own, options.layout) for own in per_worker]
    if 0 in block_bytes:
        raise InvalidArgument(
            "the worker has no layer with a cache",
            field=f"workers[{block_bytes.index(0)}].layers",
            remedy="leave the worker out",
        )
    fitting = (worker.memory_bytes // size for worker, size in zip(workers, block_bytes, strict=True))
    return options.num_blocks or min(fitting)


def _needs_zeroing(groups: Sequence[CacheGroup], first_worker: Sequence[CacheGroup]) -> bool:
    """A state is read before it is written; bytes left by another type can decode to NaN.

    As in the reference, one layer stands for each group: its first on the first worker.
    """
    if any(group.spec.is_state for group in groups):
        return True
    specs = (own.specs[0] if own.specs else group.spec for group, own in zip(groups, first_worker, strict=True))
    return len({spec.precision for spec in specs}) > 1


def _tp_replicas(groups: Sequence[CacheGroup], options: PlanOptions) -> int:
    specs = (spec for group in groups for spec in group.specs)
    return math.gcd(options.tp_size, *(spec.tp_replicas(options.tp_size, options.dcp_size) for spec in specs))
