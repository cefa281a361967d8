"""Columns: lists of integers as little-endian packed bytes, and the refusals when they cannot be.

A section of a step is described once, as a tuple of Column; packing and unpacking walk that table: a column
costs one C call each way, and its rules (element size, one entry per row, highest value) are in one place.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

from kvplane.base.errors import InvalidArgument

_M = TypeVar("_M", bound=Message)

_SWAP = sys.byteorder == "big"
_BOUNDS = {"I": (0, 2**32 - 1), "i": (-(2**31), 2**31 - 1), "Q": (0, 2**64 - 1)}
_NAMES = {"I": "u32", "i": "i32", "Q": "u64"}


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a section.

    Attributes:
        name: of the field, in our type and in the message.
        code: array typecode of an element: "I" u32, "i" i32, "Q" u64.
        by_row: one entry per row of the section (or none at all); else any number.
        highest: greatest value with a meaning, for enum columns.
    """

    name: str
    code: str = "I"
    by_row: bool = True
    highest: int | None = None


def pack(values: Sequence[int], code: str, name: str) -> bytes:
    """Pack integers; raises InvalidArgument naming `name` and the entry that does not fit the element."""
    try:
        column = array(code, values)
    except (OverflowError, TypeError) as error:
        raise _cannot_pack(values, code, name) from error
    if _SWAP:
        column.byteswap()
    return column.tobytes()


def unpack(raw: bytes, code: str, name: str) -> list[int]:
    """Unpack integers; raises InvalidArgument naming `name` for a length that is no whole number of them."""
    column = array(code)
    if len(raw) % column.itemsize:
        raise InvalidArgument(
            f"{len(raw)} bytes are no whole number of {_NAMES[code]} values",
            field=name,
            remedy=f"send little-endian values of {column.itemsize} bytes each",
        )
    column.frombytes(raw)
    if _SWAP:
        column.byteswap()
    return column.tolist()


def pack_section(section: object, columns: Iterable[Column], where: str) -> dict[str, Any]:
    """The non-empty columns of a section, packed, by field name."""
    packed = {}
    for column in columns:
        values = getattr(section, column.name)
        if len(values):
            packed[column.name] = pack(values, column.code, f"{where}.{column.name}")
    return packed


def unpack_section(message: object, columns: Iterable[Column], where: str) -> dict[str, Any]:
    """The non-empty columns of a message as lists, by field name.

    Raises InvalidArgument naming `where.<column>` for a broken length, a number of entries that is not the
    number of rows (the entries of the first by_row column), or a value without a meaning.
    """
    lists: dict[str, Any] = {}
    rows = -1
    for column in columns:
        raw = getattr(message, column.name)
        if column.by_row and rows < 0:
            rows = len(raw) // array(column.code).itemsize
        if not raw:
            continue
        name = f"{where}.{column.name}"
        values = unpack(raw, column.code, name)
        if column.by_row and len(values) != rows:
            raise wrong_rows(name, len(values), rows)
        if column.highest is not None and max(values) > column.highest:
            raise InvalidArgument(
                f"{max(values)} has no meaning here",
                field=name,
                remedy=f"use values from 0 to {column.highest}",
            )
        lists[column.name] = values
    return lists


def wrong_rows(name: str, entries: int, rows: int) -> InvalidArgument:
    """The refusal of a column that has some, but not one entry per row."""
    return InvalidArgument(
        f"{entries} entries for {rows} rows",
        field=name,
        remedy="give one entry per row, or none for the default",
    )


def check_total(name: str, given: int, wanted: int, unit: str, source: str) -> None:
    """Refuse a flat column whose length is not the sum that another column announces."""
    if given != wanted:
        raise InvalidArgument(
            f"{given} {unit} where {source} announces {wanted}",
            field=name,
            remedy=f"make {source} add up to it",
        )


def build(message_type: type[_M], where: str, fields: Mapping[str, Any]) -> _M:
    """A message of these fields; raises InvalidArgument naming `where` for a value that no field can hold."""
    try:
        return message_type(**fields)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidArgument(
            str(error), field=where, remedy="use a value of the field's type and range"
        ) from error


def _cannot_pack(values: Sequence[object], code: str, name: str) -> InvalidArgument:
    low, high = _BOUNDS[code]
    for index, value in enumerate(values):
        if not isinstance(value, int) or not low <= value <= high:
            return InvalidArgument(
                f"entry {index} is {value!r}, which is no {_NAMES[code]}",
                field=name,
                remedy=f"give integers from {low} to {high}",
            )
    raise AssertionError(f"{name}: every entry fits {_NAMES[code]} but the column was refused")
