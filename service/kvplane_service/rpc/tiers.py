"""Encode the tiers of a replica for DescribeReplica."""

from __future__ import annotations

from dataclasses import asdict

from kvplane.v1 import allocation_pb2 as pb
from kvplane_core.face.interface import ReplicaCore


def encode_tiers(replica: ReplicaCore) -> list[pb.TierStatus]:
    """Return the slots of each tier."""
    return [
        pb.TierStatus(
            kind=f"TIER_KIND_{spec.kind.name}",
            num_blocks=tier.num_slots,
            held_blocks=tier.num_held,
            shadow_blocks=tier.num_shadows,
            free_blocks=tier.num_free,
            hit_tokens=tier.hit_tokens,
            retained_blocks=tier.num_retained,
            groups=[
                pb.TierGroup(
                    held_blocks=use.held,
                    stored_blocks=use.stored,
                    loaded_blocks=use.loaded,
                    evicted_blocks=use.evicted,
                )
                for use in tier.uses
            ],
        )
        for tier, spec in zip(replica.tiers.each, replica.spec.tiers, strict=True)
    ]


def tier_counts(replica: ReplicaCore) -> dict[str, int]:
    """Return the counters of a replica with tiers; none of others."""
    return asdict(replica.tiers.counters) if replica.spec.tiers else {}
