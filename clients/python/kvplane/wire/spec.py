"""Conversion of ReplicaSpec and its tiers to and from protobuf."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import EvictionPolicy, Medium, ReplicaSpec, SavePolicy, TierSpec
from kvplane.v1 import replica_pb2 as pb
from kvplane.wire.same import decode_enum, decode_same, encode_enum, encode_same

# Specs with the default keep their earlier bytes.
_LRU, _BEHIND = EvictionPolicy.LRU, SavePolicy.BEHIND


def encode_spec(spec: ReplicaSpec) -> pb.ReplicaSpec:
    """Return the message of a replica's settings. Raises InvalidArgument for an impossible setting; the error's field
    names the setting.
    """
    spec.validate()
    return encode_same(
        spec,
        pb.ReplicaSpec,
        "spec",
        disable_caching=not spec.enable_caching,
        disable_events=not spec.events,
        eviction=0 if spec.eviction is _LRU else encode_enum(pb.EvictionPolicy, spec.eviction),
        blocks_per_state=0 if spec.blocks_per_state == 1 else spec.blocks_per_state,
        tiers=encode_tiers(spec.tiers),
    )


def decode_spec(message: pb.ReplicaSpec) -> ReplicaSpec:
    """Return the replica's settings of a message. Raises InvalidArgument for an impossible setting; the error's field
    names the setting.
    """
    spec = decode_same(
        ReplicaSpec,
        message,
        enable_caching=not message.disable_caching,
        events=not message.disable_events,
        blocks_per_state=message.blocks_per_state or 1,
        pool=_decode_pool(message.pool),
    )
    spec.validate()
    return spec


def _decode_pool(number: int) -> Medium:
    if number not in set(Medium):
        raise InvalidArgument(f"{number} is not a place of a pool", field="pool", remedy="use a newer service")
    return Medium(number)


def decode_policy(message: pb.ReplicaSpec | pb.ModelSource | pb.LayerSource) -> EvictionPolicy:
    """Return the eviction policy that a message names. Raises InvalidArgument for an unknown one."""
    return decode_enum(pb.EvictionPolicy, message.eviction, "eviction", _LRU)


def encode_tiers(tiers: Sequence[TierSpec]) -> list[pb.TierSpec]:
    """Return the messages of tiers."""
    saves = [0 if tier.save is _BEHIND else encode_enum(pb.SavePolicy, tier.save) for tier in tiers]
    each = enumerate(zip(tiers, saves, strict=True))
    return [encode_same(tier, pb.TierSpec, f"tiers[{index}]", save=save) for index, (tier, save) in each]


def decode_tiers(messages: Iterable[pb.TierSpec]) -> tuple[TierSpec, ...]:
    """Return the tiers of messages. Raises InvalidArgument for a tier without a kind."""
    return tuple(decode_same(TierSpec, tier, f"tiers[{index}].") for index, tier in enumerate(messages))
