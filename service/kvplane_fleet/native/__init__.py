"""The compiled index: the same as `kvplane_fleet.index` and `kvplane_fleet.hits`, which specify it and take over
without it. KVPLANE_NATIVE=off selects Python.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from kvplane.base.compiled import load
from kvplane_fleet.index import Index

VARIABLE = "KVPLANE_NATIVE"
SWEEP_AT = 1 << 16  # keys without cells, at least, before they are swept

Asked: TypeAlias = tuple[object, Sequence[int], Sequence[int], Sequence[int]]  # layout, cells, others, shared
Row: TypeAlias = tuple[int, tuple[int, ...]]  # tokens of a hit; by group, those of its hit alone


_COMPILED, _ = load("kvplane_fleet.native", "index")


class NativeIndex:
    """See Index. Each method is one call of the library."""

    def __init__(self, sweep_at: int = SWEEP_AT) -> None:
        assert _COMPILED is not None, "the caller has checked it"
        native, index = _COMPILED, _COMPILED.new(sweep_at)
        self._native, self._index = native, index
        self.parts: int = native.PARTS
        self.new_cell: Callable[[], int] = partial(native.new_cell, index)
        self.clear: Callable[[int], None] = partial(native.clear, index)
        self.release: Callable[[int], None] = partial(native.release, index)
        self.size: Callable[[int], int] = partial(native.size, index)
        self.digest: Callable[[int], tuple[int, int]] = partial(native.digest, index)
        self.add: Callable[[int, Sequence[int]], None] = partial(native.add, index)
        self.remove: Callable[[int, Sequence[int]], int] = partial(native.remove, index)
        self.within: Callable[[Sequence[int], int], Sequence[int]] = native.within
        # The hits of a prompt of a number of tokens, whose keys are given, at several places.
        self.claims: Callable[[Sequence[int], int, Sequence[Asked]], list[Row]] = partial(native.claims, index)

    @property
    def num_keys(self) -> int:
        """See Index. Keys that a clear has left without cells count until they are swept."""
        keys: int = self._native.num_keys(self._index)
        return keys

    def packed_keys(self, cell: int, key_bytes: int, first: int = 0, end: int | None = None) -> bytes:
        """See Index."""
        last = self.parts if end is None else end
        packed: bytes = self._native.packed_keys(self._index, cell, key_bytes // 8, first, last)
        return packed


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
