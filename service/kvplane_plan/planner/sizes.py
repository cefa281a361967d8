"""The sizes of a plan: tokens of blocks, hashes and hits, number of blocks, and bytes with their placement.

A worker has one allocation; every group's layers are laid over it from byte 0.

layer outermost    group 0: | A [ block 0 | block 1 | .. ] | B [ block 0 | block 1 | .. ] |
                   group 1: | C [ block 0 | block 1 | .. ] | D [ block 0 | block 1 | .. ] |

block outermost    group 0: | block 0 [ A | B | - ] | block 1 [ A | B | - ] | ..
                   group 1: | block 0 [  C  |  D  ] | block 1 [  C  |  D  ] | ..
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import MambaMode
from kvplane.base.layer_spec import LayerSpec, RequestLimits, round_up
from kvplane.base.layers import MLASpec
from kvplane.base.rank_plan import TensorPlacement
from kvplane_plan.planner.plan import CacheGroup, Layout, PlanOptions, WorkerPlan

# Attention kernels require block sizes that are multiples of this number of tokens.
KERNEL_BLOCK = 16
MLA_KERNEL_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Granularity:
    """Block sizes in tokens; `partial_hits`: hits end at hash blocks, not at scheduler blocks."""

    scheduler_block_size: int
    hash_block_size: int
    partial_hits: bool = False


def effective_block_size(spec: LayerSpec, dcp_size: int) -> int:
    """Return the tokens of a block: the sum over the context-parallel ranks that share the block."""
    return spec.block_size * (dcp_size if spec.dcp_sharded else 1)


def granularity(groups: Sequence[CacheGroup], options: PlanOptions) -> Granularity:
    """Compute the scheduler block size, the least common multiple of the groups' block sizes, and the hash block size.

    The hash block size is `prefix_match_unit`, or the greatest common divisor of the cacheable groups' block sizes.

    Raises:
        InvalidArgument: `prefix_match_unit` does not fit the groups.
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


def suggested_match_unit(groups: Sequence[CacheGroup], options: PlanOptions) -> int:
    """Return the `prefix_match_unit` with which hits can end inside the blocks of states, at the block of the attention
    kernel; 0 if the options set a unit, or if no group has such blocks or the groups do not allow it.
    """
    if options.prefix_match_unit or not options.prefix_caching:
        return 0
    units = (MLA_KERNEL_BLOCK, KERNEL_BLOCK) if any(is_latent(group) for group in groups) else (KERNEL_BLOCK,)
    for unit in units:
        with suppress(InvalidArgument):
            if granularity(groups, replace(options, prefix_match_unit=unit)).partial_hits:
                return unit
    return 0


def is_latent(group: CacheGroup) -> bool:
    """Whether the group has layers with latent rows (MLA)."""
    return any(isinstance(spec, MLASpec) for spec in group.specs)


def _single(block_size: int, options: PlanOptions) -> Granularity:
    if _hashes_blocks(options) and options.prefix_match_unit not in (0, block_size):
        _refuse_unit(options.prefix_match_unit, f"the only group has blocks of {block_size}")
    return Granularity(block_size, block_size)


def _hashes_blocks(options: PlanOptions) -> bool:
    return options.prefix_caching or options.external_cache


def _has_uncached_state(groups: Sequence[CacheGroup]) -> bool:
    return any(group.spec.mamba_mode is MambaMode.NONE for group in groups)


def _allows_hits_inside_states(groups: Sequence[CacheGroup], hash_block_size: int, dcp_size: int) -> bool:
    """Whether states are cached at boundaries, and hash blocks are smaller than the blocks of states.

    With context parallelism hash blocks may also be as large.
    """
    finest = hash_block_size + 1 if dcp_size == 1 else hash_block_size
    return any(g.spec.mamba_mode is MambaMode.ALIGN and g.block_size >= finest for g in groups)


def _all_look_up(groups: Sequence[CacheGroup], hash_block_size: int, dcp_size: int) -> bool:
    """Whether a look-up can end at any end of a hash block, in every cacheable group."""
    return all(
        group.spec.fine_grained_hits or effective_block_size(group.spec, dcp_size) == hash_block_size
        for group in groups
        if group.spec.prefix_cacheable
    )


def _check_compression(groups: Sequence[CacheGroup], hit_alignment: int, hash_block_size: int) -> None:
    """Refuse sizes with which a hit could end inside a compressed entry, which holds several tokens."""
    for spec in (spec for group in groups for spec in group.specs):
        if spec.prefix_cacheable and hit_alignment % spec.hit_unit:
            _refuse_unit(hash_block_size, f"hits must be multiples of {spec.hit_unit} tokens, one entry")


def _refuse_unit(unit: int, remedy: str) -> None:
    raise InvalidArgument(f"{unit} does not fit the groups", field="prefix_match_unit", remedy=remedy)


# Block 0 means "no block" and is never allocated.
NULL_BLOCKS = 1


def blocks_per_request(groups: Sequence[CacheGroup], limits: RequestLimits, per_state: int = 1) -> int:
    """Return the blocks that one request of max_model_len tokens holds, summed over all groups, which share a pool.

    `per_state`: the blocks of a state.
    """
    return sum(
        max(spec.blocks_per_request(limits) for spec in group.specs) * (per_state if group.spec.is_state else 1)
        for group in groups
    )


def fitting_options(
    groups: Sequence[CacheGroup], num_blocks: int, options: PlanOptions, per_state: int = 1
) -> PlanOptions:
    """Return the options; if `fit_max_model_len` is set, with max_model_len shortened to what fits.

    Raises:
        InvalidArgument: not even one request fits in addition to the null block.
    """
    usable = num_blocks - NULL_BLOCKS * per_state
    if _fits(groups, usable, options, options.max_model_len, per_state):
        return options
    longest = _longest(groups, usable, options, per_state)
    if options.fit_max_model_len and longest:
        return replace(options, max_model_len=longest)
    needed = blocks_per_request(groups, options.limits, per_state) + NULL_BLOCKS * per_state
    shorten = f"shorten max_model_len to {longest} or " if longest else ""
    raise InvalidArgument(
        f"a request of {options.max_model_len} tokens needs {needed} blocks with the null block, "
        f"there are {num_blocks}",
        field="num_blocks" if options.num_blocks else "memory_bytes",
        remedy=f"{shorten}give more",
    )


def _fits(groups: Sequence[CacheGroup], usable: int, options: PlanOptions, max_model_len: int, per_state: int) -> bool:
    limits = replace(options.limits, max_model_len=max_model_len)
    return usable >= blocks_per_request(groups, limits, per_state)


def _longest(groups: Sequence[CacheGroup], usable: int, options: PlanOptions, per_state: int) -> int:
    """Return the length in tokens of the longest request that fits; 0 if none fits.

    Found by bisection, since a longer request never needs fewer blocks.
    """
    fits, too_long = 0, options.max_model_len
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if _fits(groups, usable, options, middle, per_state):
            fits = middle
        else:
            too_long = middle
    return fits


def bytes_per_block(groups: Sequence[CacheGroup], layout: Layout) -> int:
    """Return the bytes of one block of the pool, which are those of the widest group, aligned; 0 without groups."""
    if not groups:
        return 0
    if layout is Layout.LAYER_OUTERMOST:
        unit = _shared_unit(groups)
        return max(sum(_stride(spec, unit) for spec in group.specs) for group in groups)
    return round_up(max(group.bytes_per_block for group in groups), common_alignment(groups))


def projected(groups: Sequence[CacheGroup], layer_names: set[str]) -> tuple[CacheGroup, ...]:
    """Return the groups with the layers of one worker only. A group may become empty; it is kept, so that group ids
    stay the same.
    """
    return tuple(_projected(group, layer_names) for group in groups)


def place(groups: Sequence[CacheGroup], num_blocks: int, layout: Layout) -> WorkerPlan:
    """Compute strides and offsets of a worker's layers. `groups` must have only its layers (see `projected`)."""
    block_bytes, unit = bytes_per_block(groups, layout), _shared_unit(groups)
    tensors: list[TensorPlacement] = []
    for index, group in enumerate(groups):
        offset = 0
        for spec, names in _by_format(group).items():
            if layout is Layout.LAYER_OUTERMOST:
                block_stride = _stride(spec, unit)
                layer_stride = region = block_stride * num_blocks
            else:
                layer_stride, block_stride, region = spec.page_bytes, block_bytes, spec.page_bytes
            tensors.append(TensorPlacement(index, tuple(names), offset, layer_stride, block_stride))
            offset += len(names) * region
    return WorkerPlan(block_bytes, block_bytes * num_blocks, tuple(tensors))


def _shared_unit(groups: Sequence[CacheGroup]) -> int:
    """Return the bytes of which strides are multiples if groups share blocks, since they need equal ones; else 0."""
    return 0 if sum(bool(group.specs) for group in groups) == 1 else common_alignment(groups)


def _stride(spec: LayerSpec, shared_unit: int) -> int:
    """Return the bytes from one block of a layer to the next; `shared_unit`: see `_shared_unit`."""
    return round_up(spec.page_bytes, shared_unit or spec.block_stride_alignment)


def common_alignment(groups: Sequence[CacheGroup]) -> int:
    """Return the number of bytes of which every group's distance between blocks must be a multiple."""
    return math.lcm(*(spec.block_stride_alignment for group in groups for spec in group.specs))


def _projected(group: CacheGroup, layer_names: set[str]) -> CacheGroup:
    kept = [i for i, name in enumerate(group.layer_names) if name in layer_names]
    names = tuple(group.layer_names[i] for i in kept)
    return CacheGroup(names, tuple(group.specs[i] for i in kept), group.one_format, group.is_draft)


def _by_format(group: CacheGroup) -> dict[LayerSpec, list[str]]:
    names_of: dict[LayerSpec, list[str]] = {}
    for name, spec in zip(group.layer_names, group.specs, strict=True):
        names_of.setdefault(spec, []).append(name)
    return names_of
