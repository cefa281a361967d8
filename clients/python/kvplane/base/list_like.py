"""Sequences that read like lists, and whose entries become objects only when they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, overload

_T = TypeVar("_T")


class ListLike(Sequence[_T]):
    """Equals the list of its entries, and prints like it. Subclasses have `__iter__` and `__len__`. Not hashable."""

    __slots__ = ()

    @overload
    def __getitem__(self, at: int) -> _T: ...
    @overload
    def __getitem__(self, at: slice) -> list[_T]: ...
    def __getitem__(self, at: int | slice) -> _T | list[_T]:
        return list(self)[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __repr__(self) -> str:
        return repr(list(self))
