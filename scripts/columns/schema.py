"""The schema of the columns of a step, read from proto/kvplane/v1/step.proto and the options of column.proto."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet

from kvplane.v1 import column_pb2 as options
from scripts.gen_proto import PROTOC, environment

STEP = "kvplane/v1/step.proto"
U32, I32, U64, BITS = options.U32, options.I32, options.U64, options.BITS
COLUMN: Any = options.column  # the stub of an extension does not have its type
# What a step consists of, but for the image of `Resume`, which is no section of rows.
SECTIONS = ("Facts", "Cache", "Peers", "News", "Run", "Admit", "Peek", "Prefetch", "Retain", "Budget")
NAMES = {U32: "u32", I32: "i32", U64: "u64", BITS: "u64"}
# How comments say these defaults, where they do not write the number.
WORDS = {(1 << 32) - 1: ("no limit", "4294967295"), -1: ("-1", "all"), 0: ("0",)}


@dataclass(frozen=True)
class Field:
    """One field of a message.

    Attributes:
        name, number: as in the message.
        doc: its comment.
        kind: `column`; `digests` and `texts`, one per row; `hashes`, the joined digests of all rows; `number`, `flag`;
            `choice`, of an enumeration; `message` and `messages`.
        of: the enumeration or message of such a field.
        option: of a column, or of a field with a default; empty for others.
        bits: of a number.
        choice, highest: name of the default of an enumeration, and its greatest value.
    """

    name: str
    number: int
    doc: str
    kind: str
    of: str
    option: options.Column
    bits: int
    choice: str
    highest: int

    @property
    def is_by_row(self) -> bool:
        """Whether it is a column with one entry for each row, or none."""
        return self.kind == "column" and self.option.rows == options.EACH

    @property
    def is_wide(self) -> bool:
        """Whether it is a column of 64 bits."""
        return self.option.type in (U64, BITS)

    @property
    def default(self) -> int | None:
        """The default, if it has one."""
        return self.option.default if self.option.HasField("default") else None

    @property
    def range(self) -> list[str]:
        """The least and the greatest valid value, numbers or names of limits; [] = what reads the field checks it."""
        return self.option.range.split(" to ") if self.option.range else []


@dataclass(frozen=True)
class Message:
    """A message of the schema; its fields are in the order in which the file declares them."""

    name: str
    doc: str
    fields: tuple[Field, ...]

    def of_kind(self, *kinds: str) -> list[Field]:
        """Return the fields of these kinds."""
        return [field for field in self.fields if field.kind in kinds]

    @property
    def columns(self) -> list[Field]:
        """Its columns."""
        return self.of_kind("column")

    @property
    def tables(self) -> list[str]:
        """Names of the tables of its columns, in order; "" = the section itself."""
        return list(dict.fromkeys(field.option.table for field in self.columns))


def by_row(message: Message) -> list[Field]:
    """Return the fields of a section that have one entry for each row, or none, but the first, which all rows have."""
    found = [field for field in message.fields if field.is_by_row or field.kind in ("texts", "messages")]
    return found[1:]


def read_schema(root: Path, tools: Path) -> tuple[list[Message], Message]:
    """Return the messages of step.proto of which a field has an option, in the order of the file; and `Part`, which
    consists of them.

    Raises:
        ValueError: a comment does not begin with the type of its column, or does not name its default.
    """
    python = environment(tools.resolve() / "protoc", PROTOC) / "python"
    with tempfile.TemporaryDirectory(prefix="kvplane-columns-") as scratch:
        out = Path(scratch) / "set"
        command = [str(python), "-m", "grpc_tools.protoc", f"-I{root / 'proto'}", "--include_source_info"]
        subprocess.run([*command, f"--descriptor_set_out={out}", str(root / "proto" / STEP)], check=True)
        found = FileDescriptorSet.FromString(out.read_bytes())
    (file,) = found.file
    docs, choices = _comments(file), {one.name: [value.name for value in one.value] for one in file.enum_type}
    messages = [_message(one, docs, (4, at), choices) for at, one in enumerate(file.message_type)]
    (part,) = (one for one in messages if one.name == "Part")
    said = [one for one in messages if any(field.option.ByteSize() or field.kind == "column" for field in one.fields)]
    return said, part


def _comments(file: FileDescriptorProto) -> dict[tuple[int, ...], str]:
    """Return the comments of a file by path, each as one line."""
    return {tuple(one.path): " ".join(one.leading_comments.split()) for one in file.source_code_info.location}


def _message(
    one: DescriptorProto, docs: dict[tuple[int, ...], str], path: tuple[int, ...], choices: dict[str, list[str]]
) -> Message:
    fields = [_field(field, docs[(*path, 2, at)], one.name, choices) for at, field in enumerate(one.field)]
    return Message(one.name, docs[path], tuple(fields))


def _field(field: FieldDescriptorProto, doc: str, owner: str, choices: dict[str, list[str]]) -> Field:
    has_option = field.options.HasExtension(COLUMN)
    option = field.options.Extensions[COLUMN] if has_option else options.Column()
    kind, of = _kind(field, has_option), field.type_name.rpartition(".")[2]
    # Each enumeration of this file is numbered from 0, and its names begin with that of their type.
    choice = choices[of][option.default].removeprefix(_prefix(choices[of])) if kind == "choice" and has_option else ""
    bits = 64 if field.type == field.TYPE_UINT64 else 32
    made = Field(field.name, field.number, doc, kind, of, option, bits, choice, len(choices.get(of, ())) - 1)
    if kind == "column":
        _check_comment(made, f"{owner}.{made.name}")
    return made


def _prefix(names: list[str]) -> str:
    return names[0].removesuffix("UNSPECIFIED")


def _kind(field: FieldDescriptorProto, has_option: bool) -> str:
    is_repeated = field.label == field.LABEL_REPEATED
    if field.type == field.TYPE_BYTES:
        return "column" if has_option else "digests" if is_repeated else "hashes"
    if field.type == field.TYPE_STRING:
        return "texts" if is_repeated else "text"
    if field.type == field.TYPE_MESSAGE:
        return "messages" if is_repeated else "message"
    if field.type == field.TYPE_ENUM:
        return "choice"
    return "flag" if field.type == field.TYPE_BOOL else "number"


def _check_comment(field: Field, name: str) -> None:
    """Raise ValueError unless the comment says what the option says: engines in other languages read the comment."""
    kind, default = NAMES[field.option.type], field.default
    if not field.doc.startswith(kind):
        raise ValueError(f"{name}: the option says {kind}: begin the comment with it")
    if default is None:
        return
    words = WORDS.get(default, (str(default),))
    said = [f"default {word}" for word in words] + [f"{word} (default)" for word in words] + ["empty = 0 for each"]
    if not any(one in field.doc for one in said):
        raise ValueError(f"{name}: the option has the default {default}: say 'default {words[0]}' in the comment")
