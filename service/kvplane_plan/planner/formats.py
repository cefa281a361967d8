"""The cache formats of a model's layers before they are grouped, and changes of formats that grouping requires.

Hidden-state layers take the block size of the other groups. Local layers are treated as full attention if hybrid
allocation is off, or if nothing else makes their pages equally large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import GroupKind
from kvplane.base.layer_spec import LayerSpec, ceil_div
from kvplane.base.layers import HiddenStateSpec
from kvplane_plan.planner.plan import CacheGroup, PlanWarning, WarningCode

# Ordered: group ids and places in memory follow the order of the layers.
Formats: TypeAlias = dict[str, LayerSpec]


@dataclass(frozen=True, slots=True)
class Grouping:
    """The groups of a model, each layer in exactly one of them, and warnings about memory that the grouping costs."""

    groups: tuple[CacheGroup, ...]
    warnings: tuple[PlanWarning, ...] = ()


def merged_group(names: Sequence[str], spec: LayerSpec) -> CacheGroup:
    """Make a group whose layers all have the same format."""
    return CacheGroup(tuple(names), (spec,) * len(names), one_format=True)


def uniform_group(formats: Formats) -> CacheGroup:
    """Make a group whose layers keep their own formats; the caller ensures that all layers need blocks for the same
    tokens.
    """
    return CacheGroup(tuple(formats), tuple(formats.values()), one_format=False)


def one_format(formats: Formats) -> LayerSpec | None:
    """Return the format that can be used for every one of these layers; None if there is none."""
    first, *rest = formats.values()
    merged: LayerSpec | None = first
    for spec in rest:
        merged = merged and merged.merged_with(spec)
    return merged


def is_uniform_type(formats: Formats) -> bool:
    """Whether all layers always need blocks for the same tokens; the sizes of their pages may differ."""
    return len({spec.uniform_key for spec in formats.values()}) == 1


def page_sizes(formats: Formats) -> set[int]:
    """Return the different page sizes of the layers, in bytes."""
    return {spec.page_bytes for spec in formats.values()}


HiddenFormats = dict[str, HiddenStateSpec]


def split_hidden(formats: Formats) -> tuple[HiddenFormats, Formats]:
    """Split the layers into hidden-state layers and all others."""
    hidden = {name: spec for name, spec in formats.items() if isinstance(spec, HiddenStateSpec)}
    return hidden, {name: spec for name, spec in formats.items() if name not in hidden}


def with_hidden_groups(groups: tuple[CacheGroup, ...], hidden: HiddenFormats) -> tuple[CacheGroup, ...]:
    """Append a group per hidden-state layer, fitted to the page size that all `groups` have.

    If the hidden state of one token is larger than a page, all blocks grow until it fits into a page.
    """
    if not hidden:
        return groups
    page_bytes = groups[0].spec.page_bytes
    scale = ceil_div(max(spec.token_bytes for spec in hidden.values()), page_bytes)
    scaled = tuple(merged_group(group.layer_names, _scaled(group.spec, scale)) for group in groups)
    tokens = math.gcd(*(group.block_size for group in scaled))
    fitted = {name: _fitted(spec, page_bytes * scale, tokens) for name, spec in hidden.items()}
    return scaled + tuple(merged_group([name], spec) for name, spec in fitted.items())


def _scaled(spec: LayerSpec, scale: int) -> LayerSpec:
    page_bytes = spec.page_bytes * scale
    scaled = replace(spec, block_size=spec.block_size * scale, padded_page_bytes=0)
    return scaled if scaled.page_bytes == page_bytes else replace(scaled, padded_page_bytes=page_bytes)


def _fitted(spec: HiddenStateSpec, page_bytes: int, tokens: int) -> HiddenStateSpec:
    """Return the format that has the most tokens per block with a page of at most the given size, padded to this size.

    The number of tokens per block must divide `tokens`.
    """
    most = max(page_bytes // spec.token_bytes, 1)
    block_size = next(size for size in range(min(tokens, most), 0, -1) if tokens % size == 0)
    return replace(spec, block_size=block_size, padded_page_bytes=page_bytes)


def without_hybrid(formats: Formats) -> tuple[Formats, tuple[PlanWarning, ...]]:
    """Return formats that keep every token, for an engine without hybrid allocation, and a warning if any changed.

    Layers that context-parallel ranks replicate are converted separately from layers that these ranks split.

    Raises:
        InvalidArgument: the layers cannot all be treated as full attention.
    """
    parts: dict[bool, Formats] = {}
    for name, spec in formats.items():
        replicated = not spec.is_state and not spec.dcp_sharded
        parts.setdefault(replicated, {})[name] = spec
    changed: Formats = {}
    for part in parts.values():
        promoted = _promoted(part)
        if promoted is None:
            raise InvalidArgument(
                "the model's layers cannot be allocated alike as full attention, and hybrid is off",
                field="hybrid",
                remedy="turn hybrid on for this model",
            )
        changed |= {name: spec for name, spec in promoted.items() if spec != part[name]}
    if not changed:
        return formats, ()
    message = f"hybrid allocation is off: {len(changed)} local layers keep every token"
    return {**formats, **changed}, (PlanWarning(WarningCode.HYBRID_OFF, message),)


def rescued(formats: Formats) -> Grouping | None:
    """Return one group for MLA layers and sliding-window draft layers whose pages cannot be made equally large.

    The window layers then keep every token. Returns None for any other model.
    """
    kinds = {spec.kind for spec in formats.values()}
    unsupported = kinds & {GroupKind.SLIDING_WINDOW_MLA, GroupKind.CHUNKED_LOCAL}
    if unsupported or not {GroupKind.MLA, GroupKind.SLIDING_WINDOW} <= kinds:
        return None
    if split_hidden(formats)[0]:
        return None
    promoted = _promoted(formats)
    if promoted is None or not is_uniform_type(promoted):
        return None
    message = "page sizes cannot be made equal: sliding-window layers keep every token"
    return Grouping((uniform_group(promoted),), (PlanWarning(WarningCode.FULL_ALLOCATION, message),))


def _promoted(formats: Formats) -> Formats | None:
    """Return the formats with local layers as full attention; None if the layers still need blocks for different
    tokens.
    """
    if _alike(formats):
        return formats
    full_block_sizes = {spec.block_size for spec in formats.values() if spec.holds_every_token}
    if not full_block_sizes:
        return None
    common = full_block_sizes.pop() if len(full_block_sizes) == 1 else 0
    promoted = {name: spec.as_full_attention(common or spec.block_size) for name, spec in formats.items()}
    return promoted if _alike(promoted) else None


def _alike(formats: Formats) -> bool:
    return one_format(formats) is not None or is_uniform_type(formats)
