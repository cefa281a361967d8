"""Published keys (keys that other clients may see): as columns for a store, and as STORED events for a new subscriber.

Replica.entries(blocks) -> Entries -> a store -> Entries -> Replica.recover(epoch, stamp tables, entries)
Replica.replay_events() -> STORED events -> a subscriber
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvplane.base.groups import Medium
from kvplane.base.step import CacheEvent
from kvplane_core.face.cache_events import CacheEvents
from kvplane_core.face.columns import pieces
from kvplane_core.face.keys import Key


@dataclass(frozen=True, slots=True)
class KeyRun:
    """The domain (name space of keys) and the group of the next `count` rows of an `Entries`."""

    domain: str
    group: int
    count: int


@dataclass(slots=True)
class Entries:
    """Keys of blocks in columns, one row per key.

    Attributes:
        digest_size: bytes of a digest.
        runs: domains and groups of the rows, in order.
        block, stamp: the block that holds the content, and its stamp: the version number of this content.
        num_tokens: tokens of the prefix that the key names; 0 for the second and further keys of a block.
        age: u32, time of the last use in a unit that the store chooses. After a recovery, blocks with a lower value are
            evicted first; of equal values, the block with the longer prefix. The core writes 0.
        digests: the digests of all rows, concatenated.
        unkeyed_block, unkeyed_stamp: blocks that have no published key, and their stamps: a store deletes its older
            rows for these blocks.
        used_block, used_age: blocks that were used after their rows were stored, and the times of these uses.
    """

    digest_size: int
    runs: list[KeyRun] = field(default_factory=list)
    block: Sequence[int] = field(default_factory=list)
    stamp: Sequence[int] = field(default_factory=list)
    num_tokens: Sequence[int] = field(default_factory=list)
    age: Sequence[int] = field(default_factory=list)
    digests: bytes | memoryview = b""
    unkeyed_block: Sequence[int] = field(default_factory=list)
    unkeyed_stamp: Sequence[int] = field(default_factory=list)
    used_block: Sequence[int] = field(default_factory=list)
    used_age: Sequence[int] = field(default_factory=list)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.block)


MAX_HASHES = 1000  # per STORED event


def stored_events(keys: Iterable[tuple[Key, int]], block_sizes: Sequence[int], medium: Medium) -> Iterator[CacheEvent]:
    """Yield STORED events of the keys of slots, of at most `MAX_HASHES` keys each."""
    for piece in pieces(sorted(keys), MAX_HASHES):
        events = CacheEvents()
        for key, slot in piece:
            events.stored_in_tier(slot, key, block_sizes[key[1]], medium)
        yield from events.runs
