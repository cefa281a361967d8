"""Published keys of a replica in columns, for a store; and as STORED events, for a follower that has no state yet.

Replica.entries(blocks) -> Entries -> a store -> Entries -> Replica.recover(epoch, stamp tables, entries)
Replica.replay_events() -> STORED events -> a follower
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from kvplane.base.step import CacheEvent, EventKind
from kvplane_service.core.columns import U32, column
from kvplane_service.core.keys import Key
from kvplane_service.core.pool import BlockPool


@dataclass(frozen=True, slots=True)
class KeyRun:
    """`count` consecutive rows belong to this domain and group."""

    domain: str
    group: int
    count: int


@dataclass(slots=True)
class Entries:
    """Keys of blocks in columns.

    Attributes:
        digest_size: bytes of a digest.
        runs: cover the rows in order.
        block, stamp: the block of the content, and its version.
        num_tokens: of the prefix that the key names; 0 for the further keys of a block.
        age: u32, time of the last use in a unit of the store's. Lower ages are evicted first, and of equal ages longer
            prefixes. The core writes 0.
        digests: concatenated.
        unkeyed_block, unkeyed_stamp: blocks that have no published key under this stamp.
        used_block, used_age: later uses of blocks.
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
        """The number of rows."""
        return len(self.block)


def collect(pool: BlockPool, blocks: Iterable[int], digest_size: int) -> Entries:
    """The published keys of these blocks, in their order within each run. Changes nothing."""
    bare: list[int] = []
    rows: dict[tuple[str, int], list[tuple[int, int, bytes]]] = {}
    horizon, key_of, stamp = pool.executed_through, pool.key_of, pool.stamp
    for block in blocks:
        key = key_of(block)
        if key is None or pool.key_step[block] > horizon:
            bare.append(block)
            continue
        rows.setdefault(key[:2], []).append((block, pool.key_tokens[block], key.digest))
        for more in pool.more_keys.get(block, ()):
            rows.setdefault(more[:2], []).append((block, 0, more.digest))
    flat = [row for run in rows.values() for row in run]
    return Entries(
        digest_size,
        runs=[KeyRun(domain, group, len(run)) for (domain, group), run in rows.items()],
        block=[block for block, _, _ in flat],
        stamp=[stamp[block] for block, _, _ in flat],
        num_tokens=[num_tokens for _, num_tokens, _ in flat],
        age=[0] * len(flat),
        digests=b"".join([digest for _, _, digest in flat]),
        unkeyed_block=bare,
        unkeyed_stamp=[stamp[block] for block in bare],
    )


MAX_HASHES = 1000  # per event


def replay_events(pool: BlockPool, block_sizes: Sequence[int]) -> Iterator[CacheEvent]:
    """STORED events for all keys of a pool whose keys are all published; `block_sizes`: tokens, by group.

    Changes nothing. Keys that are still packed stay packed.
    """
    num_tokens = np.frombuffer(pool.key_tokens, np.uint32)
    if pool.lazy_keys is not None:
        for domain, group, blocks, digests in pool.lazy_keys.runs(MAX_HASHES):
            size = block_sizes[group]
            starts = column(U32, (num_tokens[np.frombuffer(blocks, np.uint32)] - 1) // size * size)
            yield CacheEvent(EventKind.STORED, group, digests, blocks, domain, block_size=size, block_starts=starts)
    for domain, maps in pool.index.items():
        for group, by_digest in enumerate(maps):
            entries = iter(by_digest.items())
            while piece := list(islice(entries, MAX_HASHES)):
                yield from _events_of_entries(pool, Key(domain, group, b""), piece, block_sizes[group])


def _events_of_entries(
    pool: BlockPool, pair: Key, entries: list[tuple[bytes, int | list[int]]], size: int
) -> Iterator[CacheEvent]:
    """Events of indexed keys; without block_starts for further keys, whose tokens a store does not keep."""
    primary, further = list[tuple[bytes, int]](), list[tuple[bytes, int]]()
    for digest, entry in entries:
        for block in [entry] if isinstance(entry, int) else entry:
            (primary if pool.key[block] == pair._replace(digest=digest) else further).append((digest, block))
    for rows in (primary, further):
        if rows:
            starts = [(pool.key_tokens[block] - 1) // size * size for _, block in primary] if rows is primary else []
            hashes, blocks = zip(*rows, strict=True)
            yield CacheEvent(
                EventKind.STORED, pair.group, hashes, blocks, pair.domain, block_size=size, block_starts=tuple(starts)
            )
