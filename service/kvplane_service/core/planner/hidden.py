"""Groups for hidden-state layers: a block table each, in blocks that other groups have sized."""

from __future__ import annotations

import math
from dataclasses import replace

from kvplane.base.layer_spec import LayerSpec, ceil_div
from kvplane.base.layers import HiddenStateSpec
from kvplane_service.core.planner.formats import Formats, merged_group
from kvplane_service.core.planner.plan import CacheGroup

HiddenFormats = dict[str, HiddenStateSpec]


def split_hidden(formats: Formats) -> tuple[HiddenFormats, Formats]:
    """Hidden-state layers, and all others."""
    hidden = {name: spec for name, spec in formats.items() if isinstance(spec, HiddenStateSpec)}
    return hidden, {name: spec for name, spec in formats.items() if name not in hidden}


def with_hidden_groups(groups: tuple[CacheGroup, ...], hidden: HiddenFormats) -> tuple[CacheGroup, ...]:
    """Groups of one page size, and after them the hidden layers fitted to that page.

    Where one token's hidden state is larger than the page, all blocks grow until it fits.
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
    """As many tokens as the page holds, but a divisor of the other groups' `tokens`, padded to the page."""
    most = max(page_bytes // spec.token_bytes, 1)
    block_size = next(size for size in range(min(tokens, most), 0, -1) if tokens % size == 0)
    return replace(spec, block_size=block_size, padded_page_bytes=page_bytes)
