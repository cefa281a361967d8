"""The spec of a replica as numbers, from which the compiled core is made."""

from __future__ import annotations

from kvplane.base.groups import (
    CommitRule,
    EvictionPolicy,
    GroupKind,
    GroupSpec,
    MambaMode,
    Medium,
    ReplicaSpec,
    SavePolicy,
)
from kvplane.base.hashing import HashScheme
from kvplane_core.face.setup import most_ahead

# The numbers that types.h gives to these.
KINDS = {kind: number for number, kind in enumerate(GroupKind)}  # that of MAMBA is the one of states that are cached
UNCACHED_STATE = len(KINDS)
SAVES = {policy: number for number, policy in enumerate(SavePolicy)}
POLICIES = {policy: number for number, policy in enumerate(EvictionPolicy)}


def settings(spec: ReplicaSpec, digest_size: int) -> list[int]:
    """Return the fields of a spec, in the order of `New` in module.cpp."""
    return [
        spec.num_blocks, spec.max_model_len, spec.hash_block_size, spec.scheduler_block_size, int(spec.enable_caching),
        spec.kept_every, int(spec.partial_hits), spec.watermark_blocks, int(spec.commit is CommitRule.SAFE),
        spec.prefill_lookahead, int(spec.keep_divergence_boundary), int(spec.events), digest_size,
        spec.hash_lookahead_tokens, spec.align.block_size, spec.align.chunk_limit, int(spec.align.stop_at_tail),
        POLICIES[spec.eviction], spec.hint_values, most_ahead(spec), spec.checkpoint_percent, spec.blocks_per_state,
    ]  # fmt: skip


def of_tiers(spec: ReplicaSpec) -> list[list[int]]:
    """Return the medium of each tier, its number of slots, its policy, and how many keys an owner may retain there."""
    return [[int(Medium[tier.kind.name]), tier.num_blocks, SAVES[tier.save], tier.most_retained] for tier in spec.tiers]


def of_hashes(scheme: HashScheme) -> tuple[bytes, tuple[object, int] | None]:
    """Return the digest before a first block, and the function by which the core hashes tokens; None: Python does."""
    return scheme.none_hash, scheme.compiled()


def of_group(group: GroupSpec) -> list[int]:
    """Return the fields of a group of layers of a normalized spec, in the order of `GroupSpec` in types.h."""
    is_uncached = group.kind is GroupKind.MAMBA and group.mamba_mode is not MambaMode.ALIGN
    kind = UNCACHED_STATE if is_uncached else KINDS[group.kind]
    sinks = group.sink_tokens // group.block_size
    return [
        kind, group.block_size, group.window, group.chunk, int(group.is_draft), int(group.drops_last_block),
        group.admission_cap_blocks, int(group.zero_new_blocks), group.lookup_class, group.extra_retained_tokens,
        group.speculative_blocks, group.checkpoint_alignment, int(group.checkpoints_single_group_hits), sinks,
    ]  # fmt: skip
