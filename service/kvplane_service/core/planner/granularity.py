"""How many tokens the scheduler aligns to, a hash covers, and a hit is a multiple of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import MambaMode
from kvplane.base.layer_spec import LayerSpec
from kvplane_service.core.planner.options import PlanOptions
from kvplane_service.core.planner.plan import CacheGroup


@dataclass(frozen=True, slots=True)
class Granularity:
    """Block sizes in tokens; `partial_hits`: hits end at hash blocks, not at scheduler blocks."""

    scheduler_block_size: int
    hash_block_size: int
    partial_hits: bool = False


def effective_block_size(spec: LayerSpec, dcp_size: int) -> int:
    """Tokens of a block over the context-parallel ranks that share it."""
    return spec.block_size * (dcp_size if spec.dcp_sharded else 1)


def granularity(groups: Sequence[CacheGroup], options: PlanOptions) -> Granularity:
    """Scheduler block: the least that all groups' blocks divide. Hash block: the most that divides them.

    Raises:
        InvalidArgument: `prefix_match_unit` does not suit the groups.
    """
    sizes = [effective_block_size(group.spec, options.dcp_size) for group in groups]
    scheduler_block_size = math.lcm(*sizes)
    if len(groups) <= 1:
        return _single(scheduler_block_size, options)
    if not _hashes_blocks(options) or _has_uncached_state(groups):
        return Granularity(scheduler_block_size, scheduler_block_size)
    cacheable = [size for group, size in zip(groups, sizes, strict=True) if group.spec.prefix_cacheable]
    hash_block_size = options.prefix_match_unit or math.gcd(*(cacheable or sizes))
    if any(size % hash_block_size for size in cacheable):
        _refuse_unit(hash_block_size, f"it must divide the block sizes {sorted(set(cacheable))}")
    finer = _allows_hits_inside_states(groups, hash_block_size, options.dcp_size)
    _check_compression(groups, hash_block_size if finer else scheduler_block_size, hash_block_size)
    partial = options.prefix_caching and finer and _all_look_up(groups, hash_block_size, options.dcp_size)
    return Granularity(scheduler_block_size, hash_block_size, partial)


def _single(block_size: int, options: PlanOptions) -> Granularity:
    if _hashes_blocks(options) and options.prefix_match_unit not in (0, block_size):
        _refuse_unit(options.prefix_match_unit, f"the only group has blocks of {block_size}")
    return Granularity(block_size, block_size)


def _hashes_blocks(options: PlanOptions) -> bool:
    return options.prefix_caching or options.external_cache


def _has_uncached_state(groups: Sequence[CacheGroup]) -> bool:
    return any(group.spec.mamba_mode is MambaMode.NONE for group in groups)


def _allows_hits_inside_states(groups: Sequence[CacheGroup], hash_block_size: int, dcp_size: int) -> bool:
    """States are cached at boundaries, and hashes are finer (with context parallelism: no coarser)."""
    finest = hash_block_size + 1 if dcp_size == 1 else hash_block_size
    return any(g.spec.mamba_mode is MambaMode.ALIGN and g.block_size >= finest for g in groups)


def _all_look_up(groups: Sequence[CacheGroup], hash_block_size: int, dcp_size: int) -> bool:
    """Every cacheable group can end a look-up at any hash boundary."""
    return all(
        group.spec.fine_grained_hits or effective_block_size(group.spec, dcp_size) == hash_block_size
        for group in groups
        if group.spec.prefix_cacheable
    )


def _check_compression(groups: Sequence[CacheGroup], hit_alignment: int, hash_block_size: int) -> None:
    """A hit must not end inside a compressed entry."""
    for spec in (spec for group in groups for spec in group.specs):
        if spec.prefix_cacheable and hit_alignment % spec.hit_unit:
            _refuse_unit(hash_block_size, f"hits must be multiples of {spec.hit_unit} tokens, one entry")


def _refuse_unit(unit: int, remedy: str) -> None:
    raise InvalidArgument(f"{unit} does not suit the groups", field="prefix_match_unit", remedy=remedy)
