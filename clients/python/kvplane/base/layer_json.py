"""Conversion of layer formats to and from JSON values, for files and messages.

    {"type": "sliding_window", "block_size": 16, "window": 128, ...}

A field with its default value is left out. A field that the layer type does not have is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from enum import Enum
from typing import Any, TypeVar

from kvplane.base.errors import InvalidArgument
from kvplane.base.groups import MambaMode
from kvplane.base.layer_spec import DType, LayerSpec, refuse
from kvplane.base.layers import (
    ChunkedLocalSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    HiddenStateSpec,
    MambaSpec,
    MLASpec,
    RingSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

LAYER_TYPES: dict[str, type[LayerSpec]] = {
    spec_type.type_name: spec_type
    for spec_type in (
        FullAttentionSpec,
        MLASpec,
        HiddenStateSpec,
        SinkFullAttentionSpec,
        RSWASpec,
        SlidingWindowSpec,
        SlidingWindowMLASpec,
        ChunkedLocalSpec,
        CrossAttentionSpec,
        RingSpec,
        MambaSpec,
    )
}

_T = TypeVar("_T")
_E = TypeVar("_E", bound=Enum)


def spec_to_dict(spec: LayerSpec) -> dict[str, Any]:
    """Return a layer format as JSON values: its type, and the fields that do not have their default value."""
    values = {f.name: getattr(spec, f.name) for f in fields(spec)}
    defaults = {f.name: f.default for f in fields(spec)}
    changed = {name: _plain(value) for name, value in values.items() if value != defaults[name]}
    return {"type": spec.type_name, **changed}


def spec_from_dict(data: Mapping[str, Any], path: str = "spec") -> LayerSpec:
    """Return the layer format that `spec_to_dict` converted to JSON values.

    Raises:
        InvalidArgument: the type or a field is unknown, a field is missing, or the format cannot have its value. The
            error's field is `path` and the name of the field.
    """
    spec_type = LAYER_TYPES.get(_exactly(str, data.get("type"), f"{path}.type"))
    if spec_type is None:
        refuse(f"there is no layer type {data['type']!r}", f"{path}.type", f"use one of {', '.join(LAYER_TYPES)}")
    given = {name: value for name, value in data.items() if name != "type"}
    known = {f.name: f for f in fields(spec_type)}
    for name in given.keys() - known.keys():
        refuse(f"{spec_type.type_name} has no such field", f"{path}.{name}", f"its fields are {', '.join(known)}")
    for name in (name for name, f in known.items() if f.default is MISSING and name not in given):
        refuse("the field is missing", f"{path}.{name}", f"{spec_type.type_name} requires it")
    values: dict[str, Any] = {name: _parse(known[name], given[name], f"{path}.{name}") for name in given}
    try:
        return spec_type(**values)
    except InvalidArgument as error:
        raise InvalidArgument(error.message, field=f"{path}.{error.field}", remedy=error.remedy) from None


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _parse(spec_field: Field[Any], value: object, path: str) -> object:
    # The annotation is text (see the __future__ import of the module that declares it).
    return _PARSERS[str(spec_field.type)](value, path)


def _integer(value: object, path: str) -> int:
    if isinstance(value, bool):
        refuse(f"expected an integer, found {value!r}", path, "give a whole number")
    return _exactly(int, value, path)


def _dtype(value: object, path: str) -> DType:
    return _member(DType, value, path)


def _items(value: object, parse: Callable[[object, str], _T], path: str) -> tuple[_T, ...]:
    return tuple(parse(item, f"{path}[{i}]") for i, item in enumerate(_exactly(list, value, path)))


def _exactly(expected: type[_T], value: object, path: str) -> _T:
    if not isinstance(value, expected):
        refuse(f"expected {expected.__name__}, found {value!r}", path, f"give a value of type {expected.__name__}")
    return value


def _member(names: type[_E], value: object, path: str) -> _E:
    found = [member for member in names if member.value == value]
    if not found:
        refuse(f"{value!r} is unknown", path, f"use one of {', '.join(str(m.value) for m in names)}")
    return found[0]


_PARSERS: dict[str, Callable[[object, str], object]] = {
    "int": _integer,
    "bool": lambda value, path: _exactly(bool, value, path),
    "str": lambda value, path: _exactly(str, value, path),
    "DType": _dtype,
    "MambaMode": lambda value, path: _member(MambaMode, value, path),
    "tuple[tuple[int, ...], ...]": lambda value, path: _items(value, lambda item, at: _items(item, _integer, at), path),
    "tuple[DType, ...]": lambda value, path: _items(value, _dtype, path),
}
