"""Checks of arguments against their type annotations. The error names the argument and the type that it must have.

Calls that are not time-critical are always checked; time-critical calls only after a failure, to find its cause.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, wraps
from types import NoneType, UnionType
from typing import Any, ParamSpec, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from kvplane.base.errors import InvalidArgument

_P = ParamSpec("_P")
_R = TypeVar("_R")

_NAMES: dict[object, str] = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bytes: "bytes",
    bool: "True or False",
    NoneType: "None",
}
_ACCEPTED: dict[object, tuple[type, ...]] = {float: (float, int), bytes: (bytes, bytearray)}
_SHOWN_CHARS = 60


def check(value: object, hint: Any, where: str) -> None:  # noqa: ANN401
    """Raise InvalidArgument if `value` is not of type `hint`. The error's field is `where`, or an element within it."""
    wrong = _wrong(value, hint, where)
    if wrong is not None:
        raise wrong


def checked(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function so that each call checks its arguments against the annotations and raises InvalidArgument."""
    signature = inspect.signature(function)

    def look(arguments: dict[str, object]) -> None:
        hints = _hints(function)
        for name, value in arguments.items():
            check(value, hints.get(name, Any), name)  # self has none

    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def call_later(*args: _P.args, **kwargs: _P.kwargs) -> Any:  # noqa: ANN401
            look(signature.bind(*args, **kwargs).arguments)
            return await function(*args, **kwargs)

        return cast(Callable[_P, _R], call_later)

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        look(signature.bind(*args, **kwargs).arguments)
        return function(*args, **kwargs)

    return call


@cache
def _hints(of: Hashable) -> dict[str, Any]:
    return get_type_hints(of)


def _wrong(value: object, hint: Any, where: str) -> InvalidArgument | None:  # noqa: ANN401
    origin = get_origin(hint)
    if hint is Any:
        return None
    if origin in (Union, UnionType):
        return _wrong_union(value, hint, where)
    if origin is not None and origin is not Callable and issubclass(origin, Iterable):
        return _wrong_sequence(value, hint, where)
    if not _is_a(value, origin or hint):
        return _refusal(value, hint, where)
    if is_dataclass(hint):
        return _wrong_field(value, where)
    return None


def _wrong_union(value: object, hint: Any, where: str) -> InvalidArgument | None:  # noqa: ANN401
    found = [_wrong(value, choice, where) for choice in get_args(hint)]
    if None in found:
        return None
    inner = [wrong for wrong in found if wrong is not None and wrong.field != where]
    return inner[0] if inner else _refusal(value, hint, where)


def _wrong_sequence(value: object, hint: Any, where: str) -> InvalidArgument | None:  # noqa: ANN401
    element, *more = get_args(hint)
    if isinstance(value, (str, bytes, bytearray)) or not hasattr(value, "__iter__") or not hasattr(value, "__len__"):
        return _refusal(value, hint, where)
    if isinstance(value, (Mapping, AbstractSet)) and issubclass(get_origin(hint) or object, Sequence):
        return _refusal(value, hint, where)
    entries: Sequence[object] = list(cast(Iterable[object], value))
    if more and more != [...]:
        if not isinstance(value, tuple) or len(entries) != len(more) + 1:
            return _refusal(value, hint, where)
    elif isinstance(element, type) and set(map(type, entries)) <= {element} and not is_dataclass(element):
        return None
    hints = [element] * len(entries) if not more or more == [...] else [element, *more]
    found = (_wrong(entry, one, f"{where}[{at}]") for at, (entry, one) in enumerate(zip(entries, hints, strict=True)))
    return next((wrong for wrong in found if wrong is not None), None)


def _wrong_field(value: Any, where: str) -> InvalidArgument | None:  # noqa: ANN401
    hints, dot = _hints(cast(Hashable, type(value))), f"{where}." if where else ""
    found = (_wrong(getattr(value, one.name), hints[one.name], f"{dot}{one.name}") for one in fields(value))
    return next((wrong for wrong in found if wrong is not None), None)


def _is_a(value: object, hint: Any) -> bool:  # noqa: ANN401
    if hint is None or hint is NoneType:
        return value is None
    if hint is int or (isinstance(hint, type) and issubclass(hint, Enum) and issubclass(hint, int)):
        return hasattr(value, "__index__") and (hint is int or _is_member(value, hint))
    if hint is bool:
        return isinstance(value, bool) or (isinstance(value, int) and value in (0, 1))
    if hint is Callable:
        return callable(value)
    return isinstance(value, _ACCEPTED.get(hint, hint))


def _is_member(value: Any, hint: Any) -> bool:  # noqa: ANN401
    try:
        hint(value)
    except ValueError:
        return False
    return True


def _refusal(value: object, hint: Any, where: str) -> InvalidArgument:  # noqa: ANN401
    shown, expected = repr(value), _expected(hint)
    if len(shown) > _SHOWN_CHARS:
        shown = f"{shown[:_SHOWN_CHARS]}..."
    return InvalidArgument(f"{shown} is not {expected}", field=where, remedy=f"give {expected}")


def _expected(hint: Any) -> str:  # noqa: ANN401
    origin, choices = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(_expected(choice) for choice in choices)
    if origin is tuple and choices[-1] is not ...:
        return f"a tuple of {', '.join(_expected(choice) for choice in choices)}"
    if origin is not None and issubclass(origin, Iterable):
        return f"a sequence, each {_expected(choices[0])}"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(f'{hint.__name__}.{one.name}' for one in hint)}"
    return _NAMES.get(hint, f"a {getattr(hint, '__name__', hint)}")
