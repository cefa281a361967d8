"""The parser for messages of untrusted clients. It refuses a message in which a 32-bit field holds more than 32 bits.

Protobuf parsers truncate such numbers silently: a token id of 2^32 + 5 would become 5 and cause a wrong cache hit, and
a block id would become the id of another block. kvplane's own client cannot send such numbers, but other encoders can.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypeVar, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from kvplane.base.errors import InvalidArgument

# Four continuation bytes and a fifth byte with more than the four highest bits of a u32.
_OVER_32_BITS = re.compile(rb"[\x80-\xff]{4}[\x10-\xff]")
_VARINT, _I64, _LEN, _I32 = 0, 1, 2, 5
_UNSIGNED = (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_SINT32)

_M = TypeVar("_M", bound=Message)


def parse(message_class: type[_M], raw: bytes) -> _M:
    """Parse a message. Raises InvalidArgument for malformed bytes, and for a number that parsing would truncate."""
    try:
        message = message_class.FromString(raw)
    except DecodeError as error:
        raise InvalidArgument(
            f"the message cannot be parsed as {message_class.DESCRIPTOR.full_name}: {error}",
            remedy="generate the client from the service's proto files",
        ) from None
    # Bytes that serialize unchanged were not truncated. This holds for most encoders, and is the cheaper check.
    if message.SerializeToString() != raw:
        check_exact(cast(Descriptor, message_class.DESCRIPTOR), raw)
    return message


def check_exact(descriptor: Descriptor, raw: bytes) -> None:
    """Raise InvalidArgument if parsing `raw`, a well-formed message of this type, truncates a number.

    The error's field names the number's field. If no number has more than 32 bits, the check is one search through the
    bytes.
    """
    if _OVER_32_BITS.search(raw):
        for name in _cut_fields(descriptor, raw, ""):
            raise InvalidArgument(
                "the number has more than 32 bits", field=name, remedy="give a number from 0 to 4294967295"
            )


def split_field(raw: bytes, outer: int, inner: int) -> tuple[bytes, memoryview]:
    """Split one bytes field off the only submessage of a message, without copying that field.

    Returns (the message without the field, the field). If the message does not have this field, or has an unusual
    encoding, returns the message unchanged and an empty field.

    Args:
        raw: the message.
        outer: field number of the submessage.
        inner: field number of the bytes field within the submessage.
    """
    view, found = memoryview(raw), list[tuple[int, int, int]]()
    try:
        tag, at = _varint(raw, 0)
        size, body = _varint(raw, at)
        if tag != outer << 3 | _LEN or body + size != len(raw):
            return raw, view[:0]
        at = body
        while at < len(raw):
            begin = at
            tag, at = _varint(raw, at)
            start, at = _payload(raw, at, tag & 7)
            if tag >> 3 == inner:
                found.append((begin, start, at))
    except (IndexError, InvalidArgument):
        return raw, view[:0]  # malformed: the parser raises the error
    if at != len(raw) or len(found) != 1 or raw[found[0][0]] & 7 != _LEN:
        return raw, view[:0]
    begin, start, end = found[0]
    rest = raw[body:begin] + raw[end:]
    return _bytes_of(outer << 3 | _LEN) + _bytes_of(len(rest)) + rest, view[start:end]


def _bytes_of(value: int) -> bytes:
    """Return a number as a protobuf varint."""
    made = bytearray()
    while value >= 0x80:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)


def _cut_fields(descriptor: Descriptor, raw: bytes, where: str) -> Iterator[str]:
    """Yield the names of fields whose number has more than 32 bits. Unknown fields and wire types are skipped: parsers
    do not truncate them.
    """
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        kind = tag & 7
        start, at = _payload(raw, at, kind)
        field = descriptor.fields_by_number.get(tag >> 3)
        if field is None or kind not in (_VARINT, _LEN):
            continue
        name = f"{where}{field.name}"
        if field.message_type is not None and kind == _LEN:
            yield from _cut_fields(field.message_type, raw[start:at], f"{name}.")
        elif field.type in _UNSIGNED and _OVER_32_BITS.search(raw, start, at):
            yield name


def _payload(raw: bytes, at: int, kind: int) -> tuple[int, int]:
    """Return the start and the end of a field's value."""
    if kind == _VARINT:
        return at, _varint(raw, at)[1]
    if kind == _LEN:
        size, start = _varint(raw, at)
        return start, start + size
    if kind in (_I64, _I32):
        return at, at + (8 if kind == _I64 else 4)
    raise InvalidArgument(
        f"the message has a field of wire type {kind}, but the proto files use 0, 1, 2 and 5 only",
        remedy="generate the client from the service's proto files",
    )


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """Return the value of the varint at a position, and the position after the varint."""
    value = shift = 0
    while True:
        byte = raw[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
