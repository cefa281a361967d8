"""Compute what tiers of host memory and disk hold of a model: slots, prompts, and tokens by group."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import GroupKind, ReplicaSpec, SavePolicy, TierKind, TierSpec
from kvplane_core.face.hit_rules import blocks_kept, blocks_of_hit
from kvplane_core.face.setup import check_tiers
from kvplane_plan.models.sizing import Sizing
from kvplane_plan.planner import to_groups


@dataclass(frozen=True, slots=True)
class TierGroup:
    """What a tier full of prompts of the full context length has of one group.

    Attributes:
        blocks_per_prompt: blocks that a hit of such a prompt needs.
        checkpoint_blocks: further blocks of the prompt, which are kept for hits that end inside it.
        slots: those of the tier that hold blocks of the group.
        tokens: tokens whose keys and values, or states, these blocks have.
    """

    kind: GroupKind
    blocks_per_prompt: int
    checkpoint_blocks: int
    slots: int
    tokens: int


@dataclass(frozen=True, slots=True)
class TierFigures:
    """What one tier of one rank holds.

    Attributes:
        num_bytes: its size.
        slot_bytes: memory of a slot, which has room for a block of the widest group.
        num_blocks: slots that fit: `TierSpec.num_blocks`.
        save: when blocks are copied into it: `TierSpec.save`.
        blocks_per_prompt: blocks that a hit of a prompt of the full context length needs, over all groups.
        checkpoint_blocks: further blocks of such a prompt, for hits that end inside it.
        checkpoints_apart: the tokens between these ends; 0 without checkpoints.
        prompts, prompt_tokens: such prompts that fit with their checkpoints, and their tokens.
        prompts_without: such prompts that fit without checkpoints.
    """

    kind: TierKind
    num_bytes: int
    slot_bytes: int
    num_blocks: int
    save: SavePolicy
    blocks_per_prompt: int
    checkpoint_blocks: int
    checkpoints_apart: int
    prompts: float
    prompt_tokens: int
    prompts_without: float
    groups: tuple[TierGroup, ...]


@dataclass(frozen=True, slots=True)
class TierSize:
    """A tier to plan.

    Attributes:
        num_bytes: its size on one rank.
        save, checkpoint_percent: as in `TierSpec`; the percentage is that of the first tier, for each tier.
    """

    kind: TierKind
    num_bytes: int
    save: SavePolicy = SavePolicy.BEHIND
    checkpoint_percent: int = 0


def tier_figures(sizing: Sizing, tier: TierSize) -> TierFigures:
    """Return what a tier of this size holds on one rank.

    Raises InvalidArgument if it cannot hold a block of each group, nothing is cached, or checkpoints have no effect.
    """
    kind, num_bytes = tier.kind, tier.num_bytes
    if not sizing.prefix_caching:
        raise InvalidArgument("without prefix caching no block has a key", field=kind.value, remedy="turn caching on")
    plan = sizing.plan()
    slot_bytes = kind.slot_bytes(max(group.bytes_per_block for group in plan.groups))
    num_blocks, needed = num_bytes // slot_bytes, len(plan.groups)
    if num_blocks < needed:
        raise InvalidArgument(
            f"{num_bytes:,} bytes are {num_blocks} slots of {slot_bytes:,} bytes, and the model has {needed} groups",
            field=kind.value,
            remedy=f"give at least {needed * slot_bytes:,} bytes, or leave the tier out",
        )
    spec = _spec(sizing, tier, num_blocks)
    by_group, further = _blocks_per_prompt(spec), _checkpoint_blocks(spec, sizing.max_batched_tokens)
    per_prompt, checkpoints = sum(by_group), sum(further)
    prompts = num_blocks / (per_prompt + checkpoints)
    groups = tuple(
        TierGroup(group.kind, needs, more, held := int(prompts * (needs + more)), held * group.block_size)
        for group, needs, more in zip(plan.groups, by_group, further, strict=True)
    )
    return TierFigures(
        kind,
        num_bytes,
        slot_bytes,
        num_blocks,
        tier.save,
        per_prompt,
        checkpoints,
        spec.kept_every,
        prompts,
        int(prompts * sizing.options.max_model_len),
        num_blocks / per_prompt,
        groups,
    )


def _spec(sizing: Sizing, tier: TierSize, num_slots: int) -> ReplicaSpec:
    """Return the replica with this tier alone, whose groups have the rules that are asked."""
    plan = sizing.plan()
    spec = ReplicaSpec(
        groups=to_groups(plan),
        num_blocks=2,  # nothing is allocated
        max_model_len=plan.options.max_model_len,
        hash_block_size=plan.hash_block_size,
        scheduler_block_size=plan.scheduler_block_size,
        max_in_flight_tokens=plan.options.max_in_flight_tokens,
        partial_hits=plan.partial_hits,
        tiers=(TierSpec(tier.kind, num_slots, tier.save, tier.checkpoint_percent),),
    )
    check_tiers(spec)
    return spec


def _whole(spec: ReplicaSpec, num_tokens: int) -> int:
    """Return the part of these tokens that is whole blocks of every group."""
    return num_tokens // spec.scheduler_block_size * spec.scheduler_block_size


def _blocks_per_prompt(spec: ReplicaSpec) -> list[int]:
    """Return the blocks of each group that a hit needs: what a load reads, and what is saved of a prompt."""
    return blocks_of_hit(spec, _whole(spec, spec.max_model_len))


def _checkpoint_blocks(spec: ReplicaSpec, batched_tokens: int) -> list[int]:
    """Return the blocks of each group that checkpoints keep in addition."""
    length, chunk = _whole(spec, spec.max_model_len), max(_whole(spec, batched_tokens), spec.scheduler_block_size)
    without = replace(spec, tiers=())
    return [
        more - fewer
        for more, fewer in zip(blocks_kept(spec, length, chunk), blocks_kept(without, length, chunk), strict=True)
    ]
