"""Arrays of integers that read like lists: the columns of results and the block tables."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, SupportsIndex, overload

if TYPE_CHECKING:
    _Ints = array[int]
else:
    _Ints = array


class PackedInts(_Ints):
    """An array of u32 (typecode "I") or u64 ("Q"), which equals a list of the same numbers and prints like one.

    Its memory is contiguous: `memoryview(ints)` or `numpy.asarray(ints)` read the numbers without a copy, and can be
    copied to the memory of a GPU. While such a view exists, Python refuses to append to the array (BufferError).
    """

    __slots__ = ()
    __hash__ = None

    def __eq__(self, other: object) -> bool:
        """Return whether a list or another array has the same numbers."""
        if isinstance(other, list):
            return self.tolist() == other
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        """Return whether a list or another array has other numbers."""
        return not self == other

    @overload
    def __getitem__(self, at: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> PackedInts: ...
    def __getitem__(self, at: SupportsIndex | slice) -> int | PackedInts:
        """Return a number, or for a slice a new PackedInts."""
        if isinstance(at, slice):
            return PackedInts(self.typecode, super().__getitem__(at))
        return super().__getitem__(at)

    def __add__(self, other: Iterable[int]) -> list[int]:  # type: ignore[override]
        """Return a list of these numbers and then others."""
        return [*self, *other]

    def __radd__(self, other: Iterable[int]) -> list[int]:
        """Return a list of other numbers and then these."""
        return [*other, *self]

    def __repr__(self) -> str:
        """Return the text of a list."""
        return repr(self.tolist())

    def __copy__(self) -> PackedInts:
        """Return a copy."""
        return PackedInts(self.typecode, self)

    def __deepcopy__(self, memo: object) -> PackedInts:
        """Return a copy."""
        return PackedInts(self.typecode, self)
