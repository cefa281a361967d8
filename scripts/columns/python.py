"""The Python types of the schema, as dataclasses with the comments of the contract."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap

from kvplane.base import values
from scripts.columns.schema import BITS, I32, SECTIONS, U32, U64, Field, Message, by_row

UNLIMITED = 0xFFFFFFFF
WIDTH = 120
# Classes of `kvplane.base.section_methods` with methods of these types.
METHODS = {
    "Blocks": "BlocksMethods",
    "Declined": "RowsMethods",
    "Prefetched": "RowsMethods",
    "Retain": "RetainMethods",
    "Retained": "RowsMethods",
}
ROWS = ("Admit",)  # sections of which the core needs rows as tuples
TYPES = {
    "column": ("MutableSequence[int]", "field(default_factory=list)"),
    "digests": ("list[bytes]", "field(default_factory=list)"),
    "texts": ("list[str]", "field(default_factory=list)"),
    "hashes": ("bytes", 'b""'),
    "flag": ("bool", "False"),
    "number": ("int", "0"),
}
TYPES_HEAD = """
from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvplane.base.section_methods import {methods}
from kvplane.base.values import ALL_GROUPS, UNLIMITED, CacheEvent, ExtraKeys, OnRefusal
from kvplane.base.when_read import made_when_read
"""
TYPES_TOP = """The sections of a step and of its result, whose rows are stored in columns. See `kvplane.base.step`."""


def types(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the lines of the module with the types of these messages."""
    yield f'"""{TYPES_TOP}"""'
    yield from TYPES_HEAD.format(methods=", ".join(sorted(set(METHODS.values())))).splitlines()
    for message in messages:
        yield from ("", "")
        yield from _decorators(message)
        base = METHODS.get(message.name)
        yield f"class {message.name}{f'({base})' if base else ''}:"
        yield from _documentation(message.doc)
        for field in message.fields:
            kind, default = _type(field)
            yield ""
            yield f"    {field.name}: {kind} = {default}"
            yield from _documentation(field.doc)
    for message in messages:
        if message.name in ROWS:
            yield from _row(message)
    yield from ("", "")
    yield "# Fields of a section with one entry for each row, or none; but the first, which has one for each."
    yield "BY_ROW: dict[type, tuple[str, ...]] = {"
    for message in messages:
        if message.name in SECTIONS and (rows := by_row(message)):
            names = " ".join(f'"{one.name}",' for one in rows)
            yield f"    {message.name}: ({names}),"
    yield "}"
    for message in messages:
        for table in filter(None, message.tables):
            names = ", ".join(f'"{field.name}"' for field in message.columns if field.option.table == table)
            yield f"{table.upper()}_COLUMNS = ({names})"


def _row(message: Message) -> Iterator[str]:
    yield from ("", "", f"class {message.name}Row(NamedTuple):")
    yield from _documentation(
        f"One row of `{message.name}`, with the default of each column that the section leaves out."
    )
    yield ""
    for field in message.columns:
        if field.is_by_row:
            default = "" if field.default is None else f" = {_default(field, field.default)}"
            yield f"    {field.name}: int{default}"


def _decorators(message: Message) -> Iterator[str]:
    if not message.columns:  # limits
        yield "@dataclass(frozen=True, slots=True)"
    elif message.of_kind("message") or len(message.tables) > 1:  # of which most fields are absent
        yield from ("@made_when_read", "@dataclass")
    else:
        yield "@dataclass(slots=True)"


def _type(field: Field) -> tuple[str, str]:
    """Return the type and the default of a field."""
    kind, default = TYPES.get(field.kind, (field.of, f"field(default_factory={field.of})"))
    if field.kind == "messages":
        kind = f"{'Sequence' if field.of == 'CacheEvent' else 'list'}[{field.of}]"
        default = "field(default_factory=list)"
    if field.kind == "number" and field.default is not None:
        default = _number(field.default)
    if field.kind == "choice":
        default = f"{field.of}.{field.choice}"
    return kind, default


def _number(value: int) -> str:
    return "UNLIMITED" if value == UNLIMITED else str(value)


def _documentation(text: str) -> list[str]:
    """Return the lines of a docstring in a class."""
    lines = wrap(f'"""{text}', WIDTH - 4, break_long_words=False, break_on_hyphens=False)
    if len(lines) > 1 or len(lines[0]) > WIDTH - 7:
        return [f"    {line}" for line in (*lines, '"""')]
    return [f'    {lines[0]}"""']


RANGES_TOP = "The ranges of the values in the sections of a step: what `validate` does not check by itself."
RANGES_HEAD = """
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvplane.base.groups import MAX_TOKENS, ReplicaSpec
from kvplane.base.values import MAX_LOOKAHEAD, MAX_NS, MAX_PRIORITY, MAX_WITHIN_NS, UNLIMITED

# By section: its fields, each with its name, its values, and the least and the greatest valid one.
RANGES: dict[str, Callable[[Any, ReplicaSpec], Iterable[tuple[str, Sequence[int], int, int]]]] = {
"""


def ranges(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the lines of the module with the ranges of values."""
    yield f'"""{RANGES_TOP}"""'
    yield from RANGES_HEAD.splitlines()
    for message in messages:
        checked = [field for field in message.fields if field.range]
        if message.name in SECTIONS and checked:
            yield f'    "{message.name.lower()}": lambda section, spec: ('
            for field in checked:
                low, high = (f"spec.{word}" if word.islower() else word for word in field.range)
                value = f"section.{field.name}" if field.kind == "column" else f"[section.{field.name}]"
                yield f'        ("{field.name}", {value}, {low}, {high}),'
            yield "    ),"
    yield "}"


TABLES_TOP = """What the wire needs to know of each section of a step and of its result: columns and other fields."""
TABLES_HEAD = """
from __future__ import annotations

from kvplane.base import sections
from kvplane.base.values import UNLIMITED, OnRefusal
from kvplane.wire.columns import I32, U64, Column, Columns
from kvplane.wire.sections import Other, Section
"""
CODES = {U32: "", I32: "I32", U64: "U64", BITS: "U64"}


def tables(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the lines of the module with the tables of these messages."""
    yield f'"""{TABLES_TOP}"""'
    yield from TABLES_HEAD.splitlines()
    for message in messages:
        yield ""
        yield f"{_constant(message.name)} = Section("
        yield f"    sections.{message.name},"
        for table in message.tables:
            yield "    Columns("
            yield from (f"        {_column(one)}," for one in message.columns if one.option.table == table)
            yield "    ),"
        others = message.of_kind("hashes", "texts", "digests", "messages", "flag", "number", "choice")
        if rows := [_other(one) for one in others if one.of != "CacheEvent"]:
            yield "    others=("
            yield from (f"        {row}," for row in rows)
            yield "    ),"
        if inner := message.of_kind("message"):
            yield "    inner={"
            yield from (f'        "{one.name}": {_constant(one.of)},' for one in inner)
            yield "    },"
        yield ")"


def _constant(name: str) -> str:
    """Return the name of a message as that of a constant: PartResult is PART_RESULT."""
    return "".join(f"_{letter}" if letter.isupper() and at else letter for at, letter in enumerate(name)).upper()


def _column(field: Field) -> str:
    option = field.option
    said = [f'"{field.name}"', CODES[option.type]]
    said.append("" if field.is_by_row else "by_row=False")
    said.append(f"highest={option.highest}" if option.HasField("highest") else "")
    said.append(f"packed_from={option.packed_from}" if option.packed_from else "")
    return f"Column({', '.join(filter(None, said))})"


def _other(field: Field) -> str:
    kind = f"u{field.bits}" if field.kind == "number" else "keys" if field.kind == "messages" else field.kind
    default = {"hashes": 'b""', "flag": "False", "number": "0"}.get(field.kind, "[]")
    if field.kind == "choice":
        highest = field.option.highest if field.option.HasField("highest") else field.highest
        return f'Other("{field.name}", "{kind}", {field.of}.{field.choice}, highest={highest})'
    if field.default is not None:
        return f'Other("{field.name}", "{kind}", {_number(field.default)}, optional=True)'
    return f'Other("{field.name}", "{kind}", {default})'


ROWS_TOP = """Rows of a step as objects, of the sections whose rows are entries of columns alone."""
ROWS_HEAD = """
from __future__ import annotations

from dataclasses import dataclass

from kvplane.base.values import ALL_GROUPS, UNLIMITED, RowFlag, Watermark


@dataclass(frozen=True, slots=True)
class Row:
"""
AS_OBJECTS = ("Run", "Admit", "Peek", "Prefetch")


def rows(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the lines of the module with the rows that engines give as objects."""
    yield f'"""{ROWS_TOP}"""'
    yield from ROWS_HEAD.splitlines()
    yield from _documentation("The base class of rows: one row of a section of a part, for the request in `slot`.")
    yield from ("", "    slot: int")
    for message in messages:
        if message.name in AS_OBJECTS:
            yield from ("", "", "@dataclass(frozen=True, slots=True)", f"class {message.name}Row(Row):")
            yield from _documentation(
                f"A row of the section `{message.name.lower()}`. For the attributes see `{message.name}`."
            )
            yield ""
            yield from (f"    {_attribute(field)}" for field in message.columns if _is_attribute(field))


def _is_attribute(field: Field) -> bool:
    return field.is_by_row and field.default is not None and field.name != "num_hashes"


def _attribute(field: Field) -> str:
    assert field.default is not None, f"{field.name} has no default"
    if name := field.option.values:
        return f"{field.name}: {name} = {name}.{getattr(values, name)(field.default).name}"
    return f"{field.name}: int = {_default(field, field.default)}"


def _default(field: Field, value: int) -> str:
    return "ALL_GROUPS" if field.option.type == BITS else _number(value)
