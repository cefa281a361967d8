"""Decides which layers share a block table; the first rule that applies decides.

The rule for pages of one size makes each page as large as the largest, then distributes equal layers over groups. A
block of the pool must serve any group, so the groups should have equally many layers. Models repeat a pattern, such as
five sliding layers and a full one: the number of layers of the rarest kind is the width of a group, and the layers of
each other kind are distributed over as many groups as needed.

    10 full, 52 sliding  ->  full [10]   sliding [9] [9] [9] [9] [8] [8]

Rules and constants: vLLM 0.33, vllm/v1/core/kv_cache_planning.py.
"""

from __future__ import annotations

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import MAX_GROUPS
from kvplane.base.layer_spec import LayerSpec, ceil_div
from kvplane_plan.planner.formats import (
    Formats,
    Grouping,
    HiddenFormats,
    is_uniform_type,
    merged_group,
    one_format,
    rescued,
    split_hidden,
    uniform_group,
    with_hidden_groups,
    without_hybrid,
)
from kvplane_plan.planner.packing import packed_groups
from kvplane_plan.planner.plan import CacheGroup, Layout, PlanWarning, WarningCode


def group_layers(formats: Formats, *, hybrid: bool, layout: Layout, width: int = 0) -> Grouping:
    """Divide the layers of a whole model into KV cache groups, as vLLM 0.33 does (v1/core/kv_cache_planning.py).

    `width`: most layers of a group with pages of one size; 0: as in vLLM.

    Raises:
        InvalidArgument: the formats cannot be allocated from one pool.
    """
    if not formats:
        return Grouping(())
    warnings: tuple[PlanWarning, ...] = ()
    if not hybrid:
        formats, warnings = without_hybrid(formats)
    grouping = _grouped(formats, layout, width)
    names = [name for group in grouping.groups for name in group.layer_names]
    assert sorted(names) == sorted(formats), "every layer is in exactly one group"
    return Grouping(grouping.groups, warnings + grouping.warnings)


def _grouped(formats: Formats, layout: Layout, width: int) -> Grouping:
    if spec := one_format(formats):
        return Grouping((merged_group(list(formats), spec),))
    if is_uniform_type(formats):
        return Grouping((uniform_group(formats),))
    hidden, others = split_hidden(formats)
    if not others:
        raise InvalidArgument(
            "hidden-state layers alone need one block size, these differ",
            field="layers",
            remedy="give them equal block sizes",
        )
    if packed := packed_groups(others, layout):
        return Grouping(packed + tuple(merged_group([name], spec) for name, spec in hidden.items()))
    if stuck := layers_that_cannot_grow(others):
        return rescued(formats) or _refuse_pages(stuck[0])
    return _equal_pages(others, hidden, width)


def layers_per_format(formats: Formats) -> list[int]:
    """Return how many layers each format has where pages of one size are grouped by width; [] where they are not."""
    others = split_hidden(formats)[1]
    if not others or layers_that_cannot_grow(others):
        return []
    return [len(names) for _, names in _buckets(with_equal_pages(others))]


def _equal_pages(formats: Formats, hidden: HiddenFormats, width: int) -> Grouping:
    grouping = equal_page_groups(with_equal_pages(formats), width)
    return Grouping(with_hidden_groups(grouping.groups, hidden), grouping.warnings)


def _refuse_pages(name: str) -> Grouping:
    raise InvalidArgument(
        f"the page of layer {name!r} cannot be made as large as the largest",
        field="layers",
        remedy="use the block-outermost layout, or block sizes whose pages are whole multiples",
    )


def layers_that_cannot_grow(formats: Formats) -> list[str]:
    """Return the layers whose page cannot be made as large as the largest page of any layer, by more tokens or by
    padding.
    """
    largest = _largest_page(formats)
    return [n for n, s in formats.items() if s.page_bytes < largest and s.grown_to(largest) is None]


def with_equal_pages(formats: Formats) -> Formats:
    """Return all formats, changed to the page size of the largest page. `layers_that_cannot_grow` must be empty."""
    largest = _largest_page(formats)
    return {name: _grown(spec, largest) for name, spec in formats.items()}


def equal_page_groups(formats: Formats, width: int = 0) -> Grouping:
    """Distribute layers with equal pages over groups of nearly equal width, in the order of each kind's first layer.

    `width`: most layers of a group; 0: as in vLLM.
    """
    buckets = _buckets(formats)
    width = width or _group_width([len(names) for _, names in buckets])
    groups: list[CacheGroup] = []
    for spec, names in buckets:
        count = ceil_div(len(names), width)
        # Every count-th layer instead of runs of layers: a pipeline stage then has a share of each group.
        groups += [merged_group(names[i::count], spec) for i in range(count)]
    uneven = (len(names) for _, names in buckets if len(names) % width)
    return Grouping(tuple(groups), tuple(_padding_warning(layers, width) for layers in uneven))


def _largest_page(formats: Formats) -> int:
    return max(spec.page_bytes for spec in formats.values())


def _grown(spec: LayerSpec, page_bytes: int) -> LayerSpec:
    if spec.page_bytes == page_bytes:
        return spec
    grown = spec.grown_to(page_bytes)
    assert grown is not None
    assert grown.page_bytes == page_bytes
    return grown


def _buckets(formats: Formats) -> list[tuple[LayerSpec, list[str]]]:
    """Return the layers by merged format, in the order of each format's first layer."""
    names_of: dict[LayerSpec, list[str]] = {}
    for name, spec in formats.items():
        names_of.setdefault(spec, []).append(name)
    buckets: list[tuple[LayerSpec, list[str]]] = []
    for spec, names in names_of.items():
        for i, (merged, members) in enumerate(buckets):
            if both := merged.merged_with(spec):
                buckets[i] = (both, members + names)
                break
        else:
            if len(buckets) == MAX_GROUPS:  # each is compared with all before
                raise InvalidArgument(
                    f"more than {MAX_GROUPS} formats of layers need a group each",
                    field="layers",
                    remedy=f"give at most {MAX_GROUPS} formats",
                )
            buckets.append((spec, names))
    return buckets


def _group_width(counts: list[int]) -> int:
    """Return the layers per group: the count of the rarest kind, or of the most frequent kind if the counts are close.

    For example 12 sliding and 13 full layers (one is a draft layer) make groups of 12 and 13, with padding for one
    layer, instead of groups of 12, 7 and 6.
    """
    fewest, most = min(counts), max(counts)
    return most if most < 1.5 * fewest else fewest


def _padding_warning(layers: int, width: int) -> PlanWarning:
    unused = -layers % width
    message = f"{unused} of {layers + unused} layer places stay empty: up to {unused / layers:.1%} of the memory"
    return PlanWarning(WarningCode.PADDING_LAYERS, message, (unused, layers))
