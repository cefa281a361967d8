"""The C++ types of the sections of a step, and what reads them from Python's, in the compiled core."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scripts.columns.schema import BITS, NAMES, Field, Message

UNLIMITED = 0xFFFFFFFF
# Sections to which `step.h` adds functions: it derives the type of this name from the generated one.
EXTENDED = ("Facts", "Cache", "Retain")
# What a step consists of, and tables of its result.
SECTIONS = ("Facts", "Cache", "News", "Run", "Admit", "Peek", "Prefetch", "Retain", "Budget")
TABLES = ("Declined", "Prefetched", "Retained")
# Lists of which the core needs to know only how many entries there are.
COUNTED = {"extra_keys": "num_extra_keys", "traceparent": "num_traceparents"}

STRUCTS_TOP = """
// The sections of a step, and tables of its result, in columns: one entry per row, or none where every row has the
// default.
#pragma once

#include "types.h"

namespace kvplane {

// Digests, joined; or other bytes.
struct Hashes {
    const uint8_t* data = nullptr;
    size_t size = 0;
};

// Token ids.
struct TokenIds {
    Int count = 0;
    bool fit = true;           // each is a u32
    std::vector<uint8_t> ids;  // u32, if they fit
};

// A column of a section.
template <typename Section>
struct SectionColumn {
    const char* name;
    Column Section::*of;
    bool is_by_row;                 // it has an entry for each row, or none
    std::optional<Int> otherwise{};  // what each row has in an empty one
    bool is_bits = false;           // an entry is a u64, as the Int of the same bits
};"""


def structs(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the lines of the header with the types of the sections of a step."""
    yield from STRUCTS_TOP.splitlines()[1:]
    for message in _named(messages, SECTIONS + TABLES):
        name = _struct(message)
        yield ""
        yield f"struct {name} {{"
        yield from (f"    {line}" for line in _members(message))
        yield "};"
        if message.columns:
            yield f"inline constexpr SectionColumn<{name}> k{message.name}Columns[] = {{"
            for field in message.columns:
                if not _is_tokens(field):
                    yield f"    {_entry(field, name)},"
            yield "};"
            yield f"constexpr const auto& ColumnsOf(const {name}&) {{ return k{message.name}Columns; }}"
    yield from ("", "}  // namespace kvplane")


def _named(messages: Sequence[Message], names: tuple[str, ...]) -> list[Message]:
    found = {message.name: message for message in messages}
    return [found[name] for name in names]


def _struct(message: Message) -> str:
    return f"{message.name}Fields" if message.name in EXTENDED else message.name


def _is_tokens(field: Field) -> bool:
    return field.name == "tokens"


def _entry(field: Field, struct: str) -> str:
    said = [f'"{field.name}"', f"&{struct}::{field.name}", "true" if field.is_by_row else "false"]
    said += [] if field.default is None else [_number(field.default)]
    said += ["true"] if field.option.type == BITS else []
    return f"{{{', '.join(said)}}}"


def _members(message: Message) -> Iterator[str]:
    for field in message.fields:
        if _is_tokens(field) and field.kind == "column":
            yield "TokenIds tokens;"
        elif field.kind == "column":
            rows = "" if field.is_by_row else ", any number"
            default = "" if field.default is None else f", default {field.default}"
            yield f"Column {field.name};  // {NAMES[field.option.type]}{default}{rows}"
            if field.option.type == BITS:
                yield f"bool {field.name}_fit = true;  // each entry has 64 bits"
        elif field.kind == "hashes":
            yield f"Hashes {field.name};"
        elif field.name in COUNTED:
            yield f"Int {COUNTED[field.name]} = 0;"
        elif field.kind == "texts":
            yield f"std::vector<std::string> {field.name};"
            yield f"bool {field.name}_fit = true;  // each entry is a text"
        elif field.kind == "flag":
            yield f"bool {field.name} = false;"
        elif field.kind == "choice":
            yield f"Int {field.name} = k{field.choice.capitalize()};"
        else:
            yield f"Int {field.name} = {_number(field.default or 0)};"


def _number(value: int) -> str:
    return "kUnlimited" if value == UNLIMITED else str(value)


READERS_TOP = """
// Reads the sections of a Python `Step`. `read_step.h` has what reads their fields, and includes this.
#pragma once

namespace kvplane {"""


def readers(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the lines of the header that reads the sections of a step from Python's types."""
    yield from READERS_TOP.splitlines()[1:]
    for message in _named(messages, SECTIONS):
        into = message.name.lower()
        yield ""
        yield f"inline void Read{message.name}(PyObject* object, {message.name}* {into}) {{"
        yield from (f"    {_reader(field, into)}" for field in message.fields)
        yield "}"
    yield from ("", "}  // namespace kvplane")


def _reader(field: Field, into: str) -> str:
    read, to = f'ATTRIBUTE(object, "{field.name}").get()', f"{into}->{field.name}"
    if field.kind == "column" and _is_tokens(field):
        return f"ReadTokens({read}, &{to});"
    if field.kind == "column" and field.option.type == BITS:
        return f"{to}_fit = ReadBits({read}, &{to});"
    if field.kind == "column":
        return f"ReadColumn({read}, &{to});"
    if field.name in COUNTED:
        return f"{into}->{COUNTED[field.name]} = Count({read});"
    if field.kind == "texts":
        return f"{to}_fit = ReadTexts({read}, &{to});"
    if field.kind == "hashes":
        return f"ReadHashes({read}, &{to});"
    return f"{to} = {'IsTrue' if field.kind == 'flag' else 'NumberOfStep'}({read});"
