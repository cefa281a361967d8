"""Random specs of replicas, as other clients write them: every kind, size, order, class, alignment, retention, drafter.

Most are meant well: what a spec must have is there. Some fields are drawn without regard to the others, so that each
contradiction occurs; `check_spec` refuses those, or they do no harm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import gcd, lcm
from random import Random
from typing import Any

from kvplane.base.groups import (
    DENSE_RETENTION,
    AlignSpec,
    EvictionPolicy,
    GroupKind,
    GroupSpec,
    MambaMode,
    ReplicaSpec,
)

LONGEST = 64  # tokens of a request
FULL, MLA = GroupKind.FULL_ATTENTION, GroupKind.MLA
WINDOWS = (GroupKind.SLIDING_WINDOW, GroupKind.SLIDING_WINDOW_MLA)
CHUNKED, STATE = GroupKind.CHUNKED_LOCAL, GroupKind.MAMBA
SPLIT = {FULL, MLA, *WINDOWS, STATE}
SIZES = [(4,), (4,), (2, 4), (4, 8), (2, 4, 8), (3, 6), (1, 2), (4, 6), (4, 16), (5,), (8,), (16,)]
WIDTHS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 17, 40, 64, 100]
KINDS = [FULL] * 4 + [*WINDOWS] * 2 + [CHUNKED] * 3 + [STATE] * 3
KINDS += [MLA, GroupKind.SINK_FULL, GroupKind.R_SWA, GroupKind.RING]
UNCACHED = [GroupKind.CROSS, STATE, GroupKind.RING, FULL, GroupKind.SLIDING_WINDOW, CHUNKED, GroupKind.R_SWA]


def draw_spec(seed: int) -> ReplicaSpec:
    """The spec of this seed."""
    rng = Random(seed)
    is_caching = rng.random() < 0.93
    sizes, kinds = rng.choice(SIZES), KINDS if is_caching else UNCACHED
    drawn = [rng.choice(kinds) for _ in range(rng.randrange(1, 6))]
    if is_caching and all(kind in (GroupKind.RING, GroupKind.CROSS) for kind in drawn):
        drawn.append(FULL)
    if len(drawn) == 1:
        sizes = sizes[-1:]
    context_parallel = rng.choice([1, 1, 1, 1, 2, 4])  # scales the blocks of the groups that are sharded
    unit = lcm(*sizes) * context_parallel
    groups = [_group(rng, kind, rng.choice(sizes), unit, is_caching) for kind in drawn]
    if context_parallel > 1:
        groups = [_sharded(rng, group, context_parallel) for group in groups]
    if rng.random() < 0.35:
        groups = _with_drafts(rng, groups)
    rng.shuffle(groups)
    spec = _replica(rng, groups, unit, is_caching)
    spec = replace(spec, groups=_classed(rng, spec.groups))
    return _odd(rng, spec) if rng.random() < 0.25 else spec


# -- groups ------------------------------------------------------------------------------------------------------------


def _group(rng: Random, kind: GroupKind, size: int, unit: int, is_caching: bool) -> GroupSpec:
    zeroes: dict[str, Any] = {"zero_new_blocks": rng.random() < 0.2}
    if kind in (*WINDOWS, GroupKind.R_SWA):
        retained = rng.choice([0, 0, 0, 1, 4]) if kind in WINDOWS else 0
        return GroupSpec(kind, size, window=rng.choice(WIDTHS), extra_retained_tokens=retained, **zeroes)
    if kind is CHUNKED:
        even = rng.choice([1, 2, 3, 4]) * unit
        return GroupSpec(kind, unit, chunk=rng.choice([even, even, 64, *WIDTHS]), **zeroes)
    if kind is GroupKind.SINK_FULL:
        return GroupSpec(kind, size, sink_tokens=size * rng.choice([1, 1, 2]), **zeroes)
    if kind is STATE:
        return _state(rng, size, is_caching, zeroes)
    return GroupSpec(kind, size, **zeroes)


def _state(rng: Random, size: int, is_caching: bool, zeroes: dict[str, Any]) -> GroupSpec:
    drafts = rng.choice([0, 0, 2, 4])
    if not is_caching and rng.random() < 0.7:
        return GroupSpec(STATE, LONGEST, speculative_blocks=drafts, **zeroes)
    checkpoints = rng.choice([0, 0, 1, 2, 3, size])
    return GroupSpec(
        STATE, size, mamba_mode=MambaMode.ALIGN, speculative_blocks=drafts, checkpoint_alignment=checkpoints, **zeroes
    )


def _sharded(rng: Random, group: GroupSpec, degree: int) -> GroupSpec:
    """States are not divided between ranks; chunks have the widest block anyway."""
    if group.kind in (STATE, CHUNKED) or rng.random() < 0.3:
        return group
    return replace(group, block_size=group.block_size * degree, sink_tokens=group.sink_tokens * degree)


def _with_drafts(rng: Random, groups: list[GroupSpec]) -> list[GroupSpec]:
    """Layers of a drafter in some groups; all groups may leave out the last matched block."""
    everywhere = rng.random() < 0.2
    for number, group in enumerate(groups):
        if group.kind in (STATE, CHUNKED) and rng.random() < 0.95:
            continue
        if everywhere or rng.random() < 0.5:
            groups[number] = replace(group, is_draft=rng.random() < 0.8, drops_last_block=rng.random() < 0.9)
    return groups


def form(group: GroupSpec) -> tuple[object, ...]:
    """What a look-up of this group depends on, said here once more."""
    family = FULL if group.kind in (FULL, MLA, GroupKind.SINK_FULL, GroupKind.R_SWA) else group.kind
    family = GroupKind.SLIDING_WINDOW if family in WINDOWS else family
    return family, group.block_size, group.window, group.chunk


def _classed(rng: Random, groups: tuple[GroupSpec, ...]) -> tuple[GroupSpec, ...]:
    """Mostly unset; by form, each its own, or some joined that differ."""
    way = rng.random()
    if way < 0.5:
        return groups
    forms = list(dict.fromkeys(map(form, groups)))
    classes = [forms.index(form(group)) + 3 for group in groups]
    if way > 0.75:
        classes = [one if rng.random() < 0.7 else 20 + number for number, one in enumerate(classes)]
    if way > 0.97:
        classes = [rng.randrange(3) for _ in groups]
    pairs = zip(groups, classes, strict=True)
    return tuple(replace(group, lookup_class=one) for group, one in pairs)


# -- the replica -------------------------------------------------------------------------------------------------------


def _replica(rng: Random, groups: list[GroupSpec], unit: int, is_caching: bool) -> ReplicaSpec:
    cached = [group.block_size for group in groups if group.is_cached] or [groups[0].block_size]
    fine, whole = gcd(*cached), lcm(*cached)
    if len(groups) > 1 and rng.random() < 0.3:
        fine = rng.choice([size for size in range(1, fine + 1) if fine % size == 0])
    aligned = whole if rng.random() < 0.7 or any(group.kind is CHUNKED for group in groups) else lcm(unit, whole)
    partial = rng.random() < 0.35
    if any(group.kind in (*WINDOWS, CHUNKED) and group.block_size != fine for group in groups):
        partial = partial and rng.random() < 0.1
    changes: dict[str, Any] = {}
    if any(group.kind is STATE for group in groups):
        sizes = [group.block_size for group in groups if group.kind is STATE]
        changes["align"] = AlignSpec(rng.choice([aligned, max(sizes), 0]), 4096, rng.random() < 0.5)
    if is_caching and any(group.kind in (*WINDOWS, STATE) for group in groups):
        changes["retention_interval"] = rng.choice([0, 0, DENSE_RETENTION, aligned, 2 * aligned])
    blocks = max(32, 4 * len(groups) * (LONGEST // min(group.block_size for group in groups)) // rng.choice([2, 4, 8]))
    kinds, policy = {group.kind for group in groups}, rng.choice([EvictionPolicy.LRU] * 4 + list(EvictionPolicy))
    if STATE in kinds and kinds & SPLIT == kinds != {STATE} and policy is EvictionPolicy.LRU and rng.random() < 0.4:
        changes["blocks_per_state"] = rng.choice([2, 3, 4])
        blocks *= changes["blocks_per_state"]
    return ReplicaSpec(
        tuple(groups),
        blocks,
        max_model_len=LONGEST,
        hash_block_size=fine,
        scheduler_block_size=aligned,
        max_in_flight_tokens=256,
        enable_caching=is_caching,
        partial_hits=partial,
        watermark_blocks=rng.choice([0, 0, 0, 1, 3]),
        hash_lookahead_tokens=rng.choice([0] * 8 + [1, 2]),
        prefill_lookahead=rng.choice([0] * 8 + [1, 2]),
        keep_divergence_boundary=rng.random() < 0.2,
        events=rng.random() < 0.9,
        eviction=policy,
        hint_values=rng.choice([0, 0, 3]),
        **changes,
    )


def _odd(rng: Random, spec: ReplicaSpec) -> ReplicaSpec:
    """One thing that does not go with the rest, or that only other kinds have."""
    number = rng.randrange(len(spec.groups))
    group = spec.groups[number]

    def other(**changes: Any) -> ReplicaSpec:
        groups = list(spec.groups)
        groups[number] = replace(group, **changes)
        return replace(spec, groups=tuple(groups))

    odd: list[Callable[[], ReplicaSpec]] = [
        lambda: other(block_size=rng.choice([1, 3, 5, 7, 12])),
        lambda: other(drops_last_block=True),
        lambda: other(is_draft=True),
        lambda: other(admission_cap_blocks=rng.choice([1, 2, 5, 64])),
        lambda: other(checkpoints_single_group_hits=True),
        lambda: other(speculative_blocks=rng.choice([1, 3])),
        lambda: other(mamba_mode=rng.choice(list(MambaMode))),
        lambda: other(extra_retained_tokens=rng.choice([1, 7, 100])),
        lambda: other(window=rng.choice([0, 5])),
        lambda: other(chunk=rng.choice([0, 6])),
        lambda: other(sink_tokens=rng.choice([0, 2, 400])),
        lambda: other(lookup_class=1),
        lambda: replace(spec, hash_block_size=rng.choice([1, 2, 3, 8])),
        lambda: replace(spec, scheduler_block_size=rng.choice([2, 12, 48, 96])),
        lambda: replace(spec, retention_interval=rng.choice([1, 3, 8, 24, 4096])),
        lambda: replace(spec, align=AlignSpec(rng.choice([0, 1, 3, 7, 48, 100]), rng.choice([0, 1, 4096]), True)),
        lambda: replace(spec, partial_hits=True),
        lambda: replace(spec, hash_lookahead_tokens=rng.choice([1, 5, 100])),
        lambda: replace(spec, prefill_lookahead=rng.choice([3, 9, 100])),
        lambda: replace(spec, blocks_per_state=rng.choice([2, 4])),
        lambda: replace(spec, max_in_flight_tokens=1),
        lambda: replace(spec, watermark_blocks=spec.num_blocks - 1),
    ]  # fmt: skip
    return rng.choice(odd)()
