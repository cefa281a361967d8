"""The C++ types of the sections of a step, and what reads them from Python's, in the compiled core."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvplane.base import values
from kvplane.base.groups import Medium
from scripts.columns.schema import BITS, I32, NAMES, SECTIONS, U32, U64, Field, Message, by_row

UNLIMITED = 0xFFFFFFFF
# Sections to which `step.h` adds functions: it derives the type of this name from the generated one.
EXTENDED = ("Facts", "Cache", "Retain", "PartResult")
# What a result consists of; `step.h` has the orders and blocks.
READ = (*SECTIONS, "Resume")
RESULTS = ("Declined", "Prefetched", "Retained", "PartResult")
# Lists of which the core needs to know only how many entries there are.
COUNTED = {"extra_keys": "num_extra_keys", "traceparent": "num_traceparents"}

STRUCTS_TOP = """
// The sections of a step, and tables of its result, in columns: one entry per row, or none for the default.
#pragma once

#include "section_fields.h"
namespace kvplane {"""


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
        if message.name in READ:
            yield from _each_other(message, name)
        if counted := _counted(message):
            variable = message.name.lower()
            yield f"inline std::array<NumEntries, {len(counted)}> NumEntriesOf(const {name}& {variable}) {{"
            yield "    return {{"
            yield from (f'        {{"{variable}.{field}", {count}}},' for field, count in counted)
            yield "    }};"
            yield "}"
    (part,) = _named(messages, ("Part",))
    yield from ("", "// Visits the sections of a part, and its flags.", "template <typename Part, typename F>")
    yield "void EachSection(Part& part, F&& visit) {"
    yield from (f'    visit(OtherField{{"{field.name}", {field.number}}}, part.{field.name});' for field in part.fields)
    yield "}"
    yield f"inline constexpr size_t kNumSections = {len(part.fields)};"
    yield from ("", "}  // namespace kvplane")


ORDERS_TOP = """
// What a part orders; orders of copies are rows of `JobOrders`.
#pragma once

#include "types.h"

namespace kvplane {

// A column of orders of copies: of u64 if it is wide, else of u32.
struct JobColumn {
    const char* name;
    bool is_wide;
};"""


def orders(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the lines of the header with the type of orders."""
    yield from ORDERS_TOP.splitlines()[1:]
    (message,) = _named(messages, ("Orders",))
    columns = [field for field in message.columns if field.option.table not in JOBS]
    yield from ("", "struct Orders {")
    yield from (f"    {'std::vector<uint64_t>' if one.is_wide else 'BlockList'} {one.name};" for one in columns)
    firsts = [
        next(one for one in columns if one.option.table == table) for table in message.tables if table not in JOBS
    ]
    yield f"    bool empty() const {{ return {' && '.join(f'{one.name}.empty()' for one in firsts)}; }}"
    yield "    void Clear() {"
    yield from (f"        {one.name}.clear();" for one in columns)
    yield from ("    }", "};", "template <typename F>", "void EachColumn(const Orders& orders, F&& visit) {")
    yield from (f'    visit("{one.name}", orders.{one.name});' for one in columns)
    yield "}"
    for table in JOBS:
        yield f"inline constexpr JobColumn k{table.title()}Columns[] = {{"
        mine = (one for one in message.columns if one.option.table == table)
        yield from (f'    {{"{one.name}", {str(one.is_wide).lower()}}},' for one in mine)
        yield "};"
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
    default = "{}" if field.default is None else _number(field.default)
    said = [f'"{field.name}"', f"&{struct}::{field.name}", str(field.number), f"k{TYPES[field.option.type]}"]
    said += ["true" if field.is_by_row else "false", default]
    is_bits = field.option.type == BITS
    highest = str(field.option.highest) if field.option.HasField("highest") else "kAnyValue"
    said += [highest] if highest != "kAnyValue" or is_bits else []
    said += [f"&{struct}::{field.name}_fit"] if is_bits else []
    return f"{{{', '.join(said)}}}"


TYPES = {U32: "U32", I32: "I32", U64: "U64", BITS: "Bits"}


RANGES_TOP = """
// The ranges of the values in the sections of a step: of each, what is not checked by itself in `validate.h`.
#pragma once

#include "step.h"

namespace kvplane {"""


def ranges(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the lines of the header with what checks the ranges of values."""
    yield from RANGES_TOP.splitlines()[1:]
    for message in _named(messages, SECTIONS):
        if checked := [field for field in message.fields if field.range]:
            name = message.name.lower()
            yield from ("", "template <typename Range>")
            yield f"bool InRanges(const {message.name}& {name}, [[maybe_unused]] const Spec& spec, Range&& range) {{"
            for at, field in enumerate(checked):
                low, high = map(_limit, field.range)
                said = f'range({name}.{field.name}, {low}, {high}, "{name}.{field.name}")'
                yield f"    {'       ' if at else 'return '}{said}{' &&' if field is not checked[-1] else ';'}"
            yield "}"
    yield from ("", "}  // namespace kvplane")


def _limit(word: str) -> str:
    """Return a limit of a range: MAX_TOKENS is kMaxTokens, num_blocks is that of the replica."""
    sign, name = ("-", word[1:]) if word.startswith("-") else ("", word)
    if name.isdigit():
        return word
    return f"{sign}k{name.title().replace('_', '')}" if name.isupper() else f"{sign}spec.{name}"


def _each_other(message: Message, name: str) -> Iterator[str]:
    """Yield a function that visits the fields of a section that are no columns."""
    others = [field for field in message.fields if field.kind != "column" or _is_tokens(field)]
    of = message.name.lower()
    yield "template <typename F>"
    yield f"void EachOther({name}&{f' {of}' if others else ''}, F&&{' visit' if others else ''}) {{"
    yield from (f'    visit(OtherField{{"{field.name}", {field.number}}}, {_other(field, of)});' for field in others)
    yield "}"


def _other(field: Field, of: str) -> str:
    to = f"&{of}.{field.name}"
    if field.kind == "texts" and field.name not in COUNTED:
        return f"Texts{{{to}, {to}_fit}}"
    if field.name in COUNTED:
        return f"Counted{{{to}, &{of}.{COUNTED[field.name]}, {'true' if field.kind == 'texts' else 'false'}}}"
    if field.kind == "choice":
        highest = field.option.highest if field.option.HasField("highest") else field.highest
        return f"SingleChoice{{{to}, k{field.choice.capitalize()}, {highest}}}"
    if field.kind == "number":
        return f"SingleNumber{{{to}, {_number(field.default or 0)}, {field.bits}}}"
    return to


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


WIRE_TOP = """
// Writes the messages of steps and answers.
#pragma once

#include "wire.h"

namespace kvplane {"""


def wire(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the lines of the header that writes the messages of a step, without its tokens, and of its result."""
    yield from WIRE_TOP.splitlines()[1:]
    for message in _named(messages, (*READ, "Part", "Blocks", "Orders", *RESULTS)):
        yield from ("", *_writer(message))
    yield from ("", "}  // namespace kvplane")


JOBS = ("load", "save", "move")  # tables of `Orders`, which the core keeps as rows
STORED = {U32: "uint32_t", I32: "int32_t", U64: "uint64_t", BITS: "uint64_t"}


OF_TIERS = ("declined", "prefetched", "retained")


def _writer(message: Message) -> Iterator[str]:
    """Yield a function that writes a message, the last field first."""
    name, of = message.name.lower(), message.name
    head = f"inline void Write(const {of}& {name}, Backward* into"
    if of == "Blocks":
        head = f"inline void Write(const BlockLists& {name}, Backward* into"
    elif of == "Orders":
        head += ", const TierAnswer* tiers"
    elif of == "PartResult":
        name = "part"
        head = "inline void Write(const PartResult& part, Backward* into, WrittenEvents events"
    yield f"{head}) {{"
    write = _given_writer if of in (*READ, "Part") else _field_writer
    for field in sorted(message.fields, key=lambda field: -field.number):
        if not (of in READ and field.kind == "column" and _is_tokens(field)):
            yield f"    {write(field, name, message)}"
    yield "}"


def _given_writer(field: Field, name: str, message: Message) -> str:
    """Return what writes a field of a step: nothing for its default."""
    of, number = f"{name}.{field.name}", field.number
    if field.kind in ("texts", "messages"):
        return f"WriteTexts({of}, into, {number});"
    if field.kind == "hashes":
        return f"if ({of}.size) into->Bytes({number}, {of}.data, {of}.size);"
    if field.kind == "number":
        return f"into->NumberUnless({_number(field.default or 0)}, {number}, {of});"
    if field.kind == "choice":
        return f"into->NumberUnless(k{field.choice.capitalize()} + 1, {number}, {of} + 1);"
    if field.kind == "message" and field.of == "Resume":
        return f"if ({of}) WriteWhole(*{of}, into, {number});"
    return _field_writer(field, name, message)


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
        return f"WriteEvents({name}, events, into, {number});"
    if field.kind == "message" and field.name in OF_TIERS:
        return f"if ({name}.tiers != nullptr) WriteMessage({name}.tiers->{field.name}, into, {number});"
    if field.kind == "message":
        tiers = f", {name}.tiers.get()" if field.name == "orders" else ""
        return f"WriteMessage({of}, into, {number}{tiers});"
    return f"into->Number({number}, static_cast<uint64_t>({of}));"


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


_ENUMERATIONS = {
    values.End: "kEnd", values.OnRefusal: "k", values.Watermark: "k", values.RowFlag: "k", values.AdmitStatus: "k",
    values.EventKind: "k", values.RemoveReason: "k", Medium: "k",
}  # fmt: skip
_CONSTANTS = ("UNLIMITED", "UNCHANGED", "ANY_HIT", "MAX_LOOKAHEAD", "MAX_NS", "MAX_WITHIN_NS")
_OTHER_NAMES = {"RemoveReason.NONE": "kNoReason", "RowFlag.NONE": "", "Medium.DEVICE": ""}  # "": it has none


def values_of_fields(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the constants and enumerations of `kvplane.base.values`."""
    del messages
    yield from ("// The constants and enumerations of `kvplane.base.values`.", "#pragma once", "", "#include <cstdint>")
    yield from ("", "namespace kvplane {", "")
    for name in _CONSTANTS:
        yield f"constexpr int64_t k{_camel(name)} = {getattr(values, name)};"
    for kind, prefix in _ENUMERATIONS.items():
        yield from ("", f"enum {kind.__name__} : int64_t {{")
        for name, one in kind.__members__.items():
            if named := _OTHER_NAMES.get(f"{kind.__name__}.{name}", prefix + _camel(name)):
                yield f"    {named} = {one.value},"
        yield "};"
    yield from ("", "}  // namespace kvplane")


def _camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))
