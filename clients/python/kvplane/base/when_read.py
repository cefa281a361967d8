"""Dataclasses whose missing fields are made when they are first read.

Most sections of most steps are empty. Making them costs more than all else that a client does for a decode step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, Protocol, TypeVar, cast

_T = TypeVar("_T")
PACKED = "_packed"  # name in `vars` of what fields are still to be made from


class Packed(Protocol):
    """The form in which some fields of an object are kept until one of its fields is read or set."""

    def unpacked(self) -> Mapping[str, object]:
        """Return these fields by name. They share no memory that changes with this object."""


def made_when_read(cls: type[_T]) -> type[_T]:
    """Decorate a dataclass (without slots): a field with a default factory that no argument gives is made when it is
    first read, and not before. `vars` shows which fields are there.
    """
    names = [one.name for one in fields(cast(Any, cls))]
    makers = {
        one.name: cast(Callable[[], object], one.default_factory)
        for one in fields(cast(Any, cls))
        if one.default_factory is not MISSING
    }
    known = frozenset(names)

    def initialize(self: object, *values: object, **named: object) -> None:
        if values:
            named.update(zip(names[: len(values)], values, strict=True))
        if not named.keys() <= known:
            raise TypeError(f"{cls.__name__} has no field {', '.join(sorted(named.keys() - known))}")
        self.__dict__.update(named)

    def make_field(self: object, name: str) -> object:
        if name in known and PACKED in self.__dict__:
            return getattr(self, name) if name in given_fields(self) else make_field(self, name)
        make = makers.get(name)
        if make is None:
            raise AttributeError(f"{cls.__name__} has no field {name}")
        return self.__dict__.setdefault(name, make())

    def set_field(self: object, name: str, value: object) -> None:
        if name not in known:
            raise AttributeError(f"{cls.__name__} has no field {name}")
        given_fields(self)[name] = value

    functions: dict[str, object] = {"__init__": initialize, "__getattr__": make_field, "__setattr__": set_field}
    for name, function in functions.items():
        setattr(cls, name, function)
    return cls


def made_with(cls: type[_T], given: dict[str, Any]) -> _T:
    """Return an object of a class that is made when read, with these fields, whose names are not checked."""
    made = cls.__new__(cls)
    made.__dict__.update(given)
    return made


def made_of(cls: type[_T], packed: Packed) -> _T:
    """Return an object of a class that is made when read, whose fields are those of `packed`."""
    made = cls.__new__(cls)
    made.__dict__[PACKED] = packed
    return made


def given_fields(made: object) -> dict[str, Any]:
    """Return `vars` of such an object, after its packed fields were made."""
    given = vars(made)
    if PACKED in given:
        given.update(given.pop(PACKED).unpacked())
    return given
