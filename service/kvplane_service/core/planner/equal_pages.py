"""Grouping with pages of one size: each is made as large as the largest, then like layers are dealt out.

A block of the pool must serve any group, so the groups should be equally wide. Models repeat a pattern, such
as five sliding layers and a full one: the rarest kind gives the width, and the others are dealt into as many
groups as they need.

    10 full, 52 sliding  ->  full [10]   sliding [9] [9] [9] [9] [8] [8]

Rules and constants: vLLM 0.33, vllm/v1/core/kv_cache_planning.py.
"""

from __future__ import annotations

from kvplane.base.layer_spec import LayerSpec, ceil_div
from kvplane_service.core.planner.formats import Formats, Grouping, merged_group
from kvplane_service.core.planner.plan import CacheGroup, PlanWarning, WarningCode


def layers_that_cannot_grow(formats: Formats) -> list[str]:
    """Layers whose page can be made the size of the largest neither by more tokens nor by padding."""
    largest = _largest_page(formats)
    return [n for n, s in formats.items() if s.page_bytes < largest and s.grown_to(largest) is None]


def with_equal_pages(formats: Formats) -> Formats:
    """All formats with the page of the largest. No layer may be in `layers_that_cannot_grow`."""
    largest = _largest_page(formats)
    return {name: _grown(spec, largest) for name, spec in formats.items()}


def equal_page_groups(formats: Formats) -> Grouping:
    """Deal layers of equal pages into groups of nearly one width, in the order of each kind's first layer."""
    buckets = _buckets(formats)
    width = _group_width([len(names) for _, names in buckets])
    groups: list[CacheGroup] = []
    for spec, names in buckets:
        count = ceil_div(len(names), width)
        # Every count-th layer, not runs of layers: a pipeline stage then holds a share of each group.
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
    """Layers that one format serves, kind by kind in the order of each kind's first layer."""
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
            buckets.append((spec, names))
    return buckets


def _group_width(counts: list[int]) -> int:
    """Layers per group: of the rarest kind, or of the commonest when all are nearly as many.

    12 sliding and 13 full (one draft layer was added) make 12 and 13, with one place empty, not 12, 7 and 6.
    """
    fewest, most = min(counts), max(counts)
    return most if most < 1.5 * fewest else fewest


def _padding_warning(layers: int, width: int) -> PlanWarning:
    unused = -layers % width
    message = f"{unused} of {layers + unused} layer places stay empty: up to {unused / layers:.1%} of the memory"
    return PlanWarning(WarningCode.PADDING_LAYERS, message, (unused, layers))
