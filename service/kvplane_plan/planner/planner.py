"""Makes a cache plan: merges the workers' layers, groups them, counts blocks, checks the options, places tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import Planner
from kvplane.base.layer_spec import LayerSpec
from kvplane.base.layers import KVSharingLayer, Layer
from kvplane_plan.planner.grouping import group_layers
from kvplane_plan.planner.plan import CacheGroup, CachePlan, PlanOptions, PlanWarning, WarningCode, Worker
from kvplane_plan.planner.sizes import (
    NULL_BLOCKS,
    Granularity,
    blocks_per_request,
    bytes_per_block,
    fitting_options,
    granularity,
    place,
    projected,
    suggested_match_unit,
)
from kvplane_plan.planner.splitting import split_groups, split_worker


def plan_with(workers: Sequence[Worker], options: PlanOptions, width: int = 0) -> CachePlan:
    """Plan the cache of a replica. All workers get the number of blocks for which the smallest worker has room.

    `width`: most layers of a group with pages of one size; 0: as in vLLM.

    Raises:
        InvalidArgument: with the field at fault: layers that contradict each other or cannot share a pool, memory that
            is too small for the longest request, options that the model does not support.
    """
    model = whole_model(workers)
    formats = formats_of(model, options)
    grouping = group_layers(formats, hybrid=options.hybrid, layout=options.layout, width=width)
    groups, draft_warnings = _with_draft_groups(grouping.groups, model, options)
    whole, per_state = groups, 1
    if options.planner is Planner.SPLIT:
        groups, per_state = split_groups(groups, options)
    sizes = granularity(groups, options)
    check_options(groups, sizes, options)
    per_worker = [projected(whole, {layer.name for layer in worker.layers}) for worker in workers]
    num_whole = _num_blocks(workers, per_worker, options, per_state)
    num_blocks = num_whole * per_state
    options = fitting_options(groups, num_blocks, options, per_state)
    return CachePlan(
        options=options,
        groups=groups,
        workers=tuple(split_worker(place(own, num_whole, options.layout), per_state) for own in per_worker),
        bytes_per_block=bytes_per_block(whole, options.layout) // per_state,
        num_blocks=num_blocks,
        blocks_per_request=blocks_per_request(groups, options.limits, per_state),
        scheduler_block_size=sizes.scheduler_block_size,
        hash_block_size=sizes.hash_block_size,
        partial_hits=sizes.partial_hits,
        needs_zeroing=_needs_zeroing(groups, per_worker[0]),
        tp_replicas=_tp_replicas(groups, options),
        blocks_per_state=per_state,
        shared_layers=model.shared_layers,
        warnings=grouping.warnings + draft_warnings + _coarse_hits(groups, sizes, options),
    )


def formats_of(model: WholeModel, options: PlanOptions) -> dict[str, LayerSpec]:
    """Return the layers' formats by name, as they are grouped."""
    return {layer.name: layer.spec.retaining(max(0, options.prefill_lookahead - 1)) for layer in model.layers}


def _with_draft_groups(
    groups: tuple[CacheGroup, ...], model: WholeModel, options: PlanOptions
) -> tuple[tuple[CacheGroup, ...], tuple[PlanWarning, ...]]:
    """Mark the groups that have draft layers, if look-ups leave out a block for drafts; returns the groups and
    warnings.
    """
    if not options.drops_last_block:
        return groups, ()
    drafts = {layer.name for layer in model.layers if layer.is_draft}
    marked = tuple(replace(group, is_draft=not drafts.isdisjoint(group.layer_names)) for group in groups)
    if drafts or not any(group.spec.is_state for group in groups):
        return marked, ()
    message = "no layer is marked as a draft layer: every group drops its last matched block"
    return marked, (PlanWarning(WarningCode.NO_DRAFT_LAYERS, message),)


def _coarse_hits(groups: tuple[CacheGroup, ...], sizes: Granularity, options: PlanOptions) -> tuple[PlanWarning, ...]:
    """Return a warning if hits are multiples of a state's block although they could end inside it."""
    unit = suggested_match_unit(groups, options)
    if not unit or sizes.partial_hits:
        return ()
    coarse = sizes.scheduler_block_size
    message = (
        f"prefix hits are multiples of {coarse} tokens, a block of states; with prefix_match_unit {unit} they end "
        "inside blocks, which are then copied"
    )
    return (PlanWarning(WarningCode.COARSE_HITS, message, (coarse, unit)),)


def _num_blocks(
    workers: Sequence[Worker], per_worker: Sequence[Sequence[CacheGroup]], options: PlanOptions, per_state: int
) -> int:
    """Return the number of blocks that every worker has memory for; 1 for a model without caches.

    `per_state`: the parts into which these blocks will be divided, and which `options.num_blocks` counts.
    """
    if options.num_blocks % per_state:
        _refuse("num_blocks", f"{options.num_blocks} blocks", f"give a multiple of {per_state}, the blocks of a state")
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
    return options.num_blocks // per_state or min(fitting)


def _needs_zeroing(groups: Sequence[CacheGroup], first_worker: Sequence[CacheGroup]) -> bool:
    """Whether new blocks must be zeroed: states are read before they are written, and bytes of another type may be NaN.

    As in vLLM, the first layer of a group on the first worker stands for the whole group.
    """
    if any(group.spec.is_state for group in groups):
        return True
    specs = (own.specs[0] if own.specs else group.spec for group, own in zip(groups, first_worker, strict=True))
    return len({spec.precision for spec in specs}) > 1


def _tp_replicas(groups: Sequence[CacheGroup], options: PlanOptions) -> int:
    specs = (spec for group in groups for spec in group.specs)
    return math.gcd(options.tp_size, *(spec.tp_replicas(options.tp_size, options.dcp_size) for spec in specs))


@dataclass(frozen=True, slots=True)
class WholeModel:
    """The layers of all workers, each once, in the order of the workers."""

    layers: tuple[Layer, ...]
    shared_layers: tuple[KVSharingLayer, ...]


def whole_model(workers: Sequence[Worker]) -> WholeModel:
    """Merge the workers' layers by name.

    Raises:
        InvalidArgument: no workers, a name twice on one worker, one name for different layers, or a layer that shares
            the cache of a layer that its worker does not have.
    """
    if not workers:
        raise InvalidArgument("there are no workers", field="workers", remedy="give at least one")
    merged: dict[str, Layer | KVSharingLayer] = {}
    for index, worker in enumerate(workers):
        field = f"workers[{index}].layers"
        _check_names(worker, field)
        for layer in worker.layers:
            if merged.setdefault(layer.name, layer) != layer:
                raise InvalidArgument(
                    f"{layer.name!r} differs between workers",
                    field=field,
                    remedy="give different layers different names",
                )
    return WholeModel(
        tuple(layer for layer in merged.values() if isinstance(layer, Layer)),
        tuple(layer for layer in merged.values() if isinstance(layer, KVSharingLayer)),
    )


def _check_names(worker: Worker, field: str) -> None:
    owned = {layer.name for layer in worker.layers if isinstance(layer, Layer)}
    shared = [layer for layer in worker.layers if isinstance(layer, KVSharingLayer)]
    if len(worker.layers) != len(owned | {layer.name for layer in shared}):
        raise InvalidArgument("a name occurs twice in the list", field=field, remedy="give every layer its own name")
    for layer in shared:
        if layer.shares_with not in owned:
            raise InvalidArgument(
                f"{layer.name!r} shares the cache of {layer.shares_with!r}, which has none here",
                field=field,
                remedy="name a layer of the same worker that owns a cache",
            )


def check_options(groups: Sequence[CacheGroup], sizes: Granularity, options: PlanOptions) -> None:
    """Raise InvalidArgument for the first option that these groups do not support."""
    _check_retention(groups, sizes, options.retention_interval)
    _check_lookahead(groups, sizes, options)
    _check_context_parallel(groups, options.dcp_size)


def _check_retention(groups: Sequence[CacheGroup], sizes: Granularity, interval: int) -> None:
    if interval <= 0:
        return
    if not any(group.spec.sparse_retention for group in groups):
        _refuse("retention_interval", f"{interval} has no effect on this model", "give 0")
    if interval % sizes.scheduler_block_size:
        unit = sizes.scheduler_block_size
        _refuse("retention_interval", f"{interval} tokens are not whole blocks", f"give a multiple of {unit}")


def _check_lookahead(groups: Sequence[CacheGroup], sizes: Granularity, options: PlanOptions) -> None:
    """Refuse a lookahead of more tokens than a block: the block that look-ups leave out must have all that the drafter
    wrote ahead.
    """
    drops = options.prefix_caching and options.drops_last_block and groups
    if drops and sizes.scheduler_block_size < options.prefill_lookahead:
        unit = sizes.scheduler_block_size
        _refuse(
            "prefill_lookahead",
            f"{options.prefill_lookahead} drafts exceed a block of {unit}",
            "use larger blocks",
        )


def _check_context_parallel(groups: Sequence[CacheGroup], dcp_size: int) -> None:
    if dcp_size == 1:
        return
    for group in groups:
        if group.spec.dcp_sharded and not group.spec.supports_dcp:
            name, kind = group.layer_names[0], group.kind.value
            _refuse("dcp_size", f"{kind} layer {name!r} cannot be split by tokens", "set its dcp_sharded to false")


def _refuse(field: str, message: str, remedy: str) -> None:
    raise InvalidArgument(message, field=field, remedy=remedy)
