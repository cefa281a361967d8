"""Which keys are cached in which cells. A *cell* is a place's group in one tier; a key is the end of an engine's
hash: 128 bits, or the 64 that the engine states.

    table: key ─▶ bits of the cells that have it

A key that several blocks of a cell have is counted: it stays until each was removed.
"""

from __future__ import annotations

from collections.abc import Sequence

SUMS = 1 << 128


class Index:
    """The keys of all cells.

    Attributes:
        parts: parts of the table that can be read one after the other; a key stays in its part.
    """

    parts = 1

    def __init__(self) -> None:
        self._table: dict[int, int] = {}
        self._copies: list[dict[int, int]] = []  # by cell: key -> copies after the first
        self._sizes: list[int] = []  # by cell: keys
        self._digests: list[tuple[int, int]] = []  # by cell: number and sum of keys, each as often as it has copies
        self._free: list[int] = []

    # -- cells -------------------------------------------------------------------------------------------------------

    def new_cell(self) -> int:
        """Return the number of a cell without keys."""
        if self._free:
            return self._free.pop()
        self._sizes.append(0)
        self._copies.append({})
        self._digests.append((0, 0))
        return len(self._sizes) - 1

    def clear(self, cell: int) -> None:
        """Remove all keys of a cell."""
        if self._sizes[cell]:
            others = ((key, bits & ~(1 << cell)) for key, bits in self._table.items())
            self._table = {key: bits for key, bits in others if bits}
            self._sizes[cell], self._copies[cell], self._digests[cell] = 0, {}, (0, 0)

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
        """Number of different keys in the table."""
        return len(self._table)

    # -- keys --------------------------------------------------------------------------------------------------------

    def add(self, cell: int, keys: Sequence[int]) -> None:
        """Add one copy of each key to a cell."""
        table, copies, bit = self._table, self._copies[cell], 1 << cell
        for key in keys:
            bits = table.get(key, 0)
            if bits & bit:
                copies[key] = copies.get(key, 0) + 1
            else:
                table[key] = bits | bit
                self._sizes[cell] += 1
        number, total = self._digests[cell]
        self._digests[cell] = number + len(keys), (total + sum(keys)) % SUMS

    def remove(self, cell: int, keys: Sequence[int]) -> int:
        """Remove one copy of each key from a cell; returns how many of the keys the cell did not have."""
        table, copies, bit, unknown = self._table, self._copies[cell], 1 << cell, 0
        number, total = self._digests[cell]
        for key in keys:
            bits = table.get(key, 0)
            if not bits & bit:
                unknown += 1
                total += key
            elif key in copies:
                copies[key] -= 1
                if not copies[key]:
                    del copies[key]
            else:
                self._sizes[cell] -= 1
                if bits == bit:
                    del table[key]
                else:
                    table[key] = bits ^ bit
        self._digests[cell] = number - len(keys) + unknown, (total - sum(keys)) % SUMS
        return unknown

    def packed_keys(self, cell: int, key_bytes: int, first: int = 0, end: int | None = None) -> bytes:
        """Return the ends of the keys of a cell, big-endian, each as often as it has copies; of the parts from `first`
        to before `end`, or to the last one.
        """
        if first == (self.parts if end is None else end):
            return b""
        mask, copies = (1 << 8 * key_bytes) - 1, self._copies[cell]
        held = (key for key, bits in self._table.items() if bits >> cell & 1)
        return b"".join((key & mask).to_bytes(key_bytes, "big") * (1 + copies.get(key, 0)) for key in held)

    def within(self, keys: Sequence[int], end: int) -> Sequence[int]:
        """Return those of the keys that are in the parts before `end`."""
        return keys if end == self.parts else ()

    def find(self, keys: Sequence[int]) -> list[int]:
        """Return, for each key of a prompt, the bits of the cells that have it."""
        return [self._table.get(key, 0) for key in keys]
