"""Conversion of the columns of a step: lists or arrays in kvplane's types, packed little-endian bytes in the message.

A section of a step is described once, as Columns; packing and unpacking read that description. So a column
takes one C call in each direction, and its rules (element size, one entry per row, highest value) are in one place.
Every step uses this module, so field names are built only for an error.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import Message

from kvplane.base.errors import InvalidArgument
from kvplane.base.packed_ints import PackedInts
from kvplane.base.typed import check

_M = TypeVar("_M", bound=Message)

LONG, SHORT = 1 << 15, 1 << 5  # entries from which on columns stay packed, see `Column.packed_from`
U32, I32, U64 = "I", "i", "Q"
_SWAP = sys.byteorder == "big"
_SMALL = [bytes([number]) for number in range(128)]
_SIZES = {U32: 4, I32: 4, U64: 8}
_NAMES = {U32: "u32", I32: "i32", U64: "u64"}
_BOUNDS = {U32: (0, 2**32 - 1), I32: (-(2**31), 2**31 - 1), U64: (0, 2**64 - 1)}


class Column(NamedTuple):
    """The description of one column of a section.

    Attributes:
        name: name of the field, in kvplane's type and in the message.
        code: array typecode of an element, one of U32, I32, U64.
        by_row: whether the column has one entry per row of the section, or no entries; if False, it has any number of
            entries.
        highest: greatest valid value, for columns of enum values.
        packed_from: number of entries above which the column is unpacked to an array that reads like a list, since
            many Python integers take long to create, and to read by a compiled core.
    """

    name: str
    code: str = U32
    by_row: bool = True
    highest: int | None = None
    packed_from: int | None = None


class Columns:
    """The description of a section: its columns, in order.

    Attributes:
        each: the columns.
        first: index of the first column with one entry per row; None if there is none.
        read: returns the values of all of them, from kvplane's type or the message, in one call.
    """

    __slots__ = ("each", "first", "read")

    def __init__(self, *columns: Column) -> None:
        self.each = columns
        self.first = next((at for at, column in enumerate(columns) if column.by_row), None)
        self.read = values_of([column.name for column in columns])


def values_of(names: Sequence[str]) -> Callable[[object], Sequence[Any]]:
    """Return a function that returns the values of these attributes of an object."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda made: [getattr(made, name) for name in names]  # an attrgetter of one name returns the value alone


def pack(values: Sequence[int], code: str, where: str, name: str) -> bytes:
    """Return integers as packed bytes. Raises InvalidArgument for an entry that does not fit; its field is
    `where.name`.
    """
    try:
        if isinstance(values, (str, bytes, bytearray)):  # an array would take bytes for packed elements
            raise TypeError
        if isinstance(values, array) and values.typecode == code and not _SWAP:
            return values.tobytes()
        if code is I32:  # array takes twice as long as struct for signed elements, and less for unsigned ones
            return struct.pack(f"<{len(values)}i", *values)
        column = array(code, values)
    except (OverflowError, TypeError, struct.error) as error:
        raise _cannot_pack(values, code, f"{where}.{name}") from error
    if _SWAP:
        column.byteswap()
    return column.tobytes()


def unpack(raw: bytes, code: str, where: str, name: str) -> list[int]:
    """Return packed bytes as integers. Raises InvalidArgument if their length is not a multiple of the element size."""
    if _SWAP or len(raw) % _SIZES[code]:
        return _unpack_to_array(raw, code, where, name).tolist()
    return array(code, raw).tolist()


def _unpack_to_array(raw: bytes, code: str, where: str, name: str) -> PackedInts:
    if len(raw) % _SIZES[code]:
        raise InvalidArgument(
            f"{len(raw)} bytes are not a whole number of {_NAMES[code]} values",
            field=f"{where}.{name}",
            remedy=f"send little-endian values of {_SIZES[code]} bytes each",
        )
    column = PackedInts(code, raw)
    if _SWAP:
        column.byteswap()
    return column


def unpack_words(raw: bytes | memoryview, where: str, name: str) -> Sequence[int]:
    """Return packed u64 values as a sequence. The values are not copied, and no object is created per element."""
    if _SWAP or len(raw) % _SIZES[U64]:
        return unpack(bytes(raw), U64, where, name)
    return memoryview(raw).cast("Q")


def pack_section(
    section: object, columns: Columns, where: str, given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the non-empty columns of a section as packed bytes, by field name. `given`: the fields that there are of
    a section whose fields are made when they are read.
    """
    values = columns.read(section) if given is None else [given.get(column.name) for column in columns.each]
    if not any(values):
        return {}  # as most sections of most steps are
    return {
        column.name: pack(entries, column.code, where, column.name)
        for column, entries in zip(columns.each, values, strict=True)
        if entries
    }


def unpack_section(message: object, columns: Columns, where: str, *, to_lists: bool = True) -> dict[str, Any]:
    """Return the non-empty columns of a message, by field name: as lists, or as arrays that read like lists.

    Raises:
        InvalidArgument: the length of a column is not a multiple of its element size; the number of its entries is not
            the number of rows (that is, of entries of the first by_row column); or a value is too high. The error's
            field is `where` and the name of the column.
    """
    unpacked: dict[str, Any] = {}
    packed = columns.read(message)
    if not any(packed):
        return unpacked
    rows = -1 if columns.first is None or packed[columns.first] else 0
    for column, raw in zip(columns.each, packed):  # noqa: B905 - `strict` is slow, and every step comes here
        if not raw:
            continue
        name, code, by_row, highest, packed_from = column
        if packed_from is not None and len(raw) > packed_from * _SIZES[code]:
            unpacked[name] = _unpack_to_array(raw, code, where, name)
            continue
        values: Sequence[int]
        if _SWAP or len(raw) % _SIZES[code]:
            values = _unpack_to_array(raw, code, where, name)
            values = values.tolist() if to_lists else values
        else:
            values = array(code, raw).tolist() if to_lists else PackedInts(code, raw)
        unpacked[name] = values
        if by_row and len(values) != rows:
            if rows >= 0:
                raise wrong_rows(f"{where}.{name}", len(values), rows)
            rows = len(values)
        if highest is not None and max(values) > highest:
            raise InvalidArgument(
                f"the value {max(values)} is above the highest one, {highest}",
                field=f"{where}.{name}",
                remedy=f"use values from 0 to {highest}",
            )
    return unpacked


def wrong_rows(name: str, entries: int, rows: int) -> InvalidArgument:
    """Return the error for a column that is not empty and does not have exactly one entry per row."""
    return InvalidArgument(
        f"the column has {entries} entries, but the section has {rows} rows",
        field=name,
        remedy="give one entry per row, or none for the default",
    )


def wrong_total(name: str, given: int, unit: str, wanted: int, source: str) -> InvalidArgument:
    """Return the error for a column whose number of entries is not the sum of another column, `source`."""
    return InvalidArgument(
        f"the column has {given} {unit}, but {source} adds up to {wanted}",
        field=name,
        remedy=f"give {wanted} {unit}, or correct {source}",
    )


def build(message_type: type[_M], where: str, fields: Mapping[str, Any]) -> _M:
    """Return a message with these fields. Raises InvalidArgument with the field `where` for a value that its field
    cannot hold.
    """
    try:
        return message_type(**fields)
    except (ValueError, TypeError, OverflowError) as error:
        raise cannot_build(where, error) from error


def cannot_build(where: str, error: Exception) -> InvalidArgument:
    """Return the error for values that a protobuf message does not accept, for use if no more
    precise reason is found.
    """
    return InvalidArgument(str(error), field=where, remedy="use values of the fields' types and ranges")


def _cannot_pack(values: Sequence[object], code: str, name: str) -> InvalidArgument:
    low, high = _BOUNDS[code]
    if isinstance(values, (str, bytes, bytearray)) or not hasattr(values, "__iter__"):
        check(values, Sequence[int], name)
    for index, value in enumerate(values):
        if not isinstance(value, int) or not low <= value <= high:
            return InvalidArgument(
                f"entry {index} is {value!r}, which is no valid {_NAMES[code]}",
                field=name,
                remedy=f"give integers from {low} to {high}",
            )
    raise AssertionError(f"{name}: every entry is a valid {_NAMES[code]}, but all of them together could not be packed")


def tag_of(message: type[Message], name: str, wire_type: int = 2) -> bytes:
    """Return the serialized tag of a field; by default of a packed column, a text or a message."""
    return varint(message.DESCRIPTOR.fields_by_name[name].number << 3 | wire_type)


def varint(number: int) -> bytes:
    """Serialize a number of a field, or the length of one."""
    if number < 128:
        return _SMALL[number]
    if number < 1 << 14:
        return bytes((number & 127 | 128, number >> 7))
    written = bytearray()
    while number > 127:
        written.append(number & 127 | 128)
        number >>= 7
    written.append(number)
    return bytes(written)
