"""The slots of one tier: which key each has, which are pinned, and which is evicted next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from kvplane.base.groups import Medium, TierKind, TierSpec
from kvplane.base.step import CacheEvent, RemoveReason
from kvplane_core.face.cache_events import CacheEvents
from kvplane_core.face.counters import GroupUse
from kvplane_core.face.entries import stored_events
from kvplane_core.face.keys import Key
from kvplane_core.spec.retained import DEVICE, PriorityLists, RetainedBlocks
from kvplane_core.spec.tiers.wanted import Wanted

MAX_HASHES = 1000  # per STORED event of all keys


class Tier:
    """One tier of a replica. A slot is free, has a key, is being written, or is only pinned (its key was dropped).

    Keys are evicted in the order of least recent use. A key that a load has put on the device again is a *shadow*: the
    device has it too, so shadows are evicted before all others, until the device is about to evict the key again. A key
    that is retained here, and is no shadow, is evicted after all others, those of a lower priority first. A tier that
    peers read has no shadows: what the device has is what they lack, and they read this tier alone.

    Attributes:
        number: index of the tier in the spec.
        medium: what the tier is called in events.
        num_slots: number of slots.
        is_of_peers: whether its slots are those of peers: they are never written, free or evicted here.
        is_lent: whether peers read it.
        recent: slot of each key that is neither a shadow nor retained; the one to evict first is the first.
        shadows: the same, of the shadows.
        kept: slot of each key that is retained.
        retained: these slots by priority.
        place: number of this place in `RetainedBlocks`; DEVICE if the tier retains nothing.
        most_retained: keys that are retained here for one owner.
        key: key of each slot that has one.
        version: version of each slot that has a key.
        pins: number of loads that read each slot; a pinned slot is not written.
        free: slots that were used and are free; the last one is used first.
        num_used: slots from this one on were never used.
        stale: slots for which the stamp table may have the version of content that no key here names: of a key that was
            dropped, or that this core never knew. A store may return such a key, until the slot is written or gets
            another version.
        writing: keys that jobs in flight write into slots of this tier.
        wanted: what is copied here early, as the tier's policy has it.
        events: keys that were stored or dropped, until `take_events`.
        uses: by group.
        hit_tokens: tokens by which loads made hits longer than the device's, where this is the farthest tier that they
            read.
    """

    def __init__(
        self, number: int, spec: TierSpec, block_sizes: Sequence[int], with_events: bool, retentions: RetainedBlocks
    ) -> None:
        """`block_sizes`: tokens of a block of each group. `with_events`: whether changes of keys are reported.
        `retentions`: of the replica; a tier that retains becomes a place of them.
        """
        self.number = number
        self.medium = Medium[spec.kind.name]
        self.num_slots = spec.num_blocks
        self.events = CacheEvents()
        self.uses = [GroupUse() for _ in block_sizes]
        self.hit_tokens = 0
        self._block_sizes = block_sizes
        self.is_of_peers = spec.kind is TierKind.PEERS
        self.is_lent = False
        self._with_events = with_events and not self.is_of_peers
        self.recent: dict[Key, int] = {}
        self.shadows: dict[Key, int] = {}
        self.kept: dict[Key, int] = {}
        self.retained = PriorityLists()
        self.most_retained = spec.most_retained
        self.place = DEVICE
        self._retentions = retentions
        if self.most_retained:
            retentions.tiers.append(self)
            self.place = len(retentions.tiers)
        self.key: dict[int, Key] = {}
        self.version: dict[int, int] = {}
        self.pins: dict[int, int] = {}
        self.free: list[int] = []
        self.num_used = self.num_slots if self.is_of_peers else 0  # none is taken, so none is free to be taken
        self.stale: set[int] = set()
        self.writing: set[Key] = set()
        self.wanted = Wanted(spec.save, spec.num_blocks)

    def find(self, key: Key) -> int | None:
        """Return the slot that has the key; None if no slot has it."""
        slot = self.recent.get(key)
        if slot is None and self.shadows:
            slot = self.shadows.get(key)
        if slot is None and self.kept:
            slot = self.kept.get(key)
        return slot

    def has(self, key: Key) -> bool:
        """Whether a slot has the key, or a job in flight writes it into one."""
        return key in self.writing or self.find(key) is not None

    @property
    def num_held(self) -> int:
        """Number of slots with a key."""
        return len(self.key)

    @property
    def num_shadows(self) -> int:
        """Number of keys that the device has again."""
        return len(self.shadows)

    @property
    def num_retained(self) -> int:
        """Number of keys that are evicted after all others."""
        return self.retained.num_free

    @property
    def num_stale(self) -> int:
        """Number of slots that the next eviction gives another version."""
        return len(self.stale)

    @property
    def num_free(self) -> int:
        """Number of slots that can be written without an eviction."""
        return len(self.free) + self.num_slots - self.num_used

    def in_order(self) -> Iterator[tuple[Key, int]]:
        """Yield (key, slot), the key that is evicted first first. The tier must not change meanwhile."""
        kept = ((self.key[slot], slot) for slot in self.retained)
        return chain(self.shadows.items(), self.recent.items(), kept)

    def take_slot(self) -> int | None:
        """Return a slot to write, evicting the key that is first in order; None if every slot is pinned or written."""
        if not self.free and self.num_used < self.num_slots:
            self.num_used += 1
            return self.num_used - 1
        if not self.free:
            victim = next((key for key, slot in self.in_order() if slot not in self.pins), None)
            if victim is None:
                return None
            self.drop(victim, RemoveReason.EVICTED)
        return self.free.pop()

    def store(self, key: Key, slot: int, version: int) -> None:
        """Record that a slot, which was taken and is written now, has the content of the key."""
        assert self.find(key) is None, f"tier {self.number} has the key in two slots"
        self.hold(key, slot, version)
        self.uses[key[1]].stored += 1
        if self._with_events:
            self.events.stored_in_tier(slot, key, self._block_sizes[key[1]], self.medium)

    def hold(self, key: Key, slot: int, version: int) -> None:
        """Give a slot a key, which is evicted last of those like it."""
        self.key[slot], self.version[slot] = key, version
        self.stale.discard(slot)
        self.uses[key[1]].held += 1
        self._enqueue(key, slot)

    def install(self, rows: Iterable[tuple[int, Key, int]]) -> None:
        """Take over (slot, key, version), the one to evict first first, in this unused tier, without events. The first
        row of a slot or a key counts.
        """
        for slot, key, version in rows:
            if slot not in self.key and key not in self.recent:
                self.store(key, slot, version)
        if self.is_of_peers:
            return  # all of its slots are used
        self.num_used = max(self.key, default=-1) + 1
        self.free = [slot for slot in range(self.num_used) if slot not in self.key]
        self.take_events()

    def set_peer(self, slot: int, key: Key, version: int) -> None:
        """Record that a slot of a peer has this key now, in this version. A load that reads what was there fails."""
        self.drop_slot(slot)
        self.drop(key)
        self.hold(key, slot, version)

    def drop_slot(self, slot: int) -> None:
        """Forget the key of a slot, if it has one."""
        if slot in self.key:
            self.drop(self.key[slot])

    def refresh(self, key: Key) -> None:
        """Make the key the last one to be evicted: it is used, or the device is about to evict it."""
        slot = self._dequeue(key)
        assert slot is not None, f"tier {self.number} does not have the key"
        self._enqueue(key, slot)

    def place_again(self, key: Key) -> None:
        """Put the key where it belongs now that other prefixes are retained."""
        slot = self.find(key)
        if slot is not None and key not in self.shadows and self.priority_of(key) != self.retained.priority.get(slot):
            self.refresh(key)

    def note_on_device(self, key: Key) -> None:
        """Record that the device has the key too."""
        if not self.is_lent:
            self.make_shadow(key)
        elif self.find(key) is not None:
            self.refresh(key)

    def make_shadow(self, key: Key) -> None:
        """Record that the device has the key again."""
        if key not in self.shadows:
            slot = self._dequeue(key)
            if slot is not None:
                self.shadows[key] = slot

    def _enqueue(self, key: Key, slot: int) -> None:
        priority = self.priority_of(key)
        if priority is None:
            self.recent[key] = slot
        else:
            self.kept[key] = slot
            self.retained.put(priority, slot)

    def _dequeue(self, key: Key) -> int | None:
        """Return the slot of a key, which is not in the order of eviction any more; None if no slot has it."""
        for keys in (self.recent, self.shadows, self.kept):
            if key in keys:
                self.retained.remove(keys[key])
                return keys.pop(key)
        return None

    def priority_of(self, key: Key) -> int | None:
        """Return the priority with which a key is retained here; None if it is not."""
        is_named = self.place != DEVICE and key in self._retentions.of_key
        return self._retentions.priority_of([key], self.place) if is_named else None

    def used_by_owners(self) -> list[int]:
        """Return the number of keys that each owner retains here, whether they have a slot or may get one."""
        owners = {name.owner for name in self._retentions.each} if self.place != DEVICE else ()
        return [self._retentions.used_by(owner)[self.place] for owner in owners]

    def note_lost(self, key: Key) -> None:
        """Record that no slot has, or will have, the key any more: it may be retained no longer."""
        if key in self._retentions.of_key:
            self._retentions.lost.append(key)

    def drop(self, key: Key, reason: RemoveReason = RemoveReason.DROPPED) -> bool:
        """Forget the key; returns False if the tier does not have it. A pinned slot becomes free with its last pin."""
        slot = self._dequeue(key)
        if slot is None:
            return False
        self.note_lost(key)
        del self.key[slot], self.version[slot]
        if not self.is_of_peers:
            self.stale.add(slot)
            if slot not in self.pins:
                self.free.append(slot)
        self.uses[key[1]].held -= 1
        self.uses[key[1]].evicted += reason is RemoveReason.EVICTED
        if self._with_events:
            self.events.removed(slot, (key,), reason, self.medium)
        return True

    def pin(self, slot: int) -> None:
        """Keep a slot that has a key from being written; its key becomes the last one to be evicted."""
        self.pins[slot] = self.pins.get(slot, 0) + 1
        self.refresh(self.key[slot])

    def unpin(self, slot: int) -> None:
        """Remove one pin; the slot becomes free if it has no key and no other pin."""
        self.pins[slot] -= 1
        if not self.pins[slot]:
            del self.pins[slot]
            if slot not in self.key and not self.is_of_peers:
                self.free.append(slot)

    def clear(self) -> None:
        """Forget all keys."""
        for key in [key for key, _ in self.in_order()]:
            self.drop(key, RemoveReason.UNVERIFIED)
        self.wanted.clear()

    def stored_events(self) -> Iterator[CacheEvent]:
        """Yield STORED events of all keys, of at most `MAX_HASHES` keys each."""
        return stored_events(self.in_order() if self._with_events else (), self._block_sizes, self.medium)

    def take_events(self) -> list[CacheEvent]:
        """Return and clear the events since the last call."""
        runs, self.events = self.events.runs, CacheEvents()
        return runs
