"""Entries of the prefix cache in columns: what a replica tells of its published keys, one row per key.

    Replica.entries(blocks) -> Entries -> a store -> Entries -> Replica.recover(epoch, stamp tables, entries)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvplane_service.core.pool import BlockPool


@dataclass(frozen=True, slots=True)
class KeyRun:
    """So many rows one after another belong to this domain and group."""

    domain: str
    group: int
    count: int


@dataclass(slots=True)
class Entries:
    """Keys of blocks in columns.

    Attributes:
        digest_size: bytes of a digest.
        runs: cover the rows in order.
        block, stamp: where the content lies, and its version.
        num_tokens: of the prefix that the key names; 0 for the further keys of a block.
        age: u32, when the block was last used, as the keeper of the entries counts: a lower one is evicted earlier.
            Among equals the longer prefix is. The core tells none.
        digests: concatenated.
        bare_block, bare_stamp: blocks that carry no published key under this stamp.
        used_block, used_age: blocks that were used again later.
    """

    digest_size: int
    runs: list[KeyRun] = field(default_factory=list)
    block: Sequence[int] = field(default_factory=list)
    stamp: Sequence[int] = field(default_factory=list)
    num_tokens: Sequence[int] = field(default_factory=list)
    age: Sequence[int] = field(default_factory=list)
    digests: bytes | memoryview = b""
    bare_block: Sequence[int] = field(default_factory=list)
    bare_stamp: Sequence[int] = field(default_factory=list)
    used_block: Sequence[int] = field(default_factory=list)
    used_age: Sequence[int] = field(default_factory=list)

    def __len__(self) -> int:
        """Rows."""
        return len(self.block)


def collect(pool: BlockPool, blocks: Iterable[int], digest_size: int) -> Entries:
    """The published keys of these blocks; touches nothing. Within a run the rows keep the order of the blocks."""
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
        bare_block=bare,
        bare_stamp=[stamp[block] for block in bare],
    )
