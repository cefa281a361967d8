"""The parser for messages of untrusted clients. It refuses a message in which a 32-bit field holds more than 32 bits.

Protobuf parsers truncate such numbers silently: a token id of 2^32 + 5 would become 5 and cause a wrong cache hit, and
a block id would become the id of another block. kvplane's own client cannot send such numbers, but other encoders can.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from kvplane.base.errors import InvalidArgument, LimitExceeded
from kvplane.base.hashing import PackedHashes
from kvplane.base.hashing.native import varints
from kvplane.v1.allocation_pb2 import RequestContent as _Numbers
from kvplane.wire.columns import tag_of, varint

# Four continuation bytes and a fifth byte with more than the four highest bits of a u32.
_OVER_32_BITS = re.compile(rb"[\x80-\xff]{4}[\x10-\xff]")
_VARINT, _I64, _LEN, _I32 = 0, 1, 2, 5
_MAX_FIELDS = 64  # of a message, or a part of it, in which a long column is looked for
_LONG_BYTES = 1 << 16  # of a message whose fields are counted before it is parsed
MAX_FIELDS = 1 << 17  # of a message and of those in it; hashes of one size that follow each other are one
_PIECE_BYTES = 1 << 15  # of packed numbers, which protobuf parses within a millisecond
_NUMBERS = tag_of(_Numbers, "token_ids")
_UNSIGNED = (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_SINT32)

_M = TypeVar("_M", bound=Message)


def parse(message_class: type[_M], raw: bytes) -> _M:
    """Parse a message. Raises InvalidArgument for malformed bytes, and for a number that parsing would truncate;
    LimitExceeded for more than MAX_FIELDS fields, of which each takes a hundred bytes or more once it is parsed.
    """
    if len(raw) > _LONG_BYTES:
        with suppress(IndexError, InvalidArgument):  # malformed: the parser raises the error
            _check_count(cast(Descriptor, message_class.DESCRIPTOR), raw)
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
    """Parse a long message on a thread. As `parse`, but a field that is most of the message is read apart, since
    protobuf holds the interpreter's lock for tens of milliseconds for a million numbers or hashes: token ids are an
    array, hashes of one size stay joined (`PackedHashes`), and a column of bytes is copied once.

    The object reads like the message.
    """
    try:
        path = _long_field(cast(Descriptor, message_class.DESCRIPTOR), raw, 0, len(raw))
        value = path[-1].read(raw) if path else b""
    except (IndexError, InvalidArgument, ValueError):
        path = []  # malformed: the parser raises the error
    if not path:
        return parse(message_class, raw)
    message: object = parse(message_class, _without(raw, path))
    return cast(_M, _with_field(message, path, value))


def _check_count(descriptor: Descriptor, raw: bytes) -> None:
    """Raise LimitExceeded if a message has too many fields, also in other messages."""
    left, inner = MAX_FIELDS, [(descriptor, 0, len(raw))]
    while inner:
        kind, at, stop = inner.pop()
        while at < stop:
            begin, left = at, left - 1
            if not left:
                what = f"the message has more than {MAX_FIELDS} fields"
                raise LimitExceeded(what, remedy="send it in several, such as a step in several parts")
            tag, at = _varint(raw, at)
            value, at = _payload(raw, at, tag & 7)
            known = kind.fields_by_number.get(tag >> 3) if tag & 7 == _LEN else None
            if known is None:
                continue
            if known.message_type is not None:
                inner.append((known.message_type, value, at))
            elif known.type == FieldDescriptor.TYPE_BYTES and 0 < at - value < 0x80 and value == begin + 2:
                at = _end_of_run(raw, begin, stop, at - value)


def _with_field(message: object, path: list[_Field], value: object) -> object:
    if not path:
        return value
    inner = getattr(message, path[0].name)
    if len(path) > 1 and path[0].is_repeated:
        return _Apart(message, path[0].name, [_with_field(inner[0], path[1:], value)])
    return _Apart(message, path[0].name, _with_field(inner, path[1:], value))


class _Apart:
    """A message, and one of its fields that was read apart."""

    def __init__(self, message: object, name: str, value: object) -> None:
        self._message = message
        self.__dict__[name] = value

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._message, name)


class _Field(NamedTuple):
    """A field in a message: where it, its value and the next one begin. Hashes, whose fields follow each other, are one
    field: `size` bytes each.
    """

    name: str
    begin: int
    start: int
    end: int
    kind: int = 0
    is_repeated: bool = False
    size: int = 0

    def read(self, raw: bytes) -> bytes | array[int] | PackedHashes:
        """Return the value. Raises ValueError for numbers of more than 32 bits."""
        if self.size:
            return PackedHashes(_joined(raw, self), self.size)
        if self.kind == FieldDescriptor.TYPE_BYTES:
            return raw[self.start : self.end]
        return _numbers(memoryview(raw)[self.start : self.end])


def _long_field(descriptor: Descriptor, raw: bytes, start: int, stop: int) -> list[_Field]:
    """Return the path of a field that is more than half of these bytes: packed numbers of u32, bytes, or hashes; [] if
    there is none, or a field on the path comes twice.

    Raises IndexError and InvalidArgument for bytes that are no message.
    """
    numbers, longest, number, at = list[int](), _Field("", 0, 0, 0), 0, start
    while at < stop:
        begin = at
        tag, at = _varint(raw, at)
        value, at = _payload(raw, at, tag & 7)
        numbers.append(tag >> 3)
        if len(numbers) > _MAX_FIELDS:
            return []
        if tag & 7 != _LEN:
            continue
        known = descriptor.fields_by_number.get(tag >> 3)
        if known is None:
            continue
        size, is_repeated = at - value, _is_repeated(known)
        is_hash = is_repeated and known.type == FieldDescriptor.TYPE_BYTES and 0 < size < 0x80 and value == begin + 2
        if is_hash:  # a byte each for tag and size
            at = _end_of_run(raw, begin, stop, size)
        if 2 * (at - begin) > stop - start:
            longest = _Field(known.name, begin, value, at, known.type, is_repeated, size if is_hash else 0)
            number = tag >> 3
    if at != stop or not longest.name or numbers.count(number) > 1:
        return []
    message = descriptor.fields_by_name[longest.name].message_type
    if message is not None:
        inner = _long_field(message, raw, longest.start, longest.end)
        return [longest, *inner] if inner else []
    one_of = (FieldDescriptor.TYPE_UINT32, True), (FieldDescriptor.TYPE_BYTES, False)
    return [longest] if longest.size or (longest.kind, longest.is_repeated) in one_of else []


def _end_of_run(raw: bytes, begin: int, stop: int, size: int) -> int:
    """Return where the fields end that follow each other from `begin` on, each as the first one: a byte for the tag, a
    byte for the size, and the value.
    """
    stride = size + 2
    tags, sizes = raw[begin:stop:stride], raw[begin + 1 : stop : stride]
    same = min(len(each) - len(each.lstrip(each[:1])) for each in (tags, sizes))
    return begin + stride * min(same, (stop - begin) // stride)


def _joined(raw: bytes, hashes: _Field) -> bytes:
    """Return the values of fields that follow each other, joined."""
    joined = bytearray(raw[hashes.begin : hashes.end])
    del joined[:: hashes.size + 2]  # the tags
    del joined[:: hashes.size + 1]  # the sizes
    return bytes(joined)


def _is_repeated(field: FieldDescriptor) -> bool:
    known: bool | None = getattr(field, "is_repeated", None)  # protobuf 5 has a label instead; 3 is LABEL_REPEATED
    return getattr(field, "label", None) == 3 if known is None else known


def _without(raw: bytes, path: list[_Field]) -> bytes:
    """Return the message without the last field of the path."""
    rest = b""
    for field, outer in zip(reversed(path), [*reversed(path[:-1]), _Field("", 0, 0, len(raw))], strict=True):
        value = b"" if field is path[-1] else raw[field.begin : _varint(raw, field.begin)[1]] + varint(len(rest)) + rest
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
        numbers.extend(array("I", _Numbers.FromString(_NUMBERS + varint(len(piece)) + piece).token_ids[:]))
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
    return varint(outer << 3 | _LEN) + varint(len(rest)) + rest, view[start:end]


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
