"""What a replica shows of its keys, read from the pool of the specification alone: the oracle of `entries`,
`stored_events` and `cached_columns`, which both cores have from the same code.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kvplane.base.groups import CommitRule
from kvplane.base.step import CacheEvent
from kvplane_core.face.entries import Entries
from kvplane_core.spec.replica import Replica

Rows = dict[tuple[str, int], list[tuple[Any, ...]]]  # by domain and group, in order


def keys_of(replica: Replica) -> Iterator[tuple[int, bool, Any, int]]:
    """Yield each key of the pool: its block, whether it is the block's first one, the key, and its tokens or 0."""
    pool = replica.coordinator.pool
    for block in range(1, pool.num_blocks):
        if (first := pool.key[block]) is not None:
            yield block, True, first, pool.key_tokens[block]
            yield from ((block, False, further, 0) for further in pool.more_keys.get(block, ()))


def order_of(replica: Replica) -> list[int]:
    """Return all blocks in the order in which a store learns of them: the next victim first, then those in use."""
    pool = replica.coordinator.pool
    free = [*pool.free, *pool.retained]
    in_use = [block for block in range(1, pool.num_blocks) if block not in set(free)]
    return free + in_use + list(replica.tiers.ids)


def shown(replica: Replica, blocks: Iterable[int] | None) -> tuple[Rows, list[tuple[int, int]]]:
    """Return the published keys of blocks and slots, and those without one, with stamps or versions."""
    pool, rows, bare = replica.coordinator.pool, defaultdict[tuple[str, int], list[tuple[Any, ...]]](list), []
    found = defaultdict[int, list[tuple[Any, int]]](list)
    for block, _, key, num_tokens in keys_of(replica):
        if pool.key_step[block] <= pool.executed_through:
            found[block].append((key, num_tokens))
    for one in order_of(replica) if blocks is None else blocks:
        stamp = pool.stamp[one] if one < pool.num_blocks else replica.tiers.held(one)[1]
        if one >= pool.num_blocks and (held := replica.tiers.held(one)[0]) is not None:
            found[one] = [(held, 0)]
        for (domain, group, digest), num_tokens in found[one]:
            rows[domain, group].append((one, stamp, num_tokens, digest))
        if not found[one]:
            bare.append((one, stamp))
    return dict(rows), bare


def rows_of(entries: Entries) -> tuple[Rows, list[tuple[int, int]]]:
    """Return entries in the form of `shown`."""
    size, at, rows = entries.digest_size, 0, Rows()
    for run in entries.runs:
        assert (run.domain, run.group) not in rows, "the rows of a domain and a group follow each other"
        rows[run.domain, run.group] = [
            (*columns, bytes(entries.digests[row * size : (row + 1) * size]))
            for row in range(at, at + run.count)
            for columns in [(entries.block[row], entries.stamp[row], entries.num_tokens[row])]
        ]
        at += run.count
    assert at == len(entries)
    return rows, list(zip(entries.unkeyed_block, entries.unkeyed_stamp, strict=True))


def announced(replica: Replica) -> set[tuple[Any, ...]]:
    """Return what STORED events say of all keys: step in flight or 0, domain, group, digest, block, start of the block
    for a first key, else None.
    """
    pool, sizes, found = replica.coordinator.pool, [one.block_size for one in replica.spec.groups], set()
    for block, is_first, (domain, group, digest), num_tokens in keys_of(replica):
        step = pool.key_step[block] if pool.key_step[block] > pool.executed_through else 0
        start = num_tokens - (num_tokens % sizes[group] or sizes[group]) if is_first else None
        found.add((step, domain, group, digest, block, start))
    return found


def announced_by(events: Iterable[tuple[int, CacheEvent]]) -> set[tuple[Any, ...]]:
    """Return events in the form of `announced`."""
    return {
        (step, event.domain, event.group, bytes(digest), block, start)
        for step, event in events
        for starts in [list[int | None](event.block_starts) or [None] * len(event.blocks)]
        for digest, block, start in zip(event.hashes, event.blocks, starts, strict=True)
    }


def cached(replica: Replica, digests: Sequence[bytes], domain: str) -> list[bytes]:
    """Return, by group, a byte for each digest: whether the replica's own requests may hit it."""
    pool, is_safe = replica.coordinator.pool, replica.spec.commit is CommitRule.SAFE
    usable = {
        key for block, _, key, _ in keys_of(replica) if not is_safe or pool.key_step[block] <= pool.executed_through
    }
    return [bytes((domain, group, one) in usable for one in digests) for group in range(len(replica.spec.groups))]
