"""Random groups, prompts and what places have of them."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

from kvplane.base.groups import CommitRule, GroupKind, GroupSpec, MambaMode, ReplicaSpec
from kvplane_core.face.setup import check_spec

SIZES = (4, 8, 16)
FULL = (GroupKind.FULL_ATTENTION, GroupKind.MLA)
WINDOWS = (GroupKind.SLIDING_WINDOW, GroupKind.SLIDING_WINDOW_MLA)


def draw_spec(rng: Random) -> ReplicaSpec:
    """Groups of one shape: one kind, a hybrid of equal or unequal block sizes, chunks, states, hits inside blocks, or a
    drafter with one group. (Where several classes drop a block, the order of the look-up matters, and the recordings of
    vLLM are the law.)
    """
    shape = rng.choice(["full", "window", "hybrid", "unequal", "chunked", "state", "inside", "drafts"])
    size = rng.choice(SIZES)
    hash_size, partial = size, False
    full = GroupSpec(rng.choice(FULL), size)
    groups = [full]
    if shape == "window":
        groups = [_window(rng, size)]
    elif shape in ("hybrid", "drafts"):
        groups += [_window(rng, size) for _ in range(rng.randrange(1, 4))]
        if shape == "hybrid" and rng.random() < 0.5:
            groups.append(_state(size))
    elif shape == "unequal":
        hash_size = 4
        groups = [GroupSpec(rng.choice(FULL), rng.choice(SIZES)), _window(rng, rng.choice(SIZES))]
        groups += [_state(rng.choice(SIZES))] if rng.random() < 0.5 else []
    elif shape == "chunked":
        groups += [GroupSpec(GroupKind.CHUNKED_LOCAL, size, chunk=size * rng.randrange(1, 5))]
    elif shape == "state":
        groups += [_state(size)]
    elif shape == "inside":
        hash_size, partial = 4, True
        groups = [GroupSpec(rng.choice(FULL), rng.choice(SIZES)), _state(rng.choice((8, 16)))]
    if shape == "drafts":
        groups[0] = _dropping(groups[0])
    rng.shuffle(groups)
    forms = list(dict.fromkeys(groups))
    classed = [_classed(group, forms.index(group)) for group in groups]
    if len(groups) == 1:
        hash_size = groups[0].block_size
    spec = ReplicaSpec(
        groups=tuple(classed),
        num_blocks=1 << 16,
        max_model_len=1 << 12,
        hash_block_size=hash_size,
        scheduler_block_size=math.lcm(*(group.block_size for group in groups)),
        max_in_flight_tokens=1,
        partial_hits=partial,
    )
    check_spec(spec)
    return spec


def drafting(rng: Random, spec: ReplicaSpec) -> ReplicaSpec:
    """Random groups that can drop a block do, of whole look-up classes, in either mode of commit."""
    dropping = {one.lookup_class for one in spec.groups if rng.random() < 0.4}
    groups = [
        replace(one, drops_last_block=one.drops_last_block or one.lookup_class in dropping)
        if one.kind not in (GroupKind.CHUNKED_LOCAL, GroupKind.MAMBA)
        else one
        for one in spec.groups
    ]
    return replace(spec, groups=tuple(groups), num_blocks=64, commit=rng.choice(list(CommitRule)))


def _window(rng: Random, size: int) -> GroupSpec:
    return GroupSpec(rng.choice(WINDOWS), size, window=rng.choice([1, 2, size, size + 1, size + 2, 3 * size, 40]))


def _state(size: int) -> GroupSpec:
    return GroupSpec(GroupKind.MAMBA, size, mamba_mode=MambaMode.ALIGN)


def _dropping(group: GroupSpec) -> GroupSpec:
    return GroupSpec(group.kind, group.block_size, window=group.window, drops_last_block=True)


def _classed(group: GroupSpec, lookup_class: int) -> GroupSpec:
    return GroupSpec(
        group.kind, group.block_size, group.window, group.chunk, group.mamba_mode,
        drops_last_block=group.drops_last_block, lookup_class=lookup_class,
    )  # fmt: skip


def draw_entries(rng: Random, num_units: int) -> set[int]:
    """Which hash blocks a group of a place has: mostly one part of the prompt, so that hits of all lengths occur."""
    share, end = rng.choice([0.5, 0.8, 0.95, 1.0]), rng.randint(0, num_units)
    return {unit for unit in range(1, num_units + 1) if rng.random() < (share if unit <= end else 0.3)}
