"""The Python types of the schema, as dataclasses with the comments of the contract."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap

from scripts.columns.schema import Field, Message

WIDTH = 120
# Classes of `kvplane.base.section_methods` with methods of these types.
METHODS = {
    "Blocks": "BlocksMethods",
    "Declined": "RowsMethods",
    "Prefetched": "RowsMethods",
    "Retain": "RetainMethods",
    "Retained": "RowsMethods",
}
TYPES = {
    "column": ("MutableSequence[int]", "field(default_factory=list)"),
    "digests": ("list[bytes]", "field(default_factory=list)"),
    "texts": ("list[str]", "field(default_factory=list)"),
    "hashes": ("bytes", 'b""'),
    "flag": ("bool", "False"),
    "number": ("int", "0"),
}
HEAD = """
from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field

from kvplane.base.section_methods import {methods}
from kvplane.base.values import UNLIMITED, CacheEvent, ExtraKeys, OnRefusal
from kvplane.base.when_read import made_when_read
"""
TOP = """The sections of a step and of its result, whose rows are stored in columns. See `kvplane.base.step`."""


def types(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the lines of the module with the types of these messages."""
    yield f'"""{TOP}"""'
    yield from HEAD.format(methods=", ".join(sorted(set(METHODS.values())))).splitlines()
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
    yield from ("", "")
    for message in messages:
        for table in filter(None, message.tables):
            names = ", ".join(f'"{field.name}"' for field in message.columns if field.option.table == table)
            yield f"{table.upper()}_COLUMNS = ({names})"


def _decorators(message: Message) -> Iterator[str]:
    if not message.columns:  # limits
        yield "@dataclass(frozen=True, slots=True)"
    elif message.of_kind("message") or len(message.tables) > 1:  # of which most fields are absent
        yield from ("@made_when_read", "@dataclass")
    else:
        yield "@dataclass(slots=True)"


def _type(field: Field) -> tuple[str, str]:
    kind, default = TYPES.get(field.kind, (field.of, f"field(default_factory={field.of})"))
    if field.kind == "messages":
        kind = f"{'Sequence' if field.of == 'CacheEvent' else 'list'}[{field.of}]"
        default = "field(default_factory=list)"
    if field.kind == "number" and field.default is not None:
        default = "UNLIMITED" if field.default == 0xFFFFFFFF else str(field.default)
    if field.kind == "choice":
        default = f"{field.of}.{field.choice}"
    return kind, default


def _documentation(text: str) -> list[str]:
    """Return the lines of a docstring in a class."""
    lines = wrap(f'"""{text}', WIDTH - 4, break_long_words=False, break_on_hyphens=False)
    if len(lines) > 1 or len(lines[0]) > WIDTH - 7:
        return [f"    {line}" for line in (*lines, '"""')]
    return [f'    {lines[0]}"""']
