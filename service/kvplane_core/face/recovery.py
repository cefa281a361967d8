"""Verifies the keys in a store against the stamps in the page memory, for a pool that is not in use yet.

A stamp is the version number of a block's content. Entries and stamp tables come in, a `RecoveredState` goes out, whose
columns the pool takes over. A store may lose, repeat or reorder what was written to it. An entry is accepted only if
the memory of every rank still has the stamp that the store has for this entry: no stamp is used twice in one
incarnation of the memory, so equal stamps mean equal content.

Rows are processed in columns and never become objects, since a million of them must be recovered within a second.
Nothing is shared with the pool before the pool takes the result, so the verification may run on another thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvplane.base.groups import NULL_BLOCK, ReplicaSpec
from kvplane.base.stamps import MAX_EPOCH, Stamp, in_time
from kvplane_core.face.columns import (
    U32,
    U64,
    Bytes,
    Ints,
    Mask,
    Words,
    behind_reset,
    column,
    rows_in_order,
    words_of,
)
from kvplane_core.face.entries import Entries
from kvplane_core.face.keys import Key
from kvplane_core.face.setup import num_reserved, state_groups

_MAX_U32 = (1 << 32) - 1

Pairs = list[tuple[str, int]]  # (domain, group) by number


@dataclass(frozen=True, slots=True)
class RecoveryOutcome:
    """How many stored rows were recovered, and how many were not, by reason.

    Attributes:
        kept: rows that are keys of the pool now.
        unproven: rows whose stamp is not that of their block in the page memory.
        repeated: rows whose key the block already has.
        impossible: rows with a block, group or digest size that the pool does not have.
    """

    kept: int
    unproven: int
    repeated: int
    impossible: int


@dataclass(frozen=True, slots=True)
class RecoveredState:
    """The columns of a pool after a recovery, which no core has read yet.

    Attributes:
        outcome: how many rows were recovered or not, for logs and metrics.
        epoch: the highest epoch of any stamp in the memory.
        stored_epoch: the highest epoch of any stamp in the entries, proven or not.
        stamp, key_tokens: by block, its stamp and the tokens of the prefix that its primary key names; 0 for blocks
            without a key.
        names: (domain, group) of keys, by number.
        pair, block, digest: per primary key, the number of its name, its block and its digest; a block has one row at
            most, and several blocks may have the same key.
        free: the free blocks in the order of eviction, those without a key first.
        num_bare: how many these are.
        further: (block, key) of keys other than the primary one of their block.
        slots: (id, key, version) of slots of tiers, the one used longest ago first.
    """

    outcome: RecoveryOutcome
    epoch: int
    stored_epoch: int
    stamp: array[int]
    key_tokens: array[int]
    names: list[tuple[str, int]]
    pair: Ints
    block: Ints
    digest: Bytes
    free: Ints
    num_bare: int
    further: list[tuple[int, Key]]
    slots: list[tuple[int, Key, int]]

    def buffers(self) -> tuple[memoryview, memoryview, memoryview, memoryview]:
        """Return `pair`, `block` and `free`, each as u32, and the bytes of the digests."""
        pair, block, free = (np.ascontiguousarray(one, np.uint32).data for one in (self.pair, self.block, self.free))
        return pair, block, free, np.ascontiguousarray(self.digest).reshape(-1).data


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The properties of an unused pool that a recovery depends on.

    Attributes:
        num_blocks: number of blocks, the null block included.
        num_groups: number of KV cache groups.
        digest_size: bytes of a key's digest.
        reserved: blocks that the pool never releases, such as attention sinks.
        num_stamps: entries of a stamp table: above the blocks are the slots of tiers, with versions as stamps.
        blocks_per_state: as in `ReplicaSpec`.
        state_groups: the groups of states, if these take several blocks.
    """

    num_blocks: int
    num_groups: int
    digest_size: int
    reserved: tuple[int, ...] = ()
    num_stamps: int = 0
    blocks_per_state: int = 1
    state_groups: frozenset[int] = frozenset()

    @classmethod
    def of(cls, spec: ReplicaSpec, digest_size: int) -> PoolShape:
        """Return the shape of the pool of a replica."""
        states = state_groups(spec) if spec.blocks_per_state > 1 else frozenset[int]()
        sizes = spec.num_blocks, len(spec.groups), digest_size
        reserved = tuple(range(1, num_reserved(spec)))
        return cls(*sizes, reserved, spec.num_stamps, spec.blocks_per_state, states)


class _Rows(NamedTuple):
    """Stored keys as columns: `pair` is an index into `Pairs` (domain and group), and `digest` has one row of bytes per
    key.
    """

    pair: Ints
    block: Ints
    stamp: Words
    num_tokens: Ints
    age: Ints
    digest: Bytes

    def select(self, wanted: Mask) -> _Rows:
        """Return the rows for which the mask is true."""
        if wanted.all():
            return self
        at = np.flatnonzero(wanted)
        return _Rows._make(column[at] for column in self)


def verify_entries(shape: PoolShape, tables: Sequence[Sequence[int]], stored: Iterable[Entries]) -> RecoveredState:
    """Select the stored entries whose content the page memory still has, and return them as columns for the pool.

    Args:
        shape: the properties of the pool.
        tables: for each rank, the stamps in its memory, one per block.
        stored: the entries in any order; if two name a primary key for the same block, the first one is taken.
    """
    entries, pairs = list(stored), Pairs()
    fitting = [one for one in entries if one.digest_size == shape.digest_size]
    foreign = [np.asarray(one.stamp, np.uint64) for one in entries if one.digest_size != shape.digest_size]
    shown = [words_of(table) for table in tables]
    rows = _stack(fitting, shape.digest_size, pairs)
    possible = rows.select(_are_possible(rows, pairs, shape))
    all_proven = possible.select(_are_proven(possible, shown, shape))
    proven = all_proven.select(all_proven.block < shape.num_blocks)
    slots = _slots(all_proven.select(all_proven.block >= shape.num_blocks), pairs)
    row_of = _first_rows(proven, shape.num_blocks)
    is_first = row_of[proven.block] == np.arange(len(proven.block))
    first, others = _without_doubles(proven.select(is_first), proven.select(~is_first))
    if shape.state_groups:
        first, others = _without_overlaps(first, others, pairs, shape)
    bare = _without_key(first.block, shape.num_blocks)
    further = _further_keys(others, proven, row_of, pairs)
    num_tokens = np.zeros(shape.num_blocks, np.uint32)
    num_tokens[first.block] = first.num_tokens
    stamp = np.zeros(shape.num_blocks, np.uint64)
    stamp[first.block] = first.stamp
    keyed = _eviction_order(first, _last_uses(first, fitting, num_tokens))
    free = np.setdiff1d(bare, [0, *shape.reserved], assume_unique=True)
    return RecoveredState(
        RecoveryOutcome(
            kept=len(first.block) + len(further) + len(slots),
            unproven=len(possible.block) - len(first.block) - len(others.block) - len(slots),
            repeated=len(others.block) - len(further),
            impossible=sum(map(len, entries)) - len(possible.block),
        ),
        _newest_epoch(*shown),
        _newest_epoch(rows.stamp, *foreign),
        column(U64, stamp),
        column(U32, num_tokens),
        pairs,
        first.pair,
        first.block,
        first.digest,
        np.concatenate([free, keyed]),
        len(free),
        further,
        slots,
    )


def _newest_epoch(*stamps: Words) -> int:
    """Return the highest epoch in several arrays of stamps; 0 if there is no stamp."""
    mask = np.uint64(Stamp(0, MAX_EPOCH, 0).pack())
    return max((Stamp.unpack(int((some & mask).max())).epoch for some in stamps if some.size), default=0)


def _stack(stored: list[Entries], digest_size: int, pairs: Pairs) -> _Rows:
    """Join the rows of all entries to one set of columns; appends their (domain, group) pairs to `pairs`."""
    number: dict[tuple[str, int], int] = {}
    runs = [run for entries in stored for run in entries.runs]
    numbers = [number.setdefault((run.domain, run.group), len(number)) for run in runs]
    pairs.extend(number)
    digests = b"".join([entries.digests for entries in stored])
    return _Rows(
        np.repeat(np.array(numbers, np.uint32), np.array([run.count for run in runs], np.intp)),
        _join([entries.block for entries in stored], np.uint32),
        _join([entries.stamp for entries in stored], np.uint64),
        _join([entries.num_tokens for entries in stored], np.uint32),
        _join([entries.age for entries in stored], np.uint32),
        np.frombuffer(digests, np.uint8).reshape(-1, digest_size),
    )


def _join(columns: list[Sequence[int]], dtype: type[np.unsignedinteger[Any]]) -> npt.NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *(np.asarray(column, dtype) for column in columns)])


def _are_possible(rows: _Rows, pairs: Pairs, shape: PoolShape) -> Mask:
    """Return a mask: which rows name a block and a group that exist in the pool."""
    group_exists = np.array([group < shape.num_groups for _, group in pairs], np.bool_)
    ends = max(shape.num_blocks, shape.num_stamps)
    possible: Mask = (rows.block > 0) & (rows.block < ends) & group_exists[rows.pair]
    return possible


def _are_proven(rows: _Rows, shown: list[Words], shape: PoolShape) -> Mask:
    """Return a mask: which rows have the same stamp as the memory of every rank.

    The stamp must also be newer than the last reset that is recorded in the memory of any rank. Rows of reserved blocks
    are always false, since reserved blocks must not have keys.
    """
    last_reset = max((int(table[NULL_BLOCK]) for table in shown if table.size), key=in_time, default=0)
    proven = (rows.stamp != 0) & behind_reset(rows.stamp, last_reset)
    for table in shown:
        seen = np.zeros(max(shape.num_blocks, shape.num_stamps), np.uint64)
        seen[: len(table)] = table
        seen[list(shape.reserved)] = 0
        proven &= seen[rows.block] == rows.stamp
    return proven if shown else np.zeros_like(proven)


def _slots(rows: _Rows, pairs: Pairs) -> list[tuple[int, Key, int]]:
    """Return (id, key, version) of slots of tiers in the order of last use; the first row of a slot counts."""
    _, first = np.unique(rows.block, return_index=True)
    rows = rows.select(np.isin(np.arange(len(rows.block)), first))
    rows = _Rows._make(column[np.argsort(rows.age, kind="stable")] for column in rows)
    keys = [(*pairs[pair], raw.tobytes()) for pair, raw in zip(rows.pair.tolist(), rows.digest, strict=True)]
    return list(zip(rows.block.tolist(), keys, rows.stamp.tolist(), strict=True))


def _first_rows(rows: _Rows, num_blocks: int) -> Ints:
    """Return, by block, the index of the first row that can be its primary key; -1 if there is none."""
    row_of = np.full(num_blocks, -1, np.int64)
    last_to_first = np.flatnonzero(rows.num_tokens)[::-1]
    row_of[rows.block[last_to_first]] = last_to_first  # numpy keeps the last assignment, that of the first row
    return row_of


def _without_doubles(first: _Rows, others: _Rows) -> tuple[_Rows, _Rows]:
    """Remove the rows of all blocks whose stamp another block has too.

    No stamp is issued twice, so equal stamps of two blocks show that the page memory is wrong about at least one of
    them.
    """
    stamps = np.sort(first.stamp)
    double = stamps[1:][stamps[1:] == stamps[:-1]]
    if not double.size:
        return first, others
    return first.select(~np.isin(first.stamp, double)), others.select(~np.isin(others.stamp, double))


def _without_overlaps(first: _Rows, others: _Rows, pairs: Pairs, shape: PoolShape) -> tuple[_Rows, _Rows]:
    """Remove the rows of superblocks in which a state and something else have a key, or a state is at another block
    than the first.

    Every block gets another stamp before a state is written over it, so such rows show that a stamp table is wrong.
    """
    of_states = np.array([group in shape.state_groups for _, group in pairs], np.bool_)
    blocks, pair = (np.concatenate([getattr(first, name), getattr(others, name)]) for name in ("block", "pair"))
    is_state = of_states[pair] if len(pair) else np.zeros(0, np.bool_)
    states, rest = blocks[is_state], blocks[~is_state] // shape.blocks_per_state
    numbers = states // shape.blocks_per_state
    wrong = np.concatenate([numbers[states % shape.blocks_per_state > 0], np.intersect1d(numbers, rest)])
    first = first.select(~np.isin(first.block // shape.blocks_per_state, wrong))
    return first, others.select(~np.isin(others.block // shape.blocks_per_state, wrong))


def _further_keys(others: _Rows, proven: _Rows, row_of: Ints, pairs: Pairs) -> list[tuple[int, Key]]:
    """Return (block, key) for the keys that are not the primary key of their block, each pair once."""
    first = row_of[others.block]
    same = (proven.pair[first] == others.pair) & (proven.digest[first] == others.digest).all(axis=1)
    further = others.select((first >= 0) & ~same)
    names = [pairs[pair] for pair in further.pair.tolist()]
    keys = [(domain, group, raw.tobytes()) for (domain, group), raw in zip(names, further.digest, strict=True)]
    return list(dict.fromkeys(zip(further.block.tolist(), keys, strict=True)))


def _without_key(blocks: Ints, num_blocks: int) -> Ints:
    """Return all blocks of the pool that are not in `blocks`, the null block included."""
    is_bare = np.ones(num_blocks, np.bool_)
    is_bare[blocks] = False
    return np.flatnonzero(is_bare)


def _last_uses(first: _Rows, stored: list[Entries], num_tokens: Ints) -> Ints:
    """Return, for each row, the time of the last use of the row's block, in the unit of the store."""
    used = _join([entries.used_block for entries in stored], np.uint32)
    if not used.size:
        return first.age
    age = np.zeros(len(num_tokens), np.uint32)
    age[first.block] = first.age
    known = used < len(num_tokens)
    np.maximum.at(age, used[known], _join([entries.used_age for entries in stored], np.uint32)[known])
    return age[first.block]


def _eviction_order(first: _Rows, age: Ints) -> Ints:
    """Return the blocks in ascending order of the time of last use; of equal times, the block with the longer prefix
    comes first.
    """
    longest = int(first.num_tokens.max(initial=0))
    turn = age.astype(np.uint64)
    turn -= turn.min(initial=_MAX_U32)
    turn <<= np.uint64(longest.bit_length())
    turn += np.uint64(longest) - first.num_tokens
    return first.block[rows_in_order(turn)]
