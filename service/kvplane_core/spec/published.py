"""The published keys of a pool: as columns for a store, and as STORED events for a new subscriber."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

import numpy as np

from kvplane.base.step import CacheEvent, EventKind
from kvplane_core.face.columns import U32, column
from kvplane_core.face.entries import MAX_HASHES, Entries, KeyRun
from kvplane_core.spec.pool import BlockPool
from kvplane_core.spec.tiers.tiers import Tiers


def every_id(pool: BlockPool, tiers: Tiers, blocks: Iterable[int] | None) -> Iterable[int]:
    """Return these blocks; for None, the free blocks in eviction order, the other blocks, and the slots of tiers."""
    if blocks is not None:
        return blocks
    free, is_free = [*pool.free, *pool.retained], bytearray(pool.num_blocks)
    for block in free:
        is_free[block] = True
    return chain(free, [block for block in range(1, pool.num_blocks) if not is_free[block]], tiers.ids)


def collect(pool: BlockPool, tiers: Tiers, digest_size: int, blocks: Iterable[int]) -> Entries:
    """Return the published keys of these blocks, and of these slots of tiers, whose ids are above the pool's. Rows are
    sorted by domain (name space of keys) and group, then in the order of `blocks`.
    """
    bare: list[tuple[int, int]] = []
    rows: dict[tuple[str, int], list[tuple[int, int, int, bytes]]] = {}
    horizon, key_of, stamp = pool.executed_through, pool.key_of, pool.stamp
    for block in blocks:
        if block >= pool.num_blocks:
            key, version = tiers.held(block)
            if key is None:
                bare.append((block, version))
            else:
                rows.setdefault(key[:2], []).append((block, version, 0, key[2]))
            continue
        key = key_of(block)
        if key is None or pool.key_step[block] > horizon:
            bare.append((block, stamp[block]))
            continue
        domain, group, digest = key
        rows.setdefault((domain, group), []).append((block, stamp[block], pool.key_tokens[block], digest))
        for domain, group, digest in pool.more_keys.get(block, ()):
            rows.setdefault((domain, group), []).append((block, stamp[block], 0, digest))
    flat = [row for run in rows.values() for row in run]
    return Entries(
        digest_size,
        runs=[KeyRun(domain, group, len(run)) for (domain, group), run in rows.items()],
        block=[block for block, _, _, _ in flat],
        stamp=[version for _, version, _, _ in flat],
        num_tokens=[num_tokens for _, _, num_tokens, _ in flat],
        age=[0] * len(flat),
        digests=b"".join([digest for _, _, _, digest in flat]),
        unkeyed_block=[block for block, _ in bare],
        unkeyed_stamp=[version for _, version in bare],
    )


def replay_events(pool: BlockPool, block_sizes: Sequence[int]) -> Iterator[CacheEvent]:
    """Yield STORED events for all keys of the pool.

    The caller must ensure that every key is published (other clients may see it): no key may wait for the execution of
    its step. `block_sizes`: by group, tokens per block. Changes nothing; recovered keys stay packed (`KeyTable`).
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
                yield from _events_of_entries(pool, domain, group, piece, block_sizes[group])


def stored_events(pool: BlockPool, block_sizes: Sequence[int]) -> Iterator[tuple[int, CacheEvent]]:
    """Yield STORED events for all keys of the pool, each with the step in flight that registered the keys; 0: the keys
    are published.

    `block_sizes`: by group, tokens per block. Changes nothing.
    """
    primary: dict[tuple[int, str, int], list[tuple[bytes, int]]] = {}
    further: dict[tuple[int, str, int], list[tuple[bytes, int]]] = {}
    for block in range(pool.num_blocks):
        key = pool.key_of(block)
        if key is None:
            continue
        step = pool.key_step[block] if pool.key_step[block] > pool.executed_through else 0
        primary.setdefault((step, *key[:2]), []).append((key[2], block))
        for domain, group, digest in pool.more_keys.get(block, ()):
            further.setdefault((step, domain, group), []).append((digest, block))
    for rows_of, has_starts in ((primary, True), (further, False)):
        for (step, domain, group), rows in rows_of.items():
            size = block_sizes[group]
            for at in range(0, len(rows), MAX_HASHES):
                hashes, blocks = zip(*rows[at : at + MAX_HASHES], strict=True)
                starts = [(pool.key_tokens[block] - 1) // size * size for block in blocks] if has_starts else []
                yield (
                    step,
                    CacheEvent(
                        EventKind.STORED, group, hashes, blocks, domain, block_size=size, block_starts=tuple(starts)
                    ),
                )


def _events_of_entries(
    pool: BlockPool, domain: str, group: int, entries: list[tuple[bytes, int | list[int]]], size: int
) -> Iterator[CacheEvent]:
    """Yield STORED events for these keys of the pool's index.

    The events of second and further keys of a block have no `block_starts`: the pool does not know the lengths of their
    prefixes.
    """
    primary, further = list[tuple[bytes, int]](), list[tuple[bytes, int]]()
    for digest, entry in entries:
        for block in [entry] if isinstance(entry, int) else entry:
            (primary if pool.key[block] == (domain, group, digest) else further).append((digest, block))
    for rows in (primary, further):
        if rows:
            starts = [(pool.key_tokens[block] - 1) // size * size for _, block in primary] if rows is primary else []
            hashes, blocks = zip(*rows, strict=True)
            yield CacheEvent(
                EventKind.STORED, group, hashes, blocks, domain, block_size=size, block_starts=tuple(starts)
            )
