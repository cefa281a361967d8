"""Conversion of types to messages whose fields have the same names, and back. The caller gives what is not the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from enum import Enum
from functools import cache
from types import NoneType
from typing import Any, NamedTuple, TypeVar, cast, get_args, get_type_hints

from google.protobuf.descriptor import Descriptor
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import Message

from kvplane.base.errors import InvalidArgument
from kvplane.wire.columns import build

_T = TypeVar("_T")
_E = TypeVar("_E", bound=Enum)
_M = TypeVar("_M", bound=Message)
_WORDS = re.compile("(?<=[a-z])(?=[A-Z])")


class _Field(NamedTuple):
    """A field that a type and its message have.

    Attributes:
        kind: type of the value; of a tuple, that of its entries.
        is_many, is_optional: whether it is a tuple, whether it may be None.
        default: in the type; MISSING = there is none.
        message: type of the value's message, or of each entry's; None: the value is the same.
        numbers: of an enumeration that has names in the message, its numbers there.
    """

    name: str
    kind: Any
    is_many: bool
    is_optional: bool
    default: Any
    message: type[Message] | None
    numbers: EnumTypeWrapper | None


def encode_same(value: object, kind: type[_M], where: str, inside: str = "", **others: object) -> _M:
    """Return the message of a value, whose type is a dataclass. Raises InvalidArgument with the field `where` for a
    value that its field cannot hold; `inside` is put before the names of fields that are messages.

    `others`: fields of the message that are not as the value has them.
    """
    for one in _fields(cast(Any, type(value)), cast(Any, kind)):
        if one.name not in others:
            others[one.name] = _encode(getattr(value, one.name), one, inside + one.name)
    return build(kind, where, others)


def _encode(value: Any, one: _Field, where: str) -> object:  # noqa: ANN401
    if value is None or (one.numbers is None and one.message is None):
        return value
    if one.numbers is not None:
        return encode_enum(one.numbers, value)
    assert one.message is not None
    if not one.is_many:
        return encode_same(value, one.message, where, f"{where}.")
    return [encode_same(entry, one.message, f"{where}[{at}]", f"{where}[{at}].") for at, entry in enumerate(value)]


def decode_same(kind: type[_T], message: Message, inside: str = "", **others: object) -> _T:
    """Return the value of a message. Raises InvalidArgument for a number that an enumeration has not, and for a missing
    one that has no default; the error's field is `inside` and the name of the field.

    `others`: fields of the type that are not as the message has them.
    """
    for one in _fields(cast(Any, kind), cast(Any, type(message))):
        if one.name not in others:
            others[one.name] = _decode(message, one, inside + one.name)
    return kind(**others)


def _decode(message: Message, one: _Field, where: str) -> object:
    value = getattr(message, one.name)
    if one.numbers is not None:
        if not value and one.default is MISSING:
            remedy = f"use a value of the enum {one.numbers.DESCRIPTOR.name}"
            raise InvalidArgument(f"the {one.name} is missing", field=where, remedy=remedy)
        default = one.default if isinstance(one.default, one.kind) else next(iter(one.kind))
        return decode_enum(one.numbers, value, where, default)
    if one.is_many:
        if one.message is None:
            return tuple(value)
        return tuple(decode_same(one.kind, entry, f"{where}[{at}].") for at, entry in enumerate(value))
    if one.message is None or (one.is_optional and not message.HasField(one.name)):
        return value if one.message is None else None
    return decode_same(one.kind, value, f"{where}.")


@cache
def _fields(kind: type[Any], message: type[Message]) -> tuple[_Field, ...]:
    return tuple(_shared(kind, cast(Descriptor, message.DESCRIPTOR)))


def _shared(kind: type[Any], descriptor: Descriptor) -> Iterator[_Field]:
    hints = get_type_hints(kind)
    for one in fields(kind):
        known = descriptor.fields_by_name.get(one.name)
        if known is None:
            continue
        hint, choices = hints[one.name], get_args(hints[one.name])
        is_optional, is_many = NoneType in choices, Ellipsis in choices
        of = choices[0] if is_optional or is_many else hint
        enum, inner = known.enum_type, cast(Any, known.message_type)
        numbers = EnumTypeWrapper(enum) if enum is not None and not issubclass(of, int) else None
        message = None if inner is None else inner._concrete_class
        yield _Field(one.name, of, is_many, is_optional, one.default, message, numbers)


@cache
def _prefix(name: str) -> str:
    return f"{_WORDS.sub('_', name).upper()}_"


def encode_enum(numbers: EnumTypeWrapper, value: Enum) -> int:
    """Return the proto number of a Python enum value. Its proto name is that of the enum, "_" and the value, in
    capitals.
    """
    return numbers.Value(_prefix(numbers.DESCRIPTOR.name) + value.value.upper())


def decode_enum(numbers: EnumTypeWrapper, number: int, field: str, default: _E) -> _E:
    """Return the Python enum value of a proto number; 0 stands for `default`. Raises InvalidArgument for an unknown
    number.
    """
    if not number:
        return default
    name = numbers.DESCRIPTOR.values_by_number.get(number)
    if name is None:
        names = ", ".join(numbers.keys())
        raise InvalidArgument(f"{number} is not a value of the enum", field=field, remedy=f"use one of {names}")
    return type(default)(name.name.removeprefix(_prefix(numbers.DESCRIPTOR.name)).lower())
