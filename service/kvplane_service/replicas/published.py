"""The published keys of a replica at one batch, read in slices between its steps.

    slice 1   follow   slice 2   follow   ...   the last slice

Between two slices the replica applies steps. Of what it publishes meanwhile only the events of blocks that were read
already count: those of the other blocks are in their slices. A key that moves from one block to another is removed
there and stored here, so it is found once wherever it moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvplane.base.events import KEY_BYTES, GroupDigest, domain_mask
from kvplane.base.step import CacheEvent, EventKind
from kvplane_core.face.interface import ReplicaCore
from kvplane_service.replicas.events import PublicationHold, part_of

SLICE_BLOCKS = 1024


class EntriesScan:
    """Reads one replica once."""

    def __init__(self, replica: ReplicaCore, hold: PublicationHold, slice_blocks: int = 0) -> None:
        """`hold`: has the events that wait for the execution of their step; they are in no slice. `slice_blocks`: by
        default SLICE_BLOCKS.
        """
        self._replica, self._hold, self._slice_blocks, self._next = replica, hold, slice_blocks or SLICE_BLOCKS, 1

    @property
    def has_ended(self) -> bool:
        """Whether all blocks were read."""
        return self._next >= self._replica.spec.num_blocks

    def read(self) -> list[CacheEvent]:
        """Return the published keys of the next slice as STORED events, without the positions of their blocks; with the
        first slice also those of the tiers. The core must be idle, and `follow` must have taken all batches.
        """
        is_first = self._next == 1
        blocks = range(self._next, min(self._next + self._slice_blocks, self._replica.spec.num_blocks))
        self._next = blocks.stop
        found = self._replica.entries(blocks)
        size, groups, first = found.digest_size, self._replica.spec.groups, 0
        events = []
        for run in found.runs:
            rows, first = range(first, first + run.count), first + run.count
            hashes = [bytes(found.digests[at * size : (at + 1) * size]) for at in rows]
            of_blocks, block_size = [found.block[at] for at in rows], groups[run.group].block_size
            stored = CacheEvent(EventKind.STORED, run.group, hashes, of_blocks, run.domain, block_size=block_size)
            events += self._hold.without_held(stored)
        return [*events, *self._replica.tiers.stored_events()] if is_first else events

    def follow(self, events: Iterable[CacheEvent]) -> list[CacheEvent]:
        """Return what of a batch's events concerns what was read."""
        seen = []
        for event in events:
            if event.kind is EventKind.CLEARED or (event.tier and self._next > 1):
                seen.append(event)
            elif not event.tier:
                seen += part_of(event, [at for at, block in enumerate(event.blocks) if block < self._next])
        return seen


class EntriesDigest:
    """The digest of keys on the device, by group; see GroupDigest."""

    def __init__(self, num_groups: int) -> None:
        self._keys, self._sums = [0] * num_groups, [0] * num_groups

    def take(self, events: Iterable[CacheEvent]) -> None:
        """Take the events of keys that were stored or removed."""
        for event in events:
            if event.kind is EventKind.CLEARED:
                self._keys, self._sums = [0] * len(self._keys), [0] * len(self._keys)
            elif not event.tier:
                sign = 1 if event.kind is EventKind.STORED else -1
                self._keys[event.group] += sign * len(event.hashes)
                self._sums[event.group] += sign * _sum(event.hashes, domain_mask(event.domain))

    def digests(self) -> list[GroupDigest]:
        """Return the digest of each group."""
        return [
            GroupDigest(group, keys, total % (1 << 8 * KEY_BYTES))
            for group, (keys, total) in enumerate(zip(self._keys, self._sums, strict=True))
        ]


def _sum(hashes: Sequence[bytes], mask: int) -> int:
    return sum(int.from_bytes(one[-KEY_BYTES:], "big") ^ mask for one in hashes)
