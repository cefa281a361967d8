"""Compute what tiers of host memory and disk hold of a model: slots, prompts, and tokens by group."""

from __future__ import annotations

from dataclasses import dataclass

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import GroupKind, ReplicaSpec, TierKind
from kvplane_service.core.planner import to_groups
from kvplane_service.core.tiers.rows import blocks_of_hit
from kvplane_service.models.sizing import Sizing


@dataclass(frozen=True, slots=True)
class TierGroup:
    """What a tier full of prompts of the full context length has of one group.

    Attributes:
        blocks_per_prompt: blocks that a hit of such a prompt needs.
        slots: those of the tier that hold blocks of the group.
        tokens: tokens whose keys and values, or states, these blocks have.
    """

    kind: GroupKind
    blocks_per_prompt: int
    slots: int
    tokens: int


@dataclass(frozen=True, slots=True)
class TierFigures:
    """What one tier of one rank holds.

    Attributes:
        num_bytes: its size.
        slot_bytes: memory of a slot, which has room for a block of the widest group.
        num_blocks: slots that fit: `TierSpec.num_blocks`.
        blocks_per_prompt: blocks that a hit of a prompt of the full context length needs, over all groups.
        prompts, prompt_tokens: such prompts that fit, and their tokens.
    """

    kind: TierKind
    num_bytes: int
    slot_bytes: int
    num_blocks: int
    blocks_per_prompt: int
    prompts: float
    prompt_tokens: int
    groups: tuple[TierGroup, ...]


def tier_figures(sizing: Sizing, kind: TierKind, num_bytes: int) -> TierFigures:
    """Return what a tier of this size holds on one rank.

    Raises InvalidArgument if it cannot hold a block of each group, or nothing is cached.
    """
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
    by_group = _blocks_per_prompt(sizing)
    per_prompt = sum(by_group)
    prompts = num_blocks / per_prompt
    groups = tuple(
        TierGroup(group.kind, blocks, int(prompts * blocks), int(prompts * blocks) * group.block_size)
        for group, blocks in zip(plan.groups, by_group, strict=True)
    )
    tokens = int(prompts * sizing.options.max_model_len)
    return TierFigures(kind, num_bytes, slot_bytes, num_blocks, per_prompt, prompts, tokens, groups)


def _blocks_per_prompt(sizing: Sizing) -> list[int]:
    """Return the blocks of each group that a hit needs: what a load reads, and what is saved of a prompt."""
    plan = sizing.plan()
    spec = ReplicaSpec(
        groups=to_groups(plan),
        num_blocks=2,  # nothing is allocated: the rules of the groups are asked
        max_model_len=plan.options.max_model_len,
        hash_block_size=plan.hash_block_size,
        scheduler_block_size=plan.scheduler_block_size,
        max_in_flight_tokens=plan.options.max_in_flight_tokens,
        partial_hits=plan.partial_hits,
    )
    unit = spec.scheduler_block_size
    return blocks_of_hit(spec, sizing.options.max_model_len // unit * unit)
