"""The C++ types of the sections of a step, and what reads them from Python's, in the compiled core."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scripts.columns.schema import BITS, I32, NAMES, SECTIONS, U32, U64, Field, Message, by_row

UNLIMITED = 0xFFFFFFFF
# Sections to which `step.h` adds functions: it derives the type of this name from the generated one.
EXTENDED = ("Facts", "Cache", "Retain", "PartResult")
# What a result consists of; `step.h` has the orders and blocks.
READ = (*SECTIONS, "Resume")  # steps with an image are packed by Python
RESULTS = ("Declined", "Prefetched", "Retained", "PartResult")
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
    bool is_wide = false;           // an entry is a u64
    bool is_bits = false;           // it is the Int of the same bits
};

// The name of a field that has an entry for each row, or none; and how many it has.
struct NumEntries {
    const char* name;
    size_t count;
};"""


def structs(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the lines of the header with the types of the sections of a step."""
    yield from STRUCTS_TOP.splitlines()[1:]
    for message in _named(messages, READ + RESULTS):
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
        if counted := _counted(message):
            variable = message.name.lower()
            yield f"inline std::array<NumEntries, {len(counted)}> NumEntriesOf(const {name}& {variable}) {{"
            yield "    return {{"
            yield from (f'        {{"{variable}.{field}", {count}}},' for field, count in counted)
            yield "    }};"
            yield "}"
    yield from ("", "}  // namespace kvplane")


def _counted(message: Message) -> list[tuple[str, str]]:
    """Return each field of a section that has an entry for each row, but the first, and the number of its entries."""
    found = []
    for field in by_row(message) if message.name in READ else []:
        path = f"{message.name.lower()}."
        of_counted = f"static_cast<size_t>({path}{COUNTED.get(field.name)})"
        found.append((field.name, of_counted if field.name in COUNTED else f"{path}{field.name}.size()"))
    return found


def _named(messages: Sequence[Message], names: tuple[str, ...]) -> list[Message]:
    found = {message.name: message for message in messages}
    return [found[name] for name in names]


def _struct(message: Message) -> str:
    return f"{message.name}Fields" if message.name in EXTENDED else message.name


def _is_tokens(field: Field) -> bool:
    return field.name == "tokens"


def _entry(field: Field, struct: str) -> str:
    said = [f'"{field.name}"', f"&{struct}::{field.name}", "true" if field.is_by_row else "false"]
    said += (
        ["{}" if field.default is None else _number(field.default)]
        if field.is_wide or field.default is not None
        else []
    )
    said += ["true"] if field.is_wide else []
    said += ["true"] if field.option.type == BITS else []
    return f"{{{', '.join(said)}}}"


def _members(message: Message) -> Iterator[str]:
    """Yield the members of a section; of a result those that are columns."""
    for field in message.columns if message.name in RESULTS else message.fields:
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
            yield f"std::vector<std::string> {field.name};  // as in a message, of a step that was read from one"
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
    for message in _named(messages, READ):
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


WIRE_TOP = """
// Reads the sections of a step from its message, and writes the message of its answer.
#pragma once

#include "wire.h"

namespace kvplane {"""
COUNTS = {"Facts": "appended", "News": "num_tokens"}  # columns that say how many tokens a row has


def wire(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the lines of the header that reads the sections of a step, and writes those of its result."""
    yield from WIRE_TOP.splitlines()[1:]
    for message in _named(messages, READ):
        yield from ("", *_section_reader(message), "", *_reset(message))
    for message in _named(messages, ("Blocks", "Orders", *RESULTS)):
        yield from ("", *_writer(message))
    yield from ("", "}  // namespace kvplane")


def _section_reader(message: Message) -> Iterator[str]:
    """Yield a function that reads a section; it returns false for what Python refuses, and names."""
    into = message.name.lower()
    has_hashes = bool(message.of_kind("hashes"))
    of_digests = "size_t digest_size" if has_hashes else "size_t"
    yield f"inline bool ReadSection(Hashes message, {of_digests}, {message.name}* {into}) {{"
    yield "    Fields fields(message);"
    yield "    for (Field field; fields.Next(&field);) {"
    yield "        bool is_read = true;"
    yield "        switch (field.number) {"
    for field in sorted(message.fields, key=lambda field: field.number):
        yield f"            case {field.number}: is_read = {_field_reader(field, into)}; break;"
    yield "        }"
    yield "        if (!is_read) return false;"
    yield "    }"
    for name, number in COUNTED.items():
        if name in [field.name for field in message.fields]:
            yield f"    {into}->{number} = static_cast<Int>({into}->{name}.size());"
    checks = ["fields.ok"]
    if rows := [field for field in message.fields if field.is_by_row]:
        checks.append(f"AreByRow(NumEntriesOf(*{into}), {into}->{rows[0].name}.size())" if by_row(message) else "")
    if has_hashes:
        checks.append(f"AddUp({into}->num_hashes, digest_size, {into}->hashes.size)")
    if message.name in COUNTS:
        tokens = f"{into}->tokens.count"
        checks.append(f"({tokens} == 0 || AddUp({into}->{COUNTS[message.name]}, 1, static_cast<uint64_t>({tokens})))")
    yield "    return " + " &&\n           ".join(filter(None, checks)) + ";"
    yield "}"


STORED = {U32: "uint32_t", I32: "int32_t", U64: "uint64_t", BITS: "uint64_t"}


def _field_reader(field: Field, into: str) -> str:
    to = f"&{into}->{field.name}"
    if field.kind == "column" and _is_tokens(field):
        return f"ReadTokens(field, {to})"
    if field.kind == "column":
        highest = f", {field.option.highest}" if field.option.HasField("highest") else ""
        return f"ReadPacked<{STORED[field.option.type]}>(field, {to}{highest})"
    if field.kind == "hashes":
        return f"ReadBytes(field, {to})"
    if field.kind in ("texts", "messages"):
        return f"Add{'Text' if field.kind == 'texts' else 'Message'}(field, {to})"
    if field.kind == "flag":
        return f"ReadFlag(field, {to})"
    if field.kind == "choice":
        most = field.option.highest if field.option.HasField("highest") else field.highest
        return f"ReadChoice(field, {most}, k{field.choice.capitalize()}, {to})"
    return f"ReadNumber(field, {field.bits}, {to})"


def _reset(message: Message) -> Iterator[str]:
    """Yield a function that empties a section, and keeps the memory of its columns."""
    into = message.name.lower()
    yield f"inline void Reset({message.name}* {into}) {{"
    for field in message.fields:
        to = f"{into}->{field.name}"
        if field.kind == "column" and _is_tokens(field):
            yield f"    {to}.count = 0;"
            yield f"    {to}.ids.clear();"
        elif field.kind in ("column", "texts", "messages"):
            yield f"    {to}.clear();"
        elif field.kind == "hashes":
            yield f"    {to} = Hashes();"
        elif field.kind == "choice":
            yield f"    {to} = k{field.choice.capitalize()};"
        else:
            yield f"    {to} = {'false' if field.kind == 'flag' else _number(field.default or 0)};"
        if field.name in COUNTED:
            yield f"    {into}->{COUNTED[field.name]} = 0;"
    yield "}"


OF_TIERS = ("declined", "prefetched", "retained")


def _writer(message: Message) -> Iterator[str]:
    """Yield a function that writes a section of a result, the last field first."""
    name, of = message.name.lower(), message.name
    head = f"inline void Write(const {of}& {name}, Backward* into"
    if of == "Blocks":
        head = f"inline void Write(const BlockLists& {name}, Backward* into"
    elif of == "Orders":
        head += ", const TierAnswer* tiers"
    elif of == "PartResult":
        name = "part"
        head = "inline void Write(const PartResult& part, Backward* into, bool with_events"
    yield f"{head}) {{"
    for field in sorted(message.fields, key=lambda field: -field.number):
        yield f"    {_field_writer(field, name, message)}"
    yield "}"


def _field_writer(field: Field, name: str, message: Message) -> str:
    of, number, table = f"{name}.{field.name}", field.number, field.option.table
    if field.kind == "column" and table in JOBS:
        column = [one.name for one in message.columns if one.option.table == table].index(field.name)
        return f"WriteJobs<{STORED[field.option.type]}, &JobOrders::{table}>(tiers, into, {number}, {column});"
    if field.kind == "column":
        return f"into->Packed<{STORED[field.option.type]}>({number}, {of});"
    if field.kind == "digests":
        return f"WriteDigests({of}, into, {number});"
    if field.kind == "messages":
        return f"if (with_events) WriteEvents({name}, into, {number});"
    if field.kind == "message" and field.name in OF_TIERS:
        return f"if ({name}.tiers != nullptr) WriteMessage({name}.tiers->{field.name}, into, {number});"
    if field.kind == "message":
        tiers = f", {name}.tiers.get()" if field.name == "orders" else ""
        return f"WriteMessage({of}, into, {number}{tiers});"
    return f"into->Number({number}, static_cast<uint64_t>({of}));"


LAYOUTS_TOP = """
// How the fields of parts and results are packed, by the names that `decisions/packing.py` gives them.
#pragma once

#include "pack.h"

namespace kvplane {
"""


def layouts(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the lines of the header with what packs the fields of parts and results."""
    yield from (*LAYOUTS_TOP.splitlines()[1:], "")
    sections = [(message.name.lower(), message) for message in _named(messages, SECTIONS)]
    scalars = [f"{path}.{field.name}" for path, message in sections for field in message.of_kind(*SCALARS)]
    fields = [line for path, message in sections for line in _packed(message, "Part", f"{path}.")]
    yield from _layout("Part", [*scalars, "with_hashes", "with_tables"], fields)
    yield ""
    (resume,) = _named(messages, ("Resume",))
    yield from _layout("Resume", [], list(_packed(resume, "Resume", "")))
    yield ""
    (result,) = _named(messages, ("PartResult",))
    found = {message.name: message for message in messages}
    fields = list(_packed(result, "PartResult", ""))
    for inner in result.of_kind("message"):
        fields += _packed_inner(inner.name, found[inner.of])
    scalars = [field.name for field in result.of_kind(*SCALARS)]
    fields += [f"PACK_FIELD(PartResult, {name})" for name in ("hashed_facts", "hashed_news")]
    yield from _layout("PartResult", [*scalars, "taken_back", "went_back"], fields)
    yield from ("", "}  // namespace kvplane")


SCALARS = ("flag", "number", "choice")
JOBS = ("load", "save", "move")  # tables of `Orders`, which the core keeps as rows


def _layout(of: str, scalars: list[str], fields: list[str]) -> Iterator[str]:
    yield f"inline constexpr std::array<Packer::Scalar<{of}>, {len(scalars)}> k{of}Scalars = {{{{"
    yield from (f"    PACK_SCALAR({of}, {path})," for path in scalars)
    yield "}};"
    yield f"inline constexpr std::array<Packer::Field<{of}>, {len(fields)}> k{of}Fields = {{{{"
    yield from (f"    {line}," for line in fields)
    yield "}};"


def _packed(message: Message, of: str, path: str) -> Iterator[str]:
    for field in message.of_kind("column", "hashes", "texts", "digests", *(["messages"] if of == "Part" else [])):
        if not _is_tokens(field):
            pack = "PACK_BITS" if field.option.type == BITS else "PACK_FIELD"
            yield f"{pack}({of}, {path}{field.name})"


def _packed_inner(name: str, message: Message) -> Iterator[str]:
    if message.name == "Orders":
        for table in message.tables:
            columns = [field.name for field in message.columns if field.option.table == table]
            for at, column in enumerate(columns):
                is_job = table in JOBS
                yield f"PACK_JOBS({table}, {at}, {column})" if is_job else f"PACK_FIELD(PartResult, orders.{column})"
    elif message.name == "Blocks":
        yield from _packed(message, "PartResult", f"{name}.")
    else:
        yield from (f"PACK_TIERS({name}.{field.name})" for field in message.columns)


MESSAGES_TOP = """
// The columns of the messages of an answer, in the order of their numbers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace {

// A column: its name, its field, the bytes of an element, the first column of its table (kAny: it has any number of
// entries), and its highest value (0: there is none).
constexpr size_t kAny = SIZE_MAX;
struct Column {
    const char* name;
    uint32_t number;
    size_t width, first;
    uint32_t highest = 0;
};
"""


def answers(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the lines of the header with the columns that the compiled reader and writer of answers know."""
    yield from MESSAGES_TOP.splitlines()[1:]
    for message in _named(messages, ("Blocks", "Orders", "PartResult")):
        columns = sorted(message.columns, key=lambda field: field.number)
        first: dict[str, int] = {}
        yield ""
        yield f"constexpr Column k{message.name}[] = {{"
        for at, field in enumerate(columns):
            table = str(first.setdefault(field.option.table, at)) if field.is_by_row else "kAny"
            highest = f", {field.option.highest}" if field.option.HasField("highest") else ""
            yield f'    {{"{field.name}", {field.number}, {8 if field.is_wide else 4}, {table}{highest}}},'
        yield "};"
    yield ""
    for message in _named(messages, ("Blocks", "Orders", "PartResult")):
        yield f"constexpr size_t kNum{message.name} = sizeof k{message.name} / sizeof k{message.name}[0];"
    yield from ("", "}  // namespace")
