"""Conversion of ReplicaSpec, GroupSpec and AlignSpec to and from protobuf."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import TypeVar

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import (
    AlignSpec,
    CommitRule,
    EvictionPolicy,
    GroupKind,
    GroupSpec,
    HashAlgorithm,
    MambaMode,
    Medium,
    ReplicaSpec,
    SavePolicy,
    TierKind,
    TierSpec,
)
from kvplane.v1 import replica_pb2 as pb
from kvplane.wire.columns import build

_E = TypeVar("_E", bound=Enum)

_BEHIND = SavePolicy.BEHIND
_SAME_IN_GROUP = (
    "block_size",
    "window",
    "chunk",
    "speculative_blocks",
    "sink_tokens",
    "is_draft",
    "drops_last_block",
    "admission_cap_blocks",
    "zero_new_blocks",
    "lookup_class",
    "page_bytes",
    "extra_retained_tokens",
    "checkpoint_alignment",
    "checkpoints_single_group_hits",
)
_SAME_IN_ALIGN = ("block_size", "chunk_limit", "stop_at_tail")
_SAME_IN_REPLICA = (
    "num_blocks",
    "max_model_len",
    "hash_block_size",
    "scheduler_block_size",
    "max_in_flight_tokens",
    "hash_seed",
    "retention_interval",
    "partial_hits",
    "watermark_blocks",
    "hash_lookahead_tokens",
    "prefill_lookahead",
    "keep_divergence_boundary",
    "hint_values",
)


def encode_spec(spec: ReplicaSpec) -> pb.ReplicaSpec:
    """Return the message of a replica's settings. Raises InvalidArgument for an impossible setting; the error's field
    names the setting.
    """
    spec.validate()
    fields = {name: getattr(spec, name) for name in _SAME_IN_REPLICA}
    fields["groups"] = [_encode_group(group, f"groups[{index}]") for index, group in enumerate(spec.groups)]
    fields["hash_algorithm"] = encode_enum(pb.HashAlgorithm, "HASH_ALGORITHM", spec.hash_algorithm)
    fields["commit"] = encode_enum(pb.CommitRule, "COMMIT_RULE", spec.commit)
    if spec.eviction is not EvictionPolicy.LRU:  # specs with the default keep their earlier bytes
        fields["eviction"] = encode_enum(pb.EvictionPolicy, "EVICTION_POLICY", spec.eviction)
    if spec.blocks_per_state > 1:
        fields["blocks_per_state"] = spec.blocks_per_state
    if spec.pool:
        fields["pool"] = int(spec.pool)
    fields["tiers"] = encode_tiers(spec.tiers)
    fields["disable_caching"] = not spec.enable_caching
    fields["disable_events"] = not spec.events
    fields["align"] = build(pb.AlignSpec, "align", {name: getattr(spec.align, name) for name in _SAME_IN_ALIGN})
    return build(pb.ReplicaSpec, "spec", fields)


def decode_spec(message: pb.ReplicaSpec) -> ReplicaSpec:
    """Return the replica's settings of a message. Raises InvalidArgument for an impossible setting; the error's field
    names the setting.
    """
    spec = ReplicaSpec(
        groups=tuple(_decode_group(group, f"groups[{index}]") for index, group in enumerate(message.groups)),
        hash_algorithm=decode_enum(
            pb.HashAlgorithm,
            "HASH_ALGORITHM",
            message.hash_algorithm,
            "hash_algorithm",
            HashAlgorithm.KVPLANE,
        ),
        commit=decode_enum(pb.CommitRule, "COMMIT_RULE", message.commit, "commit", CommitRule.SAFE),
        eviction=decode_policy(message),
        enable_caching=not message.disable_caching,
        events=not message.disable_events,
        tiers=decode_tiers(message.tiers),
        blocks_per_state=message.blocks_per_state or 1,
        pool=_decode_pool(message.pool),
        align=AlignSpec(**{name: getattr(message.align, name) for name in _SAME_IN_ALIGN}),
        **{name: getattr(message, name) for name in _SAME_IN_REPLICA},
    )
    spec.validate()
    return spec


def _decode_pool(number: int) -> Medium:
    if number not in set(Medium):
        raise InvalidArgument(f"{number} is not a place of a pool", field="pool", remedy="use a newer service")
    return Medium(number)


def decode_policy(message: pb.ReplicaSpec | pb.ModelSource | pb.LayerSource) -> EvictionPolicy:
    """Return the eviction policy that a message names. Raises InvalidArgument for an unknown one."""
    return decode_enum(pb.EvictionPolicy, "EVICTION_POLICY", message.eviction, "eviction", EvictionPolicy.LRU)


def encode_enum(enum_type: EnumTypeWrapper, prefix: str, value: Enum) -> int:
    """Return the proto number of a Python enum value. Its proto name is `prefix`, "_" and the value in capitals."""
    return enum_type.Value(f"{prefix}_{value.value.upper()}")


def decode_enum(enum_type: EnumTypeWrapper, prefix: str, number: int, field: str, default: _E) -> _E:
    """Return the Python enum value of a proto number; 0 stands for `default`. Raises InvalidArgument for an unknown
    number.
    """
    if not number:
        return default
    name = enum_type.DESCRIPTOR.values_by_number.get(number)
    if name is None:
        names = ", ".join(enum_type.keys())
        raise InvalidArgument(f"{number} is not a value of the enum", field=field, remedy=f"use one of {names}")
    return type(default)(name.name.removeprefix(f"{prefix}_").lower())


def _encode_group(group: GroupSpec, where: str) -> pb.GroupSpec:
    fields = {name: getattr(group, name) for name in _SAME_IN_GROUP}
    fields["kind"] = encode_enum(pb.GroupKind, "GROUP_KIND", group.kind)
    fields["mamba_mode"] = encode_enum(pb.MambaMode, "MAMBA_MODE", group.mamba_mode)
    fields["layer_names"] = group.layer_names
    return build(pb.GroupSpec, where, fields)


def encode_tiers(tiers: Sequence[TierSpec]) -> list[pb.TierSpec]:
    """Return the messages of tiers."""
    return [
        build(
            pb.TierSpec,
            f"tiers[{index}]",
            {
                "kind": encode_enum(pb.TierKind, "TIER_KIND", tier.kind),
                "num_blocks": tier.num_blocks,
                # Specs with the default keep their earlier bytes.
                "save": encode_enum(pb.SavePolicy, "SAVE_POLICY", tier.save) if tier.save is not _BEHIND else 0,
                "checkpoint_percent": tier.checkpoint_percent,
                "retained_percent": tier.retained_percent,
            },
        )
        for index, tier in enumerate(tiers)
    ]


def decode_tiers(messages: Iterable[pb.TierSpec]) -> tuple[TierSpec, ...]:
    """Return the tiers of messages. Raises InvalidArgument for a tier without a kind."""
    return tuple(_decode_tier(tier, f"tiers[{index}]") for index, tier in enumerate(messages))


def _decode_tier(message: pb.TierSpec, where: str) -> TierSpec:
    save = decode_enum(pb.SavePolicy, "SAVE_POLICY", message.save, f"{where}.save", _BEHIND)
    kind = decode_tier_kind(message.kind, where)
    return TierSpec(kind, message.num_blocks, save, message.checkpoint_percent, message.retained_percent)


def decode_tier_kind(number: int, where: str) -> TierKind:
    """Return the kind of a tier. Raises InvalidArgument if it has none, or an unknown one."""
    if not number:
        raise InvalidArgument("the tier has no kind", field=f"{where}.kind", remedy="use a value of the enum TierKind")
    return decode_enum(pb.TierKind, "TIER_KIND", number, f"{where}.kind", TierKind.HOST)


def _decode_group(message: pb.GroupSpec, where: str) -> GroupSpec:
    if not message.kind:
        raise InvalidArgument(
            "the group has no kind", field=f"{where}.kind", remedy="use a value of the enum GroupKind"
        )
    return GroupSpec(
        kind=decode_enum(pb.GroupKind, "GROUP_KIND", message.kind, f"{where}.kind", GroupKind.FULL_ATTENTION),
        mamba_mode=decode_enum(pb.MambaMode, "MAMBA_MODE", message.mamba_mode, f"{where}.mamba_mode", MambaMode.NONE),
        layer_names=tuple(message.layer_names),
        **{name: getattr(message, name) for name in _SAME_IN_GROUP},
    )
