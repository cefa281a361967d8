"""Tells of everything that is cached as if it had just been stored, for those who know nothing of a replica."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from kvplane.base.step import CacheEvent, EventKind
from kvplane_service.core.columns import U32, column
from kvplane_service.core.keys import Key
from kvplane_service.core.pool import BlockPool

MAX_HASHES = 1000  # of an event


def retell(pool: BlockPool, block_sizes: Sequence[int]) -> Iterator[CacheEvent]:
    """A STORED event for every key of a pool whose keys are all published; `block_sizes` are tokens, by group.

    Touches nothing; keys that nobody touched since they came back become no objects here.
    """
    num_tokens = np.frombuffer(pool.key_tokens, np.uint32)
    if pool.untouched is not None:
        for domain, group, blocks, digests in pool.untouched.runs(MAX_HASHES):
            size = block_sizes[group]
            starts = column(U32, (num_tokens[np.frombuffer(blocks, np.uint32)] - 1) // size * size)
            yield CacheEvent(EventKind.STORED, group, digests, blocks, domain, block_size=size, block_starts=starts)
    for domain, maps in pool.index.items():
        for group, by_digest in enumerate(maps):
            entries = iter(by_digest.items())
            while piece := list(islice(entries, MAX_HASHES)):
                yield from _told_one_by_one(pool, Key(domain, group, b""), piece, block_sizes[group])


def _told_one_by_one(
    pool: BlockPool, pair: Key, entries: list[tuple[bytes, int | list[int]]], size: int
) -> Iterator[CacheEvent]:
    """A key may be that of several blocks, or one of several of its block: then where it begins is not known."""
    primary, further = list[tuple[bytes, int]](), list[tuple[bytes, int]]()
    for digest, entry in entries:
        for block in [entry] if isinstance(entry, int) else entry:
            (primary if pool.key[block] == pair._replace(digest=digest) else further).append((digest, block))
    for told in (primary, further):
        if told:
            starts = [(pool.key_tokens[block] - 1) // size * size for _, block in primary] if told is primary else []
            hashes, blocks = zip(*told, strict=True)
            yield CacheEvent(
                EventKind.STORED, pair.group, hashes, blocks, pair.domain, block_size=size, block_starts=tuple(starts)
            )
