"""Removes the keys of many blocks of a pool at once, or keeps those that the stamps in the page memory confirm.

A stamp is the version number of the content of a block. Work is done by column: a million keys are removed in half a
second; block by block takes several times as long.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kvplane.base.groups import NULL_BLOCK
from kvplane.base.step import CacheEvent, EventKind, RemoveReason
from kvplane_core.face.columns import SLICE_BLOCKS, Ints, Words, behind_reset, words_of
from kvplane_core.face.keys import Key
from kvplane_core.spec.key_maps import LAZY_KEY, parts_of, take_entries

if TYPE_CHECKING:
    from kvplane_core.spec.pool import BlockPool

_DOMAIN, _GROUP, _DIGEST = map(itemgetter, range(3))  # of a key

_Lost: TypeAlias = tuple[str, int, Sequence[bytes], Sequence[int]]  # domain, group, digests and their blocks


def keyed_blocks(pool: BlockPool) -> Iterator[Ints]:
    """Yield arrays of the blocks that have a key, ascending; each array is computed when the caller requests it."""
    num_tokens = np.frombuffer(pool.key_tokens, np.uint32)
    for start in range(0, pool.num_blocks, SLICE_BLOCKS):
        blocks = start + np.flatnonzero(num_tokens[start : start + SLICE_BLOCKS])
        if len(blocks):
            yield blocks


def confirm(pool: BlockPool, blocks: Ints, shown: Words) -> Ints:
    """Mark keys as executed if the page memory still has the content of their block; return all other blocks.

    `blocks`: blocks that have keys. `shown`: by block, the stamp (version number of the content) in the page memory.
    The memory has the content if its stamp equals that of the pool and was issued after the last reset of the memory,
    and if the step that registered the key is executed.
    """
    within = blocks[: np.searchsorted(blocks, len(shown))]
    stamps, steps = np.frombuffer(pool.stamp, np.uint64), np.frombuffer(pool.key_step, np.uint64)
    proven = np.zeros(len(blocks), np.bool_)
    proven[: len(within)] = (shown[within] == stamps[within]) & (steps[within] <= pool.executed_through)
    if len(shown):
        proven[: len(within)] &= behind_reset(shown[within], int(shown[NULL_BLOCK]))
    steps[blocks[proven]] = 0
    return blocks[~proven]


def any_key_has(pool: BlockPool, stamps: set[int], without: set[int]) -> bool:
    """Whether one of these stamps belongs to a block that has a key and is not in `without`."""
    keyed = np.frombuffer(pool.key_tokens, np.uint32) > 0
    keyed[list(without)] = False
    return bool(np.isin(np.frombuffer(pool.stamp, np.uint64)[keyed], words_of(list(stamps))).any())


def drop_all_keys(pool: BlockPool, blocks: Ints, reason: RemoveReason) -> Generator[None]:
    """Remove all keys of these blocks, and give each block a new stamp (version number of its content).

    Every block must have a key. Emits one REMOVED event per domain (name space of keys) and group. The first slice does
    this; the others free memory.
    """
    emptied: list[object] = []
    pool.free.forget(blocks.tolist())  # in ascending order
    for domain, group, digests, of_blocks in _unregister_all(pool, blocks, emptied):
        if pool.with_events and of_blocks:
            event = CacheEvent(EventKind.REMOVED, group, digests, of_blocks, domain=domain, reason=reason)
            pool.events.append(event)
    pool.restamp_all(blocks)
    yield from _free(emptied)


def forget_all_keys(pool: BlockPool, blocks: Ints) -> Generator[None]:
    """Do what `drop_all_keys` does, but emit no events."""
    emptied: list[object] = []
    pool.free.forget(blocks.tolist())
    for _ in _unregister_all(pool, blocks, emptied):
        pass
    pool.restamp_all(blocks)
    yield from _free(emptied)


def _free(emptied: list[object]) -> Generator[None]:
    """Free the maps of the index, one after each yield."""
    yield
    while emptied:
        emptied.pop()
        yield


def _unregister_all(pool: BlockPool, blocks: Ints, emptied: list[object]) -> Iterator[_Lost]:
    """Remove all keys of these blocks; appends to `emptied` the maps that the index no longer needs."""
    for (domain, group), (of_pair, digests) in _by_pair(pool, blocks.tolist()).items():
        if (domain, group) == LAZY_KEY[:2]:
            taken = pool.take_lazy_keys(of_pair)
            pool.lose_primary(of_pair, np.array(of_pair, np.intp))
            yield from taken
            continue
        by_digest = pool.index[domain][group]
        entries = take_entries(by_digest, digests)
        if pool.more_keys or entries != of_pair:
            rows = list(zip(digests, entries, of_pair, strict=True))
            digests, of_pair, several = [], [], []
            for digest, entry, block in rows:
                if entry == block and block not in pool.more_keys:
                    digests.append(digest)
                    of_pair.append(block)
                else:  # the block has further keys, or the key further blocks
                    several.append(block)
                    if entry is not None:
                        by_digest[digest] = entry
            yield from _unregister_each(pool, several)
        pool.lose_primary(of_pair, blocks if len(of_pair) == len(blocks) else np.array(of_pair, np.intp))
        emptied += chain.from_iterable(map(parts_of, pool.drop_empty(domain)))
        yield domain, group, digests, of_pair


def _by_pair(pool: BlockPool, blocks: list[int]) -> dict[tuple[str, int], tuple[list[int], list[bytes]]]:
    """Return the blocks, and the digests of their primary keys, by domain and group of that key."""
    keys: list[Any] = list(map(pool.key.__getitem__, blocks))
    if len(set(map(_DOMAIN, keys))) == len(set(map(_GROUP, keys))) == 1:  # mostly; takes half as long as a loop
        return {keys[0][:2]: (blocks, list(map(_DIGEST, keys)))}
    alike: dict[tuple[str, int], tuple[list[int], list[bytes]]] = {}
    for block, (domain, group, digest) in zip(blocks, keys, strict=True):
        of_pair, digests = alike.get((domain, group)) or alike.setdefault((domain, group), ([], []))
        of_pair.append(block)
        digests.append(digest)
    return alike


def _unregister_each(pool: BlockPool, blocks: list[int]) -> Iterator[_Lost]:
    keys: dict[tuple[str, int], list[tuple[Key, int]]] = {}
    for block in blocks:
        for key in pool.unregister(block):
            keys.setdefault(key[:2], []).append((key, block))
    for (domain, group), found in keys.items():
        yield domain, group, [digest for (_, _, digest), _ in found], [block for _, block in found]
