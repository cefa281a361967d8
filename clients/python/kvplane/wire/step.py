"""Conversion of Step and its parts to and from protobuf."""

from __future__ import annotations

from typing import Any

from kvplane.base.errors import InvalidArgument
from kvplane.base.sections import Facts, News, Peers, Prefetch, Retain
from kvplane.base.step import Part, Step
from kvplane.base.typed import check
from kvplane.base.when_read import given_fields
from kvplane.v1 import step_pb2 as pb
from kvplane.wire import tables
from kvplane.wire.columns import cannot_build, wrong_total
from kvplane.wire.sections import Section, check_rows, decode_section, encode_section

_SECTIONS: dict[str, Section] = {
    "facts": tables.FACTS,
    "cache": tables.CACHE,
    "peers": tables.PEERS,
    "news": tables.NEWS,
    "resume": tables.RESUME,
    "run": tables.RUN,
    "admit": tables.ADMIT,
    "peek": tables.PEEK,
    "prefetch": tables.PREFETCH,
    "retain": tables.RETAIN,
    "budget": tables.BUDGET,
}
_COUNTS = {"facts": "appended", "news": "num_tokens"}  # columns that say how many tokens a row has
_FLAGS = ("with_tables", "with_hashes")


def encode_step(step: Step) -> pb.Step:
    """Return the message of a step. Raises InvalidArgument for a value that cannot be sent; the error's field names the
    value.
    """
    try:
        return pb.Step(
            epoch=step.epoch,
            seq=step.seq,
            part=step.part,
            more=not step.last,
            executed_through=step.executed_through,
            parts=[encode_part(part, f"parts[{index}]") for index, part in enumerate(step.parts)],
            traceparent=step.traceparent,
        )
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        check(step, Step, "")  # finds and names the wrong value; too slow to do for every step
        raise cannot_build("step", error) from error


def decode_step(message: pb.Step, digest_size: int | None) -> Step:
    """Return the step of a message whose hashes have `digest_size` bytes each; None: of a message that is known to be
    whole, but for what its writer left out.

    The function checks the form only: element sizes, one entry per row, valid enum values, and the totals of tokens and
    hashes. The service's core checks what the rows mean. Raises InvalidArgument; the error's field is, for instance,
    "parts[0].run.cap".
    """
    if not message.parts:
        raise InvalidArgument(
            "the step has no parts, but needs at least one",
            field="parts",
            remedy="send an empty part for a step without rows",
        )
    return Step(
        epoch=message.epoch,
        seq=message.seq,
        parts=[decode_part(part, digest_size, f"parts[{index}]") for index, part in enumerate(message.parts)],
        part=message.part,
        last=not message.more,
        executed_through=message.executed_through,
        traceparent=message.traceparent,
    )


# Sections are passed as dicts, see `encode_section`.
def encode_part(part: Part, where: str) -> dict[str, Any]:
    """Return the fields of a part's message; `where` names it in errors."""
    fields: dict[str, Any] = {}
    for name, value in given_fields(part).items():  # a section that is missing is empty
        if (of := _SECTIONS.get(name)) is None or (name == "resume" and value is None):
            continue
        packed = encode_section(value, of, f"{where}.{name}")
        if packed or name == "resume":
            fields[name] = packed
    for name in _FLAGS:
        if value := getattr(part, name):
            fields[name] = value
    return fields


def decode_part(message: pb.Part, digest_size: int | None, where: str) -> Part:
    """Return the part of a message, see `decode_step`; `where` names it in errors."""
    fields: dict[str, Any] = {name: getattr(message, name) for name in _FLAGS}
    for name, of in _SECTIONS.items():
        if message.HasField(name):
            fields[name] = section = of.kind(**decode_section(getattr(message, name), of, f"{where}.{name}"))
            if digest_size is not None and isinstance(section, (Facts, News, Peers, Prefetch, Retain)):
                _check_content(section, name, digest_size, f"{where}.{name}")
    return Part(**fields)


def encode_peers(rows: Peers, where: str) -> pb.Peers:
    """Return the message of rows that no step has; `where` names it in errors."""
    return pb.Peers(**encode_section(rows, tables.PEERS, where))


def decode_peers(message: pb.Peers, digest_size: int, where: str) -> Peers:
    """Return the rows of a message outside a step, see `decode_step`."""
    rows = Peers(**decode_section(message, tables.PEERS, where))
    _check_content(rows, "peers", digest_size, where)
    return rows


def _check_content(section: Facts | News | Peers | Prefetch | Retain, name: str, digest_size: int, where: str) -> None:
    """Raise InvalidArgument unless there are as many texts, token ids and bytes of hashes as the columns say."""
    rows = section.num_hashes if isinstance(section, Retain) else section.slot
    check_rows(section, _SECTIONS[name], len(rows), where)
    if isinstance(section, (Facts, News)) and section.tokens:
        total = sum(getattr(section, _COUNTS[name]))
        if len(section.tokens) != total:
            source = f"{where}.{_COUNTS[name]}"
            raise wrong_total(f"{where}.tokens", len(section.tokens), "token ids", total, source)
    of_rows = isinstance(section, Peers)
    num_bytes = (len(section.slot) if isinstance(section, Peers) else sum(section.num_hashes)) * digest_size
    if num_bytes != len(section.hashes):
        source = f"{where}.{'slot' if of_rows else 'num_hashes'} x {digest_size}"
        raise wrong_total(f"{where}.hashes", len(section.hashes), "bytes", num_bytes, source)
