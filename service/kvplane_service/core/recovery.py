"""Puts the entries of a store back into an unused pool, as far as the page memory proves them.

A store may lose, repeat or reorder what it was given. An entry comes back only where the memory of every rank still
shows the stamp that was told with it: no stamp is used twice in an incarnation, so equal stamps mean equal content.
Rows are looked at a run at a time: a million of them must come back within moments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress, repeat
from operator import itemgetter
from typing import Any, NamedTuple

from kvplane_service.core.entries import Entries, KeyRun
from kvplane_service.core.pool import BlockPool, Key

_make_key = partial(tuple.__new__, Key)  # no Python frame: there is one for each row


@dataclass(frozen=True, slots=True)
class Recovered:
    """What became of the rows.

    Attributes:
        kept: are keys of the cache again.
        unproven: the memory shows other stamps.
        repeated: the block had the key already.
        impossible: name a block, group or digest that the pool cannot have.
    """

    kept: int
    unproven: int
    repeated: int
    impossible: int


class _Rows(NamedTuple):
    """Rows of one run."""

    block: list[int]
    stamp: list[int]
    num_tokens: list[int]
    age: list[int]
    digest: list[bytes]

    def select(self, wanted: list[bool]) -> _Rows:
        """The rows that are wanted."""
        return _Rows(
            list(compress(self.block, wanted)),
            list(compress(self.stamp, wanted)),
            list(compress(self.num_tokens, wanted)),
            list(compress(self.age, wanted)),
            list(compress(self.digest, wanted)),
        )


class Recovery:
    """One recovery: `add` what was stored, in any order, then `finish`."""

    def __init__(self, pool: BlockPool, digest_size: int, tables: Sequence[Sequence[int]]) -> None:
        """`tables` are the stamps that each rank's memory shows, one per block."""
        assert not pool.index, "a pool with keys needs no recovery"
        self._pool = pool
        self._digest_size = digest_size
        self._shown = _shown_by_all(tables, pool)
        self._turn = [0] * pool.num_blocks  # lower is evicted earlier: age, then the longer prefix first
        self._used: dict[int, int] = {}
        self._blocks: list[int] = []  # that got a key, in the order of their rows
        self._further: list[tuple[int, int, Key]] = []
        self._rows = self._kept = self._repeated = self._impossible = 0

    def add(self, entries: Entries) -> None:
        """Register what is proven of these rows."""
        self._rows += len(entries)
        if entries.digest_size != self._digest_size:
            self._impossible += len(entries)
            return
        start = 0
        for run in entries.runs:
            stop = start + run.count
            if run.group < self._pool.num_groups:
                self._add_run(run, self._proven(_cut(entries, start, stop)))
            else:
                self._impossible += run.count
            start = stop
        for block, age in zip(entries.used_block, entries.used_age, strict=True):
            self._used[block] = max(age, self._used.get(block, 0))

    def finish(self) -> Recovered:
        """Register further keys and put the free list into eviction order."""
        for block, stamp, key in self._further:
            self._add_further(block, stamp, key)
        self._drop_doubles()
        pool, keyed = self._pool, self._blocks
        for block, age in self._used.items():
            if 0 < block < pool.num_blocks and pool.key[block] is not None:
                self._turn[block] = max(self._turn[block], _turn(age, pool.key_tokens[block]))
        keyed.sort(key=self._turn.__getitem__)
        bare = (block for block in range(1, pool.num_blocks) if pool.key[block] is None and not pool.references[block])
        pool.free.rebuild(chain(bare, keyed))
        unproven = self._rows - self._kept - self._repeated - self._impossible
        return Recovered(self._kept, unproven, self._repeated, self._impossible)

    def _proven(self, rows: _Rows) -> _Rows:
        """The rows whose page shows their stamp."""
        num_blocks = self._pool.num_blocks
        if rows.block and not 0 < min(rows.block) <= max(rows.block) < num_blocks:
            possible = [0 < block < num_blocks for block in rows.block]
            self._impossible += possible.count(False)
            rows = rows.select(possible)
        shown = _pick(self._shown, rows.block)
        if shown == rows.stamp and all(shown):
            return rows
        return rows.select([stamp == seen != 0 for stamp, seen in zip(rows.stamp, shown, strict=True)])

    def _add_run(self, run: KeyRun, rows: _Rows) -> None:
        pool = self._pool
        has_key = pool.key
        if not all(rows.num_tokens) or len(set(rows.block)) < len(rows.block) or any(_pick(has_key, rows.block)):
            rows = self._first_keys(run, rows)
        keys: list[Key] = list(map(_make_key, zip(repeat(run.domain), repeat(run.group), rows.digest)))
        pool.restore_keys(run.domain, run.group, rows.digest, rows.block)
        tokens_of, stamp_of, turn_of = pool.key_tokens, pool.stamp, self._turn
        for block, stamp, num_tokens, age, key in zip(*rows[:4], keys, strict=True):
            has_key[block] = key
            tokens_of[block] = num_tokens
            stamp_of[block] = stamp
            turn_of[block] = (age << 32) - num_tokens  # as _turn, without its frame
        self._blocks += rows.block
        self._kept += len(rows.block)

    def _first_keys(self, run: KeyRun, rows: _Rows) -> _Rows:
        """The rows that give a block its first key; what is a further key waits, what is told twice is told once."""
        wanted, taken = [], set[int]()
        for block, stamp, num_tokens, _, digest in zip(*rows, strict=True):
            first = num_tokens > 0 and block not in taken and self._pool.key[block] is None
            wanted.append(first)
            if first:
                taken.add(block)
            else:
                self._further.append((block, stamp, Key(run.domain, run.group, digest)))
        return rows.select(wanted)

    def _add_further(self, block: int, stamp: int, key: Key) -> None:
        pool = self._pool
        if pool.key[block] is None or pool.stamp[block] != stamp or pool.has_key(block, key):
            self._repeated += 1
            return
        pool.register(block, key, 0)
        pool.registered.clear()
        self._kept += 1

    def _drop_doubles(self) -> None:
        """One stamp on two pages proves neither: such a memory says what no service told it."""
        stamps = _pick(self._pool.stamp, self._blocks)
        if len(set(stamps)) == len(stamps):
            return
        seen = set[int]()
        double = set[int]()
        for stamp in stamps:
            (double if stamp in seen else seen).add(stamp)
        for block, stamp in zip(self._blocks, stamps, strict=True):
            if stamp in double:
                self._kept -= len(self._pool.unregister(block))
                self._pool.stamp[block] = 0
        self._blocks = [block for block in self._blocks if self._pool.key[block] is not None]


def _cut(entries: Entries, start: int, stop: int) -> _Rows:
    size, digests = entries.digest_size, entries.digests
    return _Rows(
        entries.block[start:stop],
        entries.stamp[start:stop],
        entries.num_tokens[start:stop],
        entries.age[start:stop],
        [digests[at : at + size] for at in range(start * size, stop * size, size)],
    )


def _turn(age: int, num_tokens: int) -> int:
    return (age << 32) - num_tokens


def _shown_by_all(tables: Sequence[Sequence[int]], pool: BlockPool) -> list[int]:
    """The stamp of each block that every rank shows, 0 where they differ or the block is held for ever."""
    shown = list(tables[0]) if tables else []
    shown += [0] * (pool.num_blocks - len(shown))
    for table in tables[1:]:
        if len(table) != pool.num_blocks or list(table) != shown:
            seen = [*table, *[0] * (pool.num_blocks - len(table))]
            shown = [one if one == other else 0 for one, other in zip(shown, seen, strict=False)]
    for block in pool.reserved:
        shown[block] = 0
    return shown


def _pick(column: Sequence[Any], at: list[int]) -> list[Any]:
    """The values of a column at these places."""
    if len(at) < 2:
        return [column[index] for index in at]
    return list(itemgetter(*at)(column))
