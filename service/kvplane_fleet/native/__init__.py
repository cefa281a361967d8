"""The compiled index: the same as `kvplane_fleet.index` and `kvplane_fleet.hits`, which specify it and take over
without it. KVPLANE_NATIVE=off selects Python.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from kvplane.base.compiled import load
from kvplane_fleet.index import SWEEP_AT, Found, Index

VARIABLE = "KVPLANE_NATIVE"

Asked: TypeAlias = tuple[object, Sequence[int], Sequence[int]]  # layout; cells by group; other cells by group, or none
Row: TypeAlias = tuple[int, tuple[int, ...]]  # tokens of a hit; by group, those of its hit alone


_COMPILED, _ = load("kvplane_fleet.native", "index")


class NativeIndex:
    """See Index."""

    def __init__(self, sweep_at: int = SWEEP_AT) -> None:
        assert _COMPILED is not None, "the caller has checked it"
        self._native, self._index = _COMPILED, _COMPILED.new(sweep_at)

    def new_cell(self) -> int:
        """See Index."""
        cell: int = self._native.new_cell(self._index)
        return cell

    def clear(self, cell: int) -> None:
        """See Index."""
        self._native.clear(self._index, cell)

    def release(self, cell: int) -> None:
        """See Index."""
        self._native.release(self._index, cell)

    def size(self, cell: int) -> int:
        """See Index."""
        size: int = self._native.size(self._index, cell)
        return size

    def digest(self, cell: int) -> tuple[int, int]:
        """See Index."""
        digest: tuple[int, int] = self._native.digest(self._index, cell)
        return digest

    @property
    def num_keys(self) -> int:
        """See Index."""
        keys: int = self._native.totals(self._index)[0]
        return keys

    @property
    def num_sets(self) -> int:
        """See Index."""
        sets: int = self._native.totals(self._index)[1]
        return sets

    def add(self, cell: int, keys: Sequence[int]) -> None:
        """See Index."""
        self._native.add(self._index, cell, keys)

    def remove(self, cell: int, keys: Sequence[int]) -> int:
        """See Index."""
        unknown: int = self._native.remove(self._index, cell, keys)
        return unknown

    def keys_of(self, cell: int) -> dict[int, int]:
        """See Index."""
        keys: dict[int, int] = self._native.keys_of(self._index, cell)
        return keys

    @property
    def parts(self) -> int:
        """See Index."""
        parts: int = self._native.PARTS
        return parts

    def packed_keys(self, cell: int, key_bytes: int, first: int = 0, end: int | None = None) -> bytes:
        """See Index."""
        last = self.parts if end is None else end
        packed: bytes = self._native.packed_keys(self._index, cell, key_bytes // 8, first, last)
        return packed

    def within(self, keys: Sequence[int], end: int) -> Sequence[int]:
        """See Index."""
        found: list[int] = self._native.within(keys, end)
        return found

    def find(self, keys: Sequence[int]) -> Found:
        """See Index."""
        sets, positions = self._native.find(self._index, keys)
        bits = [int.from_bytes(one, "little") for one in sets]
        return Found(bits, np.frombuffer(positions, np.uint32).astype(np.int64))

    def claims(self, keys: Sequence[int], num_tokens: int, asked: Sequence[Asked]) -> list[Row]:
        """Return the hits of a prompt of `num_tokens` tokens, whose keys are given, at several places."""
        rows: list[Row] = self._native.claims(self._index, keys, num_tokens, asked)
        return rows


def layout(head: tuple[int, int, int, int, int], classes: Sequence[tuple[object, ...]]) -> object:
    """Return what `claims` needs of a place's groups.

    Args:
        head: tokens of a hash block, alignment of hits in tokens, whether hits end inside blocks, whether the
            cache commits safely, number of groups.
        classes: for each look-up class its groups, the form of their rule, block size, window, chunk, and whether it
            drops the last block.
    """
    assert _COMPILED is not None, "only a NativeIndex needs it"
    made: object = _COMPILED.layout(head, classes)
    return made


def is_compiled() -> bool:
    """Return whether the compiled index is installed and selected."""
    return _COMPILED is not None and os.environ.get(VARIABLE) != "off"


def make_index() -> Index | NativeIndex:
    """Return an empty index, compiled where that is possible."""
    return NativeIndex() if is_compiled() else Index()


def sources() -> str:
    """Return the digest of the sources of the library; "" without it."""
    return "" if _COMPILED is None else str(_COMPILED.SOURCES)
