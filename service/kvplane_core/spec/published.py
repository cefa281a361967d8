"""The published keys of a pool: as columns for a store, and as STORED events for a new subscriber."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from kvplane.base.step import CacheEvent, EventKind
from kvplane_core.face.entries import MAX_HASHES, Entries, KeyRun
from kvplane_core.spec.pool import BlockPool
from kvplane_core.spec.tiers.tiers import Tiers


def every_id(pool: BlockPool, tiers: Tiers, blocks: Iterable[int] | None) -> Iterable[int]:
    """Return these blocks; for None, the free blocks in eviction order, the other blocks, and the slots of tiers."""
    if blocks is not None:
        return blocks
    free = [*pool.free, *pool.retained]
    return chain(free, sorted(set(range(1, pool.num_blocks)).difference(free)), tiers.ids)


def collect(pool: BlockPool, tiers: Tiers, digest_size: int, blocks: Iterable[int]) -> Entries:
    """Return the published keys of these blocks, and of these slots of tiers, whose ids are above the pool's. Rows are
    sorted by domain (name space of keys) and group, then in the order of `blocks`.
    """
    bare: list[tuple[int, int]] = []
    rows: dict[tuple[str, int], list[tuple[int, int, int, bytes]]] = {}
    horizon, stamp = pool.executed_through, pool.stamp
    for block in blocks:
        if block >= pool.num_blocks:
            key, version = tiers.held(block)
            if key is None:
                bare.append((block, version))
            else:
                rows.setdefault(key[:2], []).append((block, version, 0, key[2]))
            continue
        key = pool.key[block]
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


def stored_events(pool: BlockPool, block_sizes: Sequence[int]) -> Iterator[tuple[int, CacheEvent]]:
    """Yield STORED events for all keys of the pool, each with the step in flight that registered the keys; 0: the keys
    are published.

    `block_sizes`: by group, tokens per block. The events of second and further keys of a block have no `block_starts`:
    the pool does not know the lengths of their prefixes. Changes nothing.
    """
    found: dict[tuple[bool, int, str, int], list[tuple[bytes, int]]] = {}
    for block in pool.keyed():
        step = pool.key_step[block] if pool.key_step[block] > pool.executed_through else 0
        for number, key in enumerate((pool.key[block], *pool.more_keys.get(block, ()))):
            assert key is not None, "keyed"
            found.setdefault((number > 0, step, *key[:2]), []).append((key[2], block))
    for (is_further, step, domain, group), rows in found.items():
        size = block_sizes[group]
        for at in range(0, len(rows), MAX_HASHES):
            hashes, blocks = zip(*rows[at : at + MAX_HASHES], strict=True)
            starts = () if is_further else tuple((pool.key_tokens[block] - 1) // size * size for block in blocks)
            event = CacheEvent(EventKind.STORED, group, hashes, blocks, domain, block_size=size, block_starts=starts)
            yield step, event
