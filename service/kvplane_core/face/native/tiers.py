"""The tiers of the compiled core: what the service reads of them, and ends of engine lives."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from kvplane.base.groups import Medium, ReplicaSpec, TierKind
from kvplane.base.step import CacheEvent
from kvplane_core.cpp import _native
from kvplane_core.face.columns import SLICE_BLOCKS
from kvplane_core.face.counters import GroupUse, TierCounters
from kvplane_core.face.entries import stored_events
from kvplane_core.face.keys import Key
from kvplane_core.face.native.views import Read, tier_events_of

Unpack = Callable[[tuple[int, bytes]], Key]


class NativeTier:
    """One tier, with the counts that it had when this object was made."""

    def __init__(self, num_slots: int, counts: tuple[int, int, int, int, int, list[list[int]]]) -> None:
        self.num_slots = num_slots
        held, shadows, free, retained, self.hit_tokens, uses = counts
        self.num_held, self.num_shadows, self.num_free, self.num_retained = held, shadows, free, retained
        self.uses = [GroupUse(*use) for use in uses]


class NativeTiers:
    """What the service reads of the tiers: the attributes of `Tiers`."""

    def __init__(self, core: object, spec: ReplicaSpec) -> None:
        self.core, self._spec = core, spec

    @property
    def each(self) -> Sequence[NativeTier]:
        """Each tier, the nearest first."""
        rows = zip(self._spec.tiers, _native.read(self.core, "tiers"), strict=True)
        return [NativeTier(tier.num_blocks, counts) for tier, counts in rows]

    counters = Read(lambda counts: TierCounters(*counts), "tier_counters")  # since the replica began

    @property
    def has_keys(self) -> bool:
        """Whether a tier has a key."""
        return any(tier.num_held for tier in self.each)

    def open_jobs(self) -> dict[str, int]:
        """Return the number of jobs in flight by kind."""
        return dict(zip(("load", "save", "move"), _native.read(self.core, "open_jobs"), strict=True))

    def stored_events(self) -> list[CacheEvent]:
        """Return STORED events of all keys."""
        if not self._spec.events:
            return []
        key = unpacker(_native.read(self.core, "domains"), self._spec)
        sizes = [one.block_size for one in self._spec.groups]
        return [
            event
            for number, tier in enumerate(self._spec.tiers)
            if tier.kind is not TierKind.PEERS
            for event in stored_events(
                [(key(packed), slot) for packed, slot, _ in keys_of(self.core, number, tier.num_blocks)],
                sizes,
                Medium[tier.kind.name],
            )
        ]

    def take_events(self) -> list[CacheEvent]:
        """Return and clear the events of all tiers that are not in the result of a part."""
        return tier_events_of(_native.change(self.core, "take_tier_events"))

    def tier_of(self, domain: str, group: int, digest: bytes) -> int | None:
        """Return the number of the nearest tier that has a key; None if none has."""
        return _native.read(self.core, "tier_of", domain, group, digest)


def unpacker(domains: Sequence[str], spec: ReplicaSpec) -> Unpack:
    """Return a function that makes keys of those of the core."""
    num_groups = len(spec.groups)

    def key(packed: tuple[int, bytes]) -> Key:
        pair, digest = packed
        return domains[(pair - 1) // num_groups], (pair - 1) % num_groups, digest

    return key


def keys_of(core: object, number: int, num_slots: int) -> list[tuple[tuple[int, bytes], int, int]]:
    """Return (key, slot, version) of the slots with a key, in the order of eviction. They are read in slices, so that
    other threads get the interpreter in between.
    """
    keys, last = list[tuple[tuple[int, bytes], int, int]](), -1
    while len(keys) < num_slots:  # the tier of a core that changes meanwhile might not end
        piece = _native.read(core, "tier_keys", number, last, SLICE_BLOCKS)
        if not piece:
            break
        keys += piece
        last = piece[-1][1]
    return keys


def stamps_of(shown: Sequence[int]) -> array[int] | memoryview:
    """Return a stamp table as the core reads it."""
    return shown if isinstance(shown, array | memoryview) else array("Q", shown)
