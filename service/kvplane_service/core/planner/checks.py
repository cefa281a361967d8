"""Options that do not suit the groups, refused before anything is placed."""

from __future__ import annotations

from collections.abc import Sequence

from kvplane.base.errors import InvalidArgument
from kvplane_service.core.planner.granularity import Granularity
from kvplane_service.core.planner.options import PlanOptions
from kvplane_service.core.planner.plan import CacheGroup


def check_options(groups: Sequence[CacheGroup], sizes: Granularity, options: PlanOptions) -> None:
    """Raise InvalidArgument naming the first option that these groups cannot serve."""
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
        _refuse("retention_interval", f"{interval} tokens are no whole blocks", f"give a multiple of {unit}")


def _check_lookahead(groups: Sequence[CacheGroup], sizes: Granularity, options: PlanOptions) -> None:
    """The dropped block must cover what the drafter wrote ahead of the accepted tokens."""
    drops = options.prefix_caching and options.drop_draft_block and groups
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
