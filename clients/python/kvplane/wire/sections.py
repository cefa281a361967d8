"""Conversion of the sections of a step and of its result to and from protobuf, by the generated tables of
`kvplane.wire.tables`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from google.protobuf.message import Message

from kvplane.base.errors import InvalidArgument
from kvplane.base.values import OnRefusal
from kvplane.wire.columns import Columns, pack_section, unpack_section, wrong_rows
from kvplane.wire.extra_keys import decode_extra_keys, encode_extra_keys

U32_MAX = 0xFFFFFFFF


class Other(NamedTuple):
    """The description of a field that is no column.

    Attributes:
        name: name of the field, in kvplane's type and in the message.
        kind: `hashes`, `texts`, `digests`, `keys`, `flag`, `u32`, `u64` or `choice`, see `Section`.
        default: what it means if it is absent.
        optional: whether the message distinguishes 0 from an absent field.
        highest: greatest valid value in the message, of an enumeration.
    """

    name: str
    kind: str
    default: Any
    optional: bool = False
    highest: int = 0


class Section:
    """The description of a section: its columns and other fields, in the order of the contract.

    Attributes:
        kind: kvplane's type.
        columns: all columns.
        tables: columns that have equal numbers of rows, by table.
        others: fields that are no columns, by name; below, the names of some.
        plain: those whose value is the same in the message, also where it is absent.
        lists: those that have one entry per row, or none.
        inner: sections in this one, by the name of the field.
        made_when_read: whether fields of the type may be missing, see `kvplane.base.when_read`.
    """

    __slots__ = tuple("kind columns tables others defaults optional choices lists plain inner made_when_read".split())

    def __init__(
        self,
        kind: type[Any],
        *tables: Columns,
        others: tuple[Other, ...] = (),
        inner: Mapping[str, Section] | None = None,
    ) -> None:
        self.kind = kind
        self.columns = Columns(*[column for table in tables for column in table.each])
        self.tables = tables
        self.others = {other.name: other for other in others}
        self.defaults = [(other.name, other.default) for other in others]
        self.optional = [other.name for other in others if other.optional]
        self.choices = [other for other in others if other.kind == "choice"]
        self.lists = [
            (other.name, other.kind == "keys") for other in others if other.kind in ("texts", "digests", "keys")
        ]
        turned = {*self.optional, *(other.name for other in self.choices), *(name for name, _ in self.lists)}
        self.plain = [name for name in self.others if name not in turned]
        self.inner = inner or {}
        self.made_when_read = "__slots__" not in vars(kind)


# Sections are passed as dicts: to build a message from messages, protobuf would copy the columns at each level.
def encode_section(section: object, of: Section, where: str) -> dict[str, Any]:
    """Return the fields of a section's message that are not empty.

    Raises:
        InvalidArgument: a number does not fit; the error's field is `where` and the name of the field.
        TypeError: a value has a wrong type.
    """
    given = vars(section) if of.made_when_read else None  # a field that is missing is empty
    fields = pack_section(section, of.columns, where, given)
    for name, default in of.defaults:
        value = getattr(section, name) if given is None else given.get(name, default)
        if value is not default and value != default and (value or default):
            fields[name] = _encode(value, of.others[name].kind, where, name)
    if given is not None:
        for name, inner in of.inner.items():
            if name in given and (packed := encode_section(given[name], inner, f"{where}.{name}")):
                fields[name] = packed
    return fields


def _encode(value: Any, kind: str, where: str, name: str) -> object:  # noqa: ANN401
    if kind == "u32":
        if not 0 <= value <= U32_MAX:
            remedy = f"give an integer from 0 to {U32_MAX}"
            raise InvalidArgument(f"{value} is not a u32", field=f"{where}.{name}", remedy=remedy)
    elif kind == "texts":
        # A str would become a list of letters, and bytes would count as text.
        if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
            raise TypeError(name)
    elif kind == "choice":
        return value + 1
    elif kind == "keys":
        return [encode_extra_keys(keys, f"{where}.{name}[{at}]") for at, keys in enumerate(value)]
    return value


def decode_section(message: Message, of: Section, where: str, *, to_lists: bool = True) -> dict[str, Any]:
    """Return the fields of a section's message by name, for `of.kind`; without empty columns.

    Raises:
        InvalidArgument: a column is malformed, see `unpack_section`, or an enumeration has no such value.
    """
    fields: dict[str, Any] = {}
    for columns in of.tables:
        found = unpack_section(message, columns, where, to_lists=to_lists)
        fields = {**fields, **found} if fields else found
    for name in of.plain:
        fields[name] = getattr(message, name)
    for name, is_keys in of.lists:
        values = getattr(message, name)
        fields[name] = list(map(decode_extra_keys, values) if is_keys else values)
    for name in of.optional:
        if message.HasField(name):
            fields[name] = getattr(message, name)
    for choice in of.choices:
        fields[choice.name] = _choice(getattr(message, choice.name), choice, where)
    if of.inner:
        for name, inner in of.inner.items():
            if message.HasField(name):
                found = decode_section(getattr(message, name), inner, f"{where}.{name}", to_lists=to_lists)
                fields[name] = inner.kind(**found)
    return fields


def check_rows(section: object, of: Section, rows: int, where: str) -> None:
    """Raise InvalidArgument if a list of texts or keys of a section with this number of rows has neither as many
    entries nor none.
    """
    for name, _ in of.lists:
        entries = len(getattr(section, name))
        if entries and entries != rows:
            raise wrong_rows(f"{where}.{name}", entries, rows)


def _choice(value: int, of: Other, where: str) -> OnRefusal:
    if value == 0:
        default: OnRefusal = of.default
        return default
    if not 0 < value <= of.highest:
        found, names = f"{value} is not valid for this section", [choice.name for choice in OnRefusal]
        remedy = f"use one of {', '.join(names[: of.highest])}"
        raise InvalidArgument(found, field=f"{where}.{of.name}", remedy=remedy)
    return OnRefusal(value - 1)
