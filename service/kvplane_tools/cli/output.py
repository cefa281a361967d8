"""Format the output of commands: messages as JSON or YAML, rows as aligned columns, numbers in readable units."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvplane.base.errors import InvalidArgument
from kvplane_tools.cli.options import Format, Shape

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from kvplane.v1.admin_pb2 import RequestState
    from kvplane.v1.allocation_pb2 import DescribeReplicaResponse, ReplicaSummary, StoreStatus
    from kvplane.v1.replica_pb2 import ReplicaSpec


def show(answer: Message, output: Shape, **texts: Callable[[], str]) -> None:
    """Print an answer in the format `output`. `texts` make the text of each format that is for people: `table`, and
    `wide` and `name` where there are more columns, or names. Raises InvalidArgument as `text_of`.
    """
    print(text_of(lambda: fields_of(answer), output, **texts))


def text_of(plain: Callable[[], object], output: Shape, **texts: Callable[[], str]) -> str:
    """Return an answer in the format `output`: by one of `texts`, or from `plain`, which returns lists, dictionaries
    and scalars.

    Raises InvalidArgument for a format that this command does not have, and for a path without a match.
    """
    make = texts.get(output.format) or (texts["table"] if output.format is Format.WIDE else None)
    if make is not None:
        return escaped(make(), "\n")
    if output.format is Format.NAME:
        raise InvalidArgument("the answer has no names", field="--output", remedy="use another format")
    if output.format is Format.JSONPATH:
        return "\n".join(_line(value) for value in at_path(plain(), output.path))
    return plain_text(plain(), output)


def fields_of(answer: Message) -> dict[str, Any]:
    """Return the whole message as a dictionary, with its fields in the order of the .proto file."""
    from google.protobuf.json_format import MessageToDict

    fields = MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    ordered: dict[str, Any] = _in_order(fields, answer.DESCRIPTOR)
    return ordered


MOST_PEERS = 3  # that are named in a line
_STEP = re.compile(r"\.?([A-Za-z_][\w-]*)|\[(\d+|\*)\]")


def at_path(value: object, path: str) -> list[object]:
    """Return what a path of fields, [numbers] and [*] selects, as in {.replicas[*].replica}; the braces and the first
    point may be left out. Raises InvalidArgument for an invalid path, and one that selects nothing.
    """
    text, found, at = path.removeprefix("{").removesuffix("}"), [value], 0
    while at < len(text):
        step = _STEP.match(text, at)
        if step is None:
            what = f"{path!r} is not a path at {text[at:]!r}"
            raise InvalidArgument(what, field="--output", remedy="write fields, [0] and [*]: .replicas[*].replica")
        found, at = [inner for one in found for inner in _step_into(one, step)], step.end()
    if not found:
        raise InvalidArgument(f"{path!r} selects nothing", field="--output", remedy="see the fields with -o json")
    return found


def _step_into(value: object, step: re.Match[str]) -> list[object]:
    name, index = step.groups()
    if name is not None:
        return [value[name]] if isinstance(value, dict) and name in value else []
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return inner if index == "*" else inner[int(index) : int(index) + 1]


def _line(value: object) -> str:
    return escaped(value) if isinstance(value, str) else json.dumps(value)


def escaped(text: str, kept: str = "") -> str:
    """Return text with every character escaped that is neither printable nor in `kept`: names of requests, engines and
    adapters come from clients, and a terminal obeys what it is sent.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in kept else ascii(one)[1:-1] for one in text)


def repeat(every_s: float | None, print_answer: Callable[[], None]) -> None:
    """Call `print_answer` once, or every `every_s` seconds without an end; a terminal is cleared before each answer."""
    while True:
        if every_s is not None and sys.stdout.isatty():
            sys.stdout.write("\x1b[H\x1b[2J\x1b[3J")
        print_answer()
        sys.stdout.flush()
        if every_s is None:
            return
        time.sleep(every_s)


def _in_order(value: Any, kind: Any) -> Any:  # noqa: ANN401 - JSON, and a descriptor of either implementation
    """Return the fields in the order of the .proto file; protobuf's own conversion puts empty fields last."""
    if isinstance(value, list):
        return [_in_order(one, kind) for one in value]
    if kind is None or kind.GetOptions().map_entry:
        return value
    return {
        field.name: _in_order(value[field.name], field.message_type) for field in kind.fields if field.name in value
    }


def plain_text(value: object, output: Shape) -> str:
    """Return lists, dictionaries and scalars as JSON or YAML."""
    if output.format is Format.JSON:
        return json.dumps(value, indent=2)
    import yaml

    return yaml.safe_dump(value, sort_keys=False).rstrip()


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as text with aligned columns; the first row is the heading."""
    rows = [[escaped(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def word(enum_name: str, prefix: str) -> str:
    """Return the name of an enum value without its prefix, in lower case: REPLICA_STATE_LIVE becomes "live"."""
    return enum_name.removeprefix(prefix).lower()


def tier_word(kind: int) -> str:
    """Return the kind of a tier as text, such as "host"."""
    from kvplane.v1.replica_pb2 import TierKind

    return word(TierKind.keys()[kind], "TIER_KIND_")


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun, such as "1 block" or "2,000 blocks"."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def size(num_bytes: int) -> str:
    """Return a number of bytes as text, such as "1.5 GiB"."""
    unit = min(4, max(0, num_bytes.bit_length() - 1) // 10)
    return f"{num_bytes / (1 << 10 * unit):.4g} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def store_word(store: StoreStatus) -> str:
    """Return the state of a replica's store as text, such as "catching up"."""
    from kvplane.v1.allocation_pb2 import StoreState

    return word(StoreState.Name(store.state), "STORE_STATE_").replace("_", " ")


def request_state(request: RequestState) -> str:
    """Return "running", "held" (ended, with blocks that a transfer still reads) or "waiting"."""
    return "running" if request.running else "held" if request.held else "waiting"


def usable_blocks(spec: ReplicaSpec) -> int:
    """Return the number of blocks that requests can hold: all but the null block, or the null state."""
    return spec.num_blocks - max(1, spec.blocks_per_state)


def slack_line(answer: DescribeReplicaResponse) -> str:
    """Return how many blocks of a pool with split pages are slack."""
    share = answer.slack_blocks / usable_blocks(answer.spec)
    return f"{answer.slack_blocks:,} free blocks ({share:.1%}) of superblocks in use, where no state fits"


def retained_line(answer: DescribeReplicaResponse) -> str:
    """Return how many prefixes and blocks are retained."""
    prefixes = counted(answer.retained_prefixes, "prefix", "prefixes")
    return f"{prefixes}, {counted(answer.retained_blocks, 'block')}"


def sources_line(answer: DescribeReplicaResponse) -> str:
    """Return where tokens hit, and how many bytes were loaded, such as "device 96 tokens; disk 64 tokens, 1 MiB"."""
    loaded = sum(tier.hit_tokens for tier in answer.tiers)
    parts = [f"device {answer.counters.hit_tokens - loaded:,} tokens"]
    for tier in answer.tiers:
        num_bytes = sum(use.loaded_bytes for worker in answer.workers for use in worker.tiers if use.kind == tier.kind)
        parts.append(f"{tier_word(tier.kind)} {tier.hit_tokens:,} tokens, {size(num_bytes)}")
    return "; ".join(parts)


def peers_line(answer: DescribeReplicaResponse) -> str:
    """Return the peers with the most blocks, such as "a 96 blocks, b of kvplane-1:7070 12 blocks, 3 more"."""
    most = sorted(answer.peers, key=lambda one: -one.held_blocks)
    parts = [
        f"{one.replica}{f' of {one.service}' * bool(one.service)} {counted(one.held_blocks, 'block')}"
        for one in most[:MOST_PEERS]
    ]
    return ", ".join([*parts, *([f"{len(most) - MOST_PEERS:,} more"] if len(most) > MOST_PEERS else [])])


def by_reason(counts: Mapping[str, int]) -> str:
    """Return counts as text, such as "12 evicted, 3 out of blocks"; "none" if every count is 0."""
    parts = (f"{count:,} {reason.replace('_', ' ')}" for reason, count in sorted(counts.items()) if count)
    return ", ".join(parts) or "none"


def last_seen(one: ReplicaSummary | DescribeReplicaResponse) -> str:
    """Return how long ago an engine, a worker or a call used the replica: "now" while a session is open."""
    return f"{age(one.last_seen_ms)} ago" if one.last_seen_ms else "now"


def age(milliseconds: int) -> str:
    """Return a duration as text, such as "3.2 s" or "2 h 5 min"."""
    seconds = milliseconds / 1000
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    if minutes >= 48 * 60:
        return f"{minutes // 1440} d {minutes % 1440 // 60} h"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
