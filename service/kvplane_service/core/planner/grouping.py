"""Which layers share a block table: the first rule that applies decides."""

from __future__ import annotations

from kvplane.base.errors import InvalidArgument
from kvplane_service.core.planner.equal_pages import (
    equal_page_groups,
    layers_that_cannot_grow,
    with_equal_pages,
)
from kvplane_service.core.planner.formats import (
    Formats,
    Grouping,
    is_uniform_type,
    merged_group,
    one_format,
    uniform_group,
)
from kvplane_service.core.planner.full_allocation import rescued, without_hybrid
from kvplane_service.core.planner.hidden import HiddenFormats, split_hidden, with_hidden_groups
from kvplane_service.core.planner.options import Layout
from kvplane_service.core.planner.packing import packed_groups
from kvplane_service.core.planner.plan import PlanWarning


def group_layers(formats: Formats, *, hybrid: bool, layout: Layout) -> Grouping:
    """The KV cache groups of a whole model. Decides as vLLM 0.33 (vllm/v1/core/kv_cache_planning.py).

    Raises:
        InvalidArgument: the formats cannot be allocated from one pool.
    """
    if not formats:
        return Grouping(())
    warnings: tuple[PlanWarning, ...] = ()
    if not hybrid:
        formats, warnings = without_hybrid(formats)
    grouping = _grouped(formats, layout)
    names = [name for group in grouping.groups for name in group.layer_names]
    assert sorted(names) == sorted(formats), "every layer is in exactly one group"
    return Grouping(grouping.groups, warnings + grouping.warnings)


def _grouped(formats: Formats, layout: Layout) -> Grouping:
    if spec := one_format(formats):
        return Grouping((merged_group(list(formats), spec),))
    if is_uniform_type(formats):
        return Grouping((uniform_group(formats),))
    hidden, others = split_hidden(formats)
    if not others:
        raise InvalidArgument(
            "hidden-state layers alone need one block size",
            field="layers",
            remedy="give them equal block sizes",
        )
    if packed := packed_groups(others, layout):
        return Grouping(packed + tuple(merged_group([name], spec) for name, spec in hidden.items()))
    if stuck := layers_that_cannot_grow(others):
        return rescued(formats) or _refuse_pages(stuck[0])
    return _equal_pages(others, hidden)


def _equal_pages(formats: Formats, hidden: HiddenFormats) -> Grouping:
    grouping = equal_page_groups(with_equal_pages(formats))
    return Grouping(with_hidden_groups(grouping.groups, hidden), grouping.warnings)


def _refuse_pages(name: str) -> Grouping:
    raise InvalidArgument(
        f"the page of layer {name!r} cannot be made as large as the largest",
        field="layers",
        remedy="use the block-outermost layout, or block sizes whose pages are whole multiples",
    )
