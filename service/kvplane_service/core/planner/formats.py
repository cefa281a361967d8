"""Layers on their way to groups: their formats by name, in model order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvplane.base.layer_spec import LayerSpec
from kvplane_service.core.planner.plan import CacheGroup, PlanWarning

# Ordered: group ids and places in memory follow the order of the layers.
Formats: TypeAlias = dict[str, LayerSpec]


@dataclass(frozen=True, slots=True)
class Grouping:
    """Groups that hold every layer exactly once, and what was given away for them."""

    groups: tuple[CacheGroup, ...]
    warnings: tuple[PlanWarning, ...] = ()


def merged_group(names: Sequence[str], spec: LayerSpec) -> CacheGroup:
    """A group whose layers all have one format."""
    return CacheGroup(tuple(names), (spec,) * len(names), one_format=True)


def uniform_group(formats: Formats) -> CacheGroup:
    """A group whose layers are of one uniform type and keep their own formats."""
    return CacheGroup(tuple(formats), tuple(formats.values()), one_format=False)


def one_format(formats: Formats) -> LayerSpec | None:
    """The format that serves every layer, if there is one."""
    first, *rest = formats.values()
    merged: LayerSpec | None = first
    for spec in rest:
        merged = merged and merged.merged_with(spec)
    return merged


def is_uniform_type(formats: Formats) -> bool:
    """True when all layers always need the same token slots, though their pages may differ."""
    return len({spec.uniform_key for spec in formats.values()}) == 1


def page_sizes(formats: Formats) -> set[int]:
    """The different page sizes, in bytes."""
    return {spec.page_bytes for spec in formats.values()}
