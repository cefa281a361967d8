"""Conversion of vLLM's KV cache config to the settings of a kvplane block pool (`ReplicaSpec`).

vLLM builds a coordinator with one manager per group. The class and the attributes of a manager state how its group uses
blocks. A kind of cache that kvplane does not have is refused; the error names the layers and their vLLM spec.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED
from vllm.v1.kv_cache_interface import KVCacheConfig, MLAAttentionSpec, SlidingWindowMLASpec

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import (
    DENSE_RETENTION,
    CommitRule,
    GroupKind,
    GroupSpec,
    HashAlgorithm,
    MambaMode,
    ReplicaSpec,
)

# By the class name of the group's manager in vLLM.
KINDS = {
    "FullAttentionManager": GroupKind.FULL_ATTENTION,
    "SlidingWindowManager": GroupKind.SLIDING_WINDOW,
    "ChunkedLocalAttentionManager": GroupKind.CHUNKED_LOCAL,
    "MambaManager": GroupKind.MAMBA,
    "RSWAManager": GroupKind.R_SWA,
    "CircularBufferManager": GroupKind.RING,
    "CrossAttentionManager": GroupKind.CROSS,
    "SinkFullAttentionManager": GroupKind.SINK_FULL,
}
WINDOWS = (GroupKind.SLIDING_WINDOW, GroupKind.SLIDING_WINDOW_MLA)


class UnsupportedModel(InvalidArgument):
    """The model has a kind of cache that kvplane does not have."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The arguments of vLLM's KVCacheManager that limit the block pool, in tokens or blocks."""

    max_model_len: int
    max_in_flight_tokens: int
    scheduler_block_size: int
    hash_block_size: int
    hash_lookahead_tokens: int
    prefill_lookahead: int
    watermark_blocks: int
    enable_caching: bool
    hash_algorithm: str


def limits_of(
    manager: Any,
    max_model_len: int,
    max_in_flight_tokens: int | None,
    scheduler_block_size: int,
    hash_block_size: int,
    options: Mapping[str, Any],
) -> Limits:
    """Return the limits of a KVCacheManager that was built with these arguments."""
    return Limits(
        max_model_len=max_model_len,
        max_in_flight_tokens=max_in_flight_tokens or max_model_len,
        scheduler_block_size=scheduler_block_size,
        hash_block_size=hash_block_size,
        hash_lookahead_tokens=options.get("num_hash_lookahead_tokens", 0),
        prefill_lookahead=options.get("num_prefill_lookahead", 0),
        watermark_blocks=manager.watermark_blocks,
        enable_caching=manager.enable_caching,
        hash_algorithm=manager.hash_algorithm,
    )


def unsupported(config: KVCacheConfig, coordinator: KVCacheCoordinator) -> str:
    """Return why kvplane cannot manage this KV cache, with the names of the layers and their spec; "" if it can."""
    if not config.kv_cache_groups:
        return "the model has no KV cache, as encoders have none"
    for group, manager in zip(config.kv_cache_groups, coordinator.single_type_managers, strict=True):
        spec, layers = group.kv_cache_spec, ", ".join(group.layer_names[:3]) or "no layer"
        name = type(manager).__name__
        if name not in KINDS:
            return f"layers {layers}: {type(spec).__name__} is managed by {name}, which kvplane does not have"
    return ""


def refuse_replay(config: KVCacheConfig) -> None:
    """Raise UnsupportedModel for layers with bounded replay of their window: after a hit a request computes its last
    window again, in pages of its own. The allocator's requests compute no token of a hit.
    """
    for group in config.kv_cache_groups:
        if group.kv_cache_spec.prefix_replay_tokens:
            layers = ", ".join(group.layer_names[:3])
            reason = f"layers {layers}: bounded replay of a sliding window (prefix_replay_tokens) is not supported"
            raise UnsupportedModel(reason, field="kv_cache_config", remedy="use vLLM's own scheduler for this model")


def replica_spec(
    config: KVCacheConfig, coordinator: KVCacheCoordinator, limits: Limits, commit: CommitRule, events: bool
) -> ReplicaSpec:
    """Return the settings of the block pool for this KV cache. Raises UnsupportedModel, or InvalidArgument for values
    that contradict each other.
    """
    if reason := unsupported(config, coordinator):
        raise UnsupportedModel(reason, field="kv_cache_config", remedy="use vLLM's own scheduler for this model")
    joint = {group: n for n, one in enumerate(getattr(coordinator, "attention_groups", ())) for group in one.group_ids}
    groups = [
        _group(group, manager, joint.get(number, 0))
        for number, (group, manager) in enumerate(
            zip(config.kv_cache_groups, coordinator.single_type_managers, strict=True)
        )
    ]
    interval = config.prefix_cache_retention_interval
    spec = ReplicaSpec(
        groups=tuple(groups),
        num_blocks=config.num_blocks,
        max_model_len=limits.max_model_len,
        hash_block_size=limits.hash_block_size,
        scheduler_block_size=limits.scheduler_block_size,
        max_in_flight_tokens=limits.max_in_flight_tokens,
        # vLLM computes the hashes; a service needs these only for prompts that its own callers ask about.
        hash_algorithm=HashAlgorithm(limits.hash_algorithm),
        hash_seed=os.environ.get("PYTHONHASHSEED") or DEFAULT_NONE_HASH_SEED,
        enable_caching=limits.enable_caching,
        retention_interval=DENSE_RETENTION if interval is None else int(interval),
        partial_hits=coordinator.enable_partial_hash_hits,
        watermark_blocks=limits.watermark_blocks,
        commit=commit,
        hash_lookahead_tokens=int(limits.hash_lookahead_tokens),  # vLLM may give a bool
        prefill_lookahead=limits.prefill_lookahead,
        events=events,
    )
    spec.validate()
    return spec


def _group(group: Any, manager: Any, lookup_class: int) -> GroupSpec:
    spec = group.kv_cache_spec
    has_checkpoints = getattr(manager, "has_prefill_checkpoint_blocks", False)
    kind = KINDS[type(manager).__name__]
    if isinstance(spec, SlidingWindowMLASpec):
        kind = GroupKind.SLIDING_WINDOW_MLA
    elif type(spec) is MLAAttentionSpec:
        kind = GroupKind.MLA
    window = spec.sliding_window if kind in WINDOWS else getattr(spec, "rswa_window", 0)
    return GroupSpec(
        kind=kind,
        block_size=manager.block_size,
        window=(window or 0) if kind in (*WINDOWS, GroupKind.R_SWA) else 0,
        chunk=spec.attention_chunk_size if kind is GroupKind.CHUNKED_LOCAL else 0,
        mamba_mode=MambaMode(spec.mamba_cache_mode or "none") if kind is GroupKind.MAMBA else MambaMode.NONE,
        speculative_blocks=spec.num_speculative_blocks if kind is GroupKind.MAMBA else 0,
        sink_tokens=spec.sink_len if kind is GroupKind.SINK_FULL else 0,
        is_draft=group.is_eagle_group,
        drops_last_block=getattr(manager, "use_eagle", False),
        admission_cap_blocks=manager.max_admission_blocks_per_request or 0,
        zero_new_blocks=manager.records_new_block_ids,
        lookup_class=lookup_class,
        layer_names=tuple(group.layer_names),
        extra_retained_tokens=getattr(spec, "extra_retained_tokens", 0) or 0,
        checkpoint_alignment=(spec.prefill_checkpoint_alignment or 0) if has_checkpoints else 0,
        checkpoints_single_group_hits=manager.shared_prefix_checkpoint,
    )
