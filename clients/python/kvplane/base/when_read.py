"""Dataclasses whose missing fields are made when they are first read.

Most sections of most steps are empty. Making them costs more than all else that a client does for a decode step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar, cast

_T = TypeVar("_T")


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
        make = makers.get(name)
        if make is None:
            raise AttributeError(f"{cls.__name__} has no field {name}")
        return self.__dict__.setdefault(name, make())

    def set_field(self: object, name: str, value: object) -> None:
        if name not in known:
            raise AttributeError(f"{cls.__name__} has no field {name}")
        self.__dict__[name] = value

    functions: dict[str, object] = {"__init__": initialize, "__getattr__": make_field, "__setattr__": set_field}
    for name, function in functions.items():
        setattr(cls, name, function)
    return cls
