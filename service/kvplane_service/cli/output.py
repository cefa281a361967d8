"""Format the output of commands: messages as JSON or YAML, rows as aligned columns, numbers in readable units."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvplane_service.cli.options import Format

if TYPE_CHECKING:
    from google.protobuf.message import Message


def show(answer: Message, output: Format, table: Callable[[], str]) -> None:
    """Print an answer in the format `output`; `table` is called to make the text of the table format."""
    print(table() if output is Format.TABLE else message_text(answer, output))


def message_text(answer: Message, output: Format) -> str:
    """Return the whole message as JSON or YAML, with its fields in the order of the .proto file."""
    from google.protobuf.json_format import MessageToDict

    fields = MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return plain_text(_in_order(fields, answer.DESCRIPTOR), output)


def _in_order(value: Any, kind: Any) -> Any:  # noqa: ANN401 - JSON, and a descriptor of either implementation
    """Return the fields in the order of the .proto file; protobuf's own conversion puts empty fields last."""
    if isinstance(value, list):
        return [_in_order(one, kind) for one in value]
    if kind is None or kind.GetOptions().map_entry:
        return value
    return {
        field.name: _in_order(value[field.name], field.message_type) for field in kind.fields if field.name in value
    }


def plain_text(value: object, output: Format) -> str:
    """Return lists, dictionaries and scalars as JSON or YAML."""
    if output is Format.JSON:
        return json.dumps(value, indent=2)
    import yaml

    return yaml.safe_dump(value, sort_keys=False).rstrip()


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as text with aligned columns; the first row is the heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def word(enum_name: str, prefix: str) -> str:
    """Return the name of an enum value without its prefix, in lower case: REPLICA_STATE_LIVE becomes "live"."""
    return enum_name.removeprefix(prefix).lower()


def by_reason(counts: Mapping[str, int]) -> str:
    """Return counts as text, such as "12 evicted, 3 out of blocks"; "none" if every count is 0."""
    parts = (f"{count:,} {reason.replace('_', ' ')}" for reason, count in sorted(counts.items()) if count)
    return ", ".join(parts) or "none"


def age(milliseconds: int) -> str:
    """Return a duration as text, such as "3.2 s" or "2 h 5 min"."""
    seconds = milliseconds / 1000
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
