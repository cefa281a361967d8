"""Which keys are cached in which cells. A *cell* is a place's group in one tier; a key is the end of an engine's
hash: 128 bits, or the 64 that the engine states.

    table: key ─▶ set number        sets: number ─▶ bits of cells        equal sets of cells have one number

The blocks of one request share a set, so the memory of a key does not grow with the number of places. A key that
several blocks of a cell have is counted: it stays until each was removed. Clearing a cell changes sets, not keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

SUMS = 1 << 128
EMPTY = 0  # number of the set without cells
SWEEP_AT = 1 << 16  # keys without cells, at least, before they are swept


@dataclass(slots=True)
class _Sets:
    """Sets of cells with numbers, and how many keys have each."""

    bits: list[int] = field(default_factory=lambda: [0])
    keys: list[int] = field(default_factory=lambda: [0])
    numbers: dict[int, int] = field(default_factory=lambda: {0: EMPTY})
    unused: list[int] = field(default_factory=list)

    def number(self, bits: int) -> int:
        """Return the number of a set, which is made if there is none."""
        number = self.numbers.get(bits)
        if number is not None:
            return number
        if self.unused:
            number = self.unused.pop()
            self.bits[number] = bits
        else:
            number = len(self.bits)
            self.bits.append(bits)
            self.keys.append(0)
        self.numbers[bits] = number
        return number

    def move(self, before: int, after: int) -> None:
        """Take note that a key went from one set to another."""
        self.keys[after] += 1
        self.keys[before] -= 1
        if before != EMPTY and not self.keys[before]:
            if self.numbers.get(self.bits[before]) == before:
                del self.numbers[self.bits[before]]
            self.unused.append(before)

    def without(self, bit: int) -> None:
        """Remove a cell from every set. Sets that become equal keep their numbers; new keys take one of them."""
        for number in range(1, len(self.bits)):
            bits = self.bits[number]
            if bits & bit and self.keys[number]:
                if self.numbers.get(bits) == number:
                    del self.numbers[bits]
                self.bits[number] = bits & ~bit
                self.numbers.setdefault(bits & ~bit, number)


class Index:
    """The keys of all cells."""

    def __init__(self) -> None:
        self._table: dict[int, int] = {}
        self._sets = _Sets()
        self._copies: dict[int, dict[int, int]] = {}  # cell -> key -> copies after the first
        self._sizes: dict[int, int] = {}  # cell -> keys
        self._digests: dict[int, tuple[int, int]] = {}  # cell -> number and sum of keys, each as often as it has copies
        self._free: list[int] = []

    # -- cells -------------------------------------------------------------------------------------------------------

    def new_cell(self) -> int:
        """Return the number of a cell without keys."""
        cell = self._free.pop() if self._free else len(self._sizes)
        self._sizes[cell] = 0
        self._copies[cell] = {}
        self._digests[cell] = 0, 0
        return cell

    def clear(self, cell: int) -> None:
        """Remove all keys of a cell; the time depends on the number of sets, not of keys."""
        if not self._sizes[cell]:
            return
        self._sets.without(1 << cell)
        self._sizes[cell] = 0
        self._copies[cell] = {}
        self._digests[cell] = 0, 0
        self._sweep()

    def release(self, cell: int) -> None:
        """Clear a cell whose number may then be given to another."""
        self.clear(cell)
        self._free.append(cell)

    def size(self, cell: int) -> int:
        """Number of different keys of a cell."""
        return self._sizes[cell]

    def digest(self, cell: int) -> tuple[int, int]:
        """Return the number of keys of a cell and their sum modulo 2^128; a key counts as often as it has copies."""
        return self._digests[cell]

    @property
    def num_keys(self) -> int:
        """Number of different keys in the table, swept or not."""
        return len(self._table)

    @property
    def num_sets(self) -> int:
        """Number of different sets of cells, the empty one included."""
        return len(self._sets.bits) - len(self._sets.unused)

    # -- keys --------------------------------------------------------------------------------------------------------

    def add(self, cell: int, keys: Sequence[int]) -> None:
        """Add one copy of each key to a cell."""
        table, sets, bit = self._table, self._sets, 1 << cell
        copies, added = self._copies[cell], 0
        for key in keys:
            before = table.get(key, EMPTY)
            bits = sets.bits[before]
            if bits & bit:
                copies[key] = copies.get(key, 0) + 1
                continue
            table[key] = after = sets.number(bits | bit)
            sets.move(before, after)
            added += 1
        self._sizes[cell] += added
        number, total = self._digests[cell]
        self._digests[cell] = number + len(keys), (total + sum(keys)) % SUMS

    def remove(self, cell: int, keys: Sequence[int]) -> int:
        """Remove one copy of each key from a cell; returns how many of the keys the cell did not have."""
        table, sets, bit = self._table, self._sets, 1 << cell
        copies, removed, unknown = self._copies[cell], 0, 0
        number, total = self._digests[cell]
        for key in keys:
            before = table.get(key, EMPTY)
            bits = sets.bits[before]
            if not bits & bit:
                unknown += 1
                total += key
            elif key in copies:
                copies[key] -= 1
                if not copies[key]:
                    del copies[key]
            else:
                removed += 1
                after = sets.number(bits & ~bit)
                if after == EMPTY:
                    del table[key]
                else:
                    table[key] = after
                sets.move(before, after)
        self._sizes[cell] -= removed
        self._digests[cell] = number - len(keys) + unknown, (total - sum(keys)) % SUMS
        return unknown

    def has(self, cell: int, key: int) -> bool:
        """Whether a cell has a key."""
        return bool(self._sets.bits[self._table.get(key, EMPTY)] >> cell & 1)

    def keys_of(self, cell: int) -> dict[int, int]:
        """Return the keys of a cell, with their numbers of copies. For tests and digests: it reads the whole table."""
        copies, bits, table = self._copies[cell], self._sets.bits, self._table
        return {key: 1 + copies.get(key, 0) for key, number in table.items() if bits[number] >> cell & 1}

    @property
    def parts(self) -> int:
        """Number of parts that can be read one after the other; a key stays in its part."""
        return 1

    def packed_keys(self, cell: int, key_bytes: int, first: int = 0, end: int | None = None) -> bytes:
        """Return the ends of the keys of a cell, big-endian, each as often as it has copies; of the parts from `first`
        to before `end`, or to the last one.
        """
        if first == (self.parts if end is None else end):
            return b""
        mask = (1 << 8 * key_bytes) - 1
        keys = self.keys_of(cell).items()
        return b"".join((key & mask).to_bytes(key_bytes, "big") * copies for key, copies in keys)

    def within(self, keys: Sequence[int], end: int) -> Sequence[int]:
        """Return those of the keys that are in the parts before `end`."""
        return keys if end == self.parts else ()

    # -- look-up -----------------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[int]) -> Found:
        """Look up the keys of a prompt in all cells at once."""
        table = self._table
        numbers = np.fromiter((table.get(key, EMPTY) for key in keys), np.int64, len(keys))
        different, positions = np.unique(numbers, return_inverse=True)
        return Found([self._sets.bits[number] for number in different.tolist()], positions)

    def _sweep(self) -> None:
        """Delete the keys whose set has become empty, when they are many."""
        bits, keys = self._sets.bits, self._sets.keys
        empty = [number for number in range(1, len(bits)) if keys[number] and not bits[number]]
        if sum(keys[number] for number in empty) < max(SWEEP_AT, len(self._table) // 2):
            return
        gone = set(empty)
        self._table = {key: number for key, number in self._table.items() if number not in gone}
        for number in empty:
            keys[number] = 0
            self._sets.unused.append(number)
        self._sets.numbers[0] = EMPTY


@dataclass(frozen=True, slots=True)
class Found:
    """The sets of the keys of a prompt.

    Attributes:
        sets: the different sets of cells, as bits.
        positions: for each key, the index of its set.
    """

    sets: Sequence[int]
    positions: NDArray[np.int64]

    def has(self, cells: Sequence[int], others: Sequence[int] = ()) -> NDArray[np.bool_]:
        """Return, for each key, whether all of the cells have it. `others`, if given, has another cell for each, which
        may have the key instead, or several times as many.
        """
        choices = [1 << one for one in cells]
        for at, other in enumerate(others):
            choices[at % len(cells)] |= 1 << other
        each = np.fromiter((all(bits & one for one in choices) for bits in self.sets), np.bool_, len(self.sets))
        found: NDArray[np.bool_] = each[self.positions]
        return found
