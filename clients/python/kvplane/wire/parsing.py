"""The parser for messages of untrusted clients. It refuses a message in which a 32-bit field holds more than 32 bits.

Protobuf parsers truncate such numbers silently: a token id of 2^32 + 5 would become 5 and cause a wrong cache hit, and
a block id would become the id of another block. kvplane's own client cannot send such numbers, but other encoders can.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from kvplane.base.errors import InvalidArgument
from kvplane.base.hashing.native import varints
from kvplane.v1.allocation_pb2 import RequestContent as _Numbers

# Four continuation bytes and a fifth byte with more than the four highest bits of a u32.
_OVER_32_BITS = re.compile(rb"[\x80-\xff]{4}[\x10-\xff]")
_VARINT, _I64, _LEN, _I32 = 0, 1, 2, 5
_MAX_FIELDS = 64  # of a message, or a part of it, in which a long column is looked for
_PIECE_BYTES = 1 << 15  # of packed numbers, which protobuf parses within a millisecond
_NUMBERS = bytes([_Numbers.DESCRIPTOR.fields_by_name["token_ids"].number << 3 | _LEN])
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


def parse_long(message_class: type[_M], raw: bytes) -> _M:
    """Parse a long message on a thread. As `parse`, but a column of numbers that is most of the message is read without
    the interpreter's lock, or in pieces, since protobuf holds the lock for tens of milliseconds for a million numbers.

    Such a column is an array, and the object reads like the message.
    """
    try:
        path = _long_column(cast(Descriptor, message_class.DESCRIPTOR), raw, 0, len(raw))
        numbers = _numbers(memoryview(raw)[path[-1].start : path[-1].end]) if path else array("I")
    except (IndexError, InvalidArgument, ValueError):
        path = []  # malformed: the parser raises the error
    if not path:
        return parse(message_class, raw)
    message: object = parse(message_class, _without(raw, path))
    return cast(_M, _with_column(message, [each.name for each in path], numbers))


def _with_column(message: object, names: list[str], numbers: array[int]) -> _Apart:
    inner = numbers if len(names) == 1 else _with_column(getattr(message, names[0]), names[1:], numbers)
    return _Apart(message, names[0], inner)


class _Apart:
    """A message, and one of its fields that was read apart."""

    def __init__(self, message: object, name: str, value: object) -> None:
        self._message = message
        self.__dict__[name] = value

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._message, name)


class _Field(NamedTuple):
    """A field in a message: where it, its value and the next one begin."""

    name: str
    begin: int
    start: int
    end: int


def _long_column(descriptor: Descriptor, raw: bytes, start: int, stop: int) -> list[_Field]:
    """Return the path of a packed column of u32 numbers that is more than half of these bytes; [] if there is none, or
    a field on the path comes twice.

    Raises IndexError and InvalidArgument for bytes that are no message.
    """
    numbers, longest, at = list[int](), _Field("", 0, 0, 0), start
    while at < stop:
        begin = at
        tag, at = _varint(raw, at)
        value, at = _payload(raw, at, tag & 7)
        numbers.append(tag >> 3)
        if len(numbers) > _MAX_FIELDS:
            return []
        if tag & 7 == _LEN and 2 * (at - value) > stop - start:
            field = descriptor.fields_by_number.get(tag >> 3)
            longest, number = _Field(field.name if field else "", begin, value, at), tag >> 3
    if at != stop or not longest.name or numbers.count(number) > 1:
        return []
    field = descriptor.fields_by_name[longest.name]
    if field.message_type is None:
        return [longest] if field.type == FieldDescriptor.TYPE_UINT32 and _is_repeated(field) else []
    inner = [] if _is_repeated(field) else _long_column(field.message_type, raw, longest.start, longest.end)
    return [longest, *inner] if inner else []


def _is_repeated(field: FieldDescriptor) -> bool:
    known: bool | None = getattr(field, "is_repeated", None)  # protobuf 5 has a label instead; 3 is LABEL_REPEATED
    return getattr(field, "label", None) == 3 if known is None else known


def _without(raw: bytes, path: list[_Field]) -> bytes:
    """Return the message without the last field of the path."""
    rest = b""
    for field, outer in zip(reversed(path), [*reversed(path[:-1]), _Field("", 0, 0, len(raw))], strict=True):
        value = (
            b"" if field is path[-1] else raw[field.begin : _varint(raw, field.begin)[1]] + _bytes_of(len(rest)) + rest
        )
        rest = raw[outer.start : field.begin] + value + raw[field.end : outer.end]
    return rest


def _numbers(packed: memoryview) -> array[int]:
    """Return packed varints as numbers. Raises ValueError for bytes that are no varints of at most 32 bits."""
    numbers, unpack = array("I"), varints()
    if unpack is not None:
        numbers.frombytes(unpack(packed))
        return numbers
    at = 0
    while at < len(packed):
        end = min(at + _PIECE_BYTES, len(packed))
        while packed[end - 1] >= 0x80:  # the last number continues
            end += 1
        piece = bytes(packed[at:end])
        if _OVER_32_BITS.search(piece):
            raise ValueError("a number has more than 32 bits")
        numbers.extend(array("I", _Numbers.FromString(_NUMBERS + _bytes_of(len(piece)) + piece).token_ids[:]))
        at = end
    return numbers


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
    """Return the value of the varint at a position, and the position after the varint.

    Raises InvalidArgument for more than 10 bytes: the value of a longer one would grow without limit.
    """
    value = 0
    for shift in range(0, 70, 7):
        byte = raw[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
    raise InvalidArgument("the message has a varint of more than 10 bytes", remedy="send a message of the proto files")
