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

    @property
    def is_plain(self) -> bool:
        """Whether the message has the same value as kvplane's type, also where it is absent."""
        return not self.optional and self.kind in ("hashes", "flag", "u32", "u64")


class Section:
    """The description of a section: its columns and other fields, in the order of the contract.

    Attributes:
        kind: kvplane's type.
        columns: all columns.
        tables: columns that have equal numbers of rows, by table.
        others: fields that are no columns.
        plain, turned: names of those whose value is the same in the message, and the other ones.
        inner: sections in this one, by the name of the field.
    """

    __slots__ = ("columns", "inner", "kind", "others", "plain", "tables", "turned")

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
        self.others = others
        self.plain = [other.name for other in others if other.is_plain]
        self.turned = [other for other in others if not other.is_plain]
        self.inner = inner or {}


# Sections are passed as dicts: to build a message from messages, protobuf would copy the columns at each level.
def encode_section(section: object, of: Section, where: str) -> dict[str, Any]:
    """Return the fields of a section's message that are not empty.

    Raises:
        InvalidArgument: a number does not fit; the error's field is `where` and the name of the field.
        TypeError: a value has a wrong type.
    """
    fields = pack_section(section, of.columns, where)
    given: Mapping[str, Any] | None = getattr(section, "__dict__", None)  # of what is made when read: a missing field
    for name, kind, default, _, _ in of.others:
        value = getattr(section, name) if given is None else given.get(name, default)
        if value is not default and value != default and (value or default):
            fields[name] = _encode(value, kind, where, name)
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
        if found := unpack_section(message, columns, where, to_lists=to_lists):
            fields = {**fields, **found} if fields else found
    for name in of.plain:
        fields[name] = getattr(message, name)
    for name, kind, default, optional, highest in of.turned:
        if optional:
            if message.HasField(name):
                fields[name] = getattr(message, name)
        elif kind == "choice":
            fields[name] = _choice(getattr(message, name), default, highest, where)
        else:
            values = getattr(message, name)
            fields[name] = list(map(decode_extra_keys, values) if kind == "keys" else values)
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
    for name, kind, *_ in of.others:
        if kind in ("texts", "keys") and len(getattr(section, name)) not in (0, rows):
            raise wrong_rows(f"{where}.{name}", len(getattr(section, name)), rows)


def _choice(value: int, default: OnRefusal, highest: int, where: str) -> OnRefusal:
    if value == 0:
        return default
    if not 0 < value <= highest:
        names = ", ".join(choice.name for choice in OnRefusal if choice < highest)
        raise InvalidArgument(
            f"{value} is not valid for this section", field=f"{where}.on_refusal", remedy=f"use one of {names}"
        )
    return OnRefusal(value - 1)
