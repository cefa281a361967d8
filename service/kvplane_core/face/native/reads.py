"""Attributes of the compiled core: each is one question of the table in bind_reads.h."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar, overload

from kvplane_core.cpp import _native

T = TypeVar("T")


class HasCore(Protocol):
    """An object that reads a compiled core."""

    @property
    def core(self) -> object:
        """The core."""


class Read(Generic[T]):
    """An attribute whose value is the answer to the question of its name, or what `made` makes of the answer."""

    def __init__(self, made: Callable[[Any], T] | None = None, question: str = "") -> None:
        self._made, self._question = made, question

    def __set_name__(self, owner: type, name: str) -> None:
        self._question = self._question or name

    @overload
    def __get__(self, of: None, owner: type) -> Read[T]: ...
    @overload
    def __get__(self, of: HasCore, owner: type) -> T: ...
    def __get__(self, of: HasCore | None, owner: type) -> Read[T] | T:
        if of is None:
            return self
        answer = _native.read(of.core, self._question)
        return answer if self._made is None else self._made(answer)
