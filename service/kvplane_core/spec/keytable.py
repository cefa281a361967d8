"""A packed table of the keys that a recovery installed; each key stays in the table until its block is used.

A key becomes a tuple only on first access, so that a million keys can be installed within milliseconds. The table has
one row per key, in these columns:

    digests   row by row                      words   sorted: hash of (domain, group, digest) above, row below
    pairs     (domain, group) of each row     block of each row, 0 once its key was taken out

A block has one row at most. Keys of several blocks are taken out of the table before the first look-up, so that `find`
never has to choose.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from struct import Struct
from typing import overload

import numpy as np

from kvplane_core.face.columns import U32, U64, Bytes, Ints, Words, column
from kvplane_core.face.keys import NULL_BLOCK, Key

_HALVES = Struct("<2Q")  # of the first 16 bytes of a digest
_FACTORS = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F  # odd multipliers, so that digests that are not random are spread too
_WORD = (1 << 64) - 1
_ROWS_PER_BUCKET_BITS = 3  # words with equal high bits share a bucket of about eight: a search is short


class KeyTable:
    """A table of keys and their blocks, stored in arrays instead of one object per key.

    Args:
        num_blocks: number of blocks of the pool.
        pairs: the different (domain, group) pairs of the rows.
        pair: per row, index of its pair in `pairs`.
        block: per row, its block.
        digest: per row, its digest of at least 16 bytes.
    """

    def __init__(self, num_blocks: int, pairs: list[tuple[str, int]], pair: Ints, block: Ints, digest: Bytes) -> None:
        self._pairs = pairs
        self._number = {one: number for number, one in enumerate(pairs)}
        self._digests = digest.reshape(-1).data
        self._size = digest.shape[1]
        self._pair = column(U32, pair)
        self._block = column(U32, block)
        row_of = np.zeros(num_blocks, np.uint32)
        row_of[block] = np.arange(len(block))
        self._row_of = column(U32, row_of)
        self._row_bits = max(1, len(block).bit_length())
        words = _sorted_words(pair, digest)
        self._words = column(U64, words)
        bucket_bits = max(1, self._row_bits - _ROWS_PER_BUCKET_BITS)
        self._shift = 64 - bucket_bits
        least = np.arange(1 << bucket_bits, dtype=np.uint64) << np.uint64(self._shift)
        self._starts = column(U32, np.append(np.searchsorted(words, least), len(words)))
        self._left: list[int] = np.bincount(pair, minlength=len(pairs)).tolist()
        self.num_keys = len(block)

    def __iter__(self) -> Iterator[tuple[int, Key]]:
        """Yield (block, key) for each row that was not taken out, in row order."""
        return ((block, self._key(row)) for row, block in enumerate(self._block) if block)

    def has_row(self, block: int) -> bool:
        """Whether the key of this block is still in the table."""
        return self._block[self._row_of[block]] == block

    def count_rows(self) -> int:
        """Count the rows that were not taken out, one by one; must equal `num_keys`."""
        return int(np.count_nonzero(np.frombuffer(self._block, np.uint32)))

    def key_of(self, block: int) -> Key:
        """Return the key of a block; the block must have a row."""
        row = self._row_of[block]
        assert self._block[row] == block, f"block {block} has no row"
        return self._key(row)

    def find(self, domain: str, group: int, digest: bytes) -> int:
        """Return the block of a key, or NULL_BLOCK if the key has no row."""
        pair = self._number.get((domain, group))
        if pair is None or len(digest) != self._size:
            return NULL_BLOCK
        words, bits = self._words, self._row_bits
        low, high = _HALVES.unpack_from(digest)
        least = (_FACTORS[0] * (low ^ pair) + _FACTORS[1] * high & _WORD) >> bits << bits
        bucket, end = least >> self._shift, least + (1 << bits)
        at = bisect_left(words, least, self._starts[bucket], self._starts[bucket + 1])
        while at < len(words) and words[at] < end:
            row = words[at] - least
            if self._pair[row] == pair and self._digest(row) == digest:
                block: int = self._block[row]
                return block
            at += 1
        return NULL_BLOCK

    def take(self, block: int) -> Key:
        """Remove and return the key of a block."""
        key = self.key_of(block)
        row = self._row_of[block]
        self._block[row] = NULL_BLOCK
        self._left[self._pair[row]] -= 1
        self.num_keys -= 1
        return key

    def take_all(self, blocks: list[int]) -> Iterator[tuple[str, int, Digests, array[int]]]:
        """Remove the keys of these blocks; yields (domain, group, digests, blocks) per pair of domain and group."""
        rows = np.frombuffer(self._row_of, np.uint32)[blocks]
        of_rows = np.frombuffer(self._block, np.uint32)
        assert (of_rows[rows] == blocks).all(), f"one of the blocks {blocks[:9]} ... has no row"
        pair = np.frombuffer(self._pair, np.uint32)[rows]
        for number in np.unique(pair).tolist():
            mine = rows[pair == number]
            yield (
                *self._pairs[number],
                Digests(self._digests, self._size, column(U32, mine)),
                column(U32, of_rows[mine]),
            )
            self._left[number] -= len(mine)
        of_rows[rows] = NULL_BLOCK
        self.num_keys -= len(blocks)

    def shared_keys(self) -> list[list[int]]:
        """Return, for each key that several blocks have, these blocks in row order."""
        words = np.frombuffer(self._words, np.uint64)
        hashes = words >> np.uint64(self._row_bits)
        at = np.flatnonzero(hashes[1:] == hashes[:-1])
        blocks: dict[Key, list[int]] = {}
        for row in np.union1d(words[at], words[at + 1]) & np.uint64((1 << self._row_bits) - 1):
            blocks.setdefault(self._key(int(row)), []).append(self._block[int(row)])
        return [shared for shared in blocks.values() if len(shared) > 1]

    def domains(self) -> list[str]:
        """The domains (name spaces of keys) in the order of their first row, which is the same in every process."""
        return list(dict.fromkeys(domain for domain, _ in self._pairs))

    def count_keys(self, group: int) -> int:
        """Return the number of rows of a group."""
        return sum(left for (_, of_group), left in zip(self._pairs, self._left, strict=True) if of_group == group)

    def runs(self, max_rows: int) -> Iterator[tuple[str, int, array[int], Digests]]:
        """Yield the remaining rows as (domain, group, blocks, digests) with at most `max_rows` rows each."""
        block, pair = np.frombuffer(self._block, np.uint32), np.frombuffer(self._pair, np.uint32)
        rows = np.flatnonzero(block)
        if len(self._pairs) > 1:
            numbers = pair[rows].astype(np.min_scalar_type(len(self._pairs)))  # narrow integers sort faster
            rows = rows[np.argsort(numbers, kind="stable")]
        ends = np.searchsorted(pair[rows], np.arange(len(self._pairs) + 1))
        for number, (domain, group) in enumerate(self._pairs):
            for start in range(ends[number], ends[number + 1], max_rows):
                piece = rows[start : min(start + max_rows, ends[number + 1])]
                yield domain, group, column(U32, block[piece]), Digests(self._digests, self._size, column(U32, piece))

    def _key(self, row: int) -> Key:
        return (*self._pairs[self._pair[row]], self._digest(row))

    def _digest(self, row: int) -> bytes:
        return bytes(self._digests[row * self._size : (row + 1) * self._size])


class Digests(Sequence[bytes]):
    """A view of some rows of an array of digests; a digest becomes a bytes object only when it is read."""

    def __init__(self, raw: memoryview, size: int, rows: array[int]) -> None:
        self._raw, self._size, self._rows = raw, size, rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> Digests: ...
    def __getitem__(self, at: int | slice) -> bytes | Digests:
        if isinstance(at, slice):
            return Digests(self._raw, self._size, self._rows[at])
        begin = self._rows[at] * self._size
        return bytes(self._raw[begin : begin + self._size])


def _sorted_words(pair: Ints, digest: Bytes) -> Words:
    """Return one u64 per row, ascending: a hash of the key in the high bits, the row number in the low bits."""
    if not len(pair):
        return np.zeros(0, np.uint64)
    halves: Words = np.ndarray((len(pair), 2), "<u8", digest, strides=(digest.shape[1], 8))
    words: Words = halves[:, 0] ^ pair.astype(np.uint64)
    words *= np.uint64(_FACTORS[0])
    words += halves[:, 1] * np.uint64(_FACTORS[1])
    bits = np.uint64(max(1, len(pair).bit_length()))
    words >>= bits
    words <<= bits
    words |= np.arange(len(pair), dtype=np.uint64)
    words.sort()
    return words
