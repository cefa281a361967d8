"""Python values as bytes, in one documented layout, for the exported state of a replica (`state`).

A value is one byte, its kind, and its content; integers are little-endian, and every count is a u32:

    N T F           None, True, False
    i               s64
    s b             text (UTF-8), bytes: count of bytes, the bytes
    U V B           list of u32, of s64, of bools (a byte each): count, the entries
    H               list of bytes: count, the length of each (u32), all bytes joined
    A               array: type code "I" (u32) or "Q" (u64), count, the entries
    L Q t           list, deque, tuple: count, the values
    S               set: count, the values, sorted
    d               dict: count, then key and value of each entry, by ascending key: the order of a dict decides nothing
"""

from __future__ import annotations

import struct
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any

from kvplane.base.errors import InvalidArgument

_COUNT, _INT = struct.Struct("<cI"), struct.Struct("<cq")
_U32, _S64 = "I", "q"
_MOST_DEPTH = 16  # nested values; the exported state has fewer


def pack_value(value: object) -> bytes:
    """Return a value as bytes. Raises TypeError for a value of a kind that the layout does not have."""
    return b"".join(_pack(value))


def _pack(value: object) -> Iterator[bytes]:
    if value is None or isinstance(value, bool):
        yield b"N" if value is None else b"T" if value else b"F"
    elif isinstance(value, int):
        yield _INT.pack(b"i", value)
    elif isinstance(value, str):
        raw = value.encode()
        yield _COUNT.pack(b"s", len(raw)) + raw
    elif isinstance(value, bytes):
        yield _COUNT.pack(b"b", len(value)) + value
    elif isinstance(value, array):
        yield b"A" + value.typecode.encode() + struct.pack("<I", len(value)) + value.tobytes()
    elif isinstance(value, list):
        yield from _pack_list(value)
    elif isinstance(value, dict):
        yield _COUNT.pack(b"d", len(value))
        for key, one in sorted(value.items(), key=itemgetter(0)):
            yield from _pack(key)
            yield from _pack(one)
    elif isinstance(value, tuple | deque | set):
        kind = b"t" if isinstance(value, tuple) else b"Q" if isinstance(value, deque) else b"S"
        yield from _pack_each(kind, sorted(value) if isinstance(value, set) else value)
    else:
        raise TypeError(f"the layout of exported values has no {type(value).__name__}")


def _pack_each(kind: bytes, values: list[Any] | tuple[Any, ...] | deque[Any]) -> Iterator[bytes]:
    yield _COUNT.pack(kind, len(values))
    for value in values:
        yield from _pack(value)


def _pack_list(values: list[Any]) -> Iterator[bytes]:
    kinds = set(map(type, values))
    if kinds == {int}:
        try:
            yield _COUNT.pack(b"U", len(values)) + array(_U32, values).tobytes()
        except OverflowError:
            yield _COUNT.pack(b"V", len(values)) + array(_S64, values).tobytes()
    elif kinds == {bool}:
        yield _COUNT.pack(b"B", len(values)) + bytes(values)
    elif kinds == {bytes}:
        yield _COUNT.pack(b"H", len(values)) + array(_U32, map(len, values)).tobytes()
        yield b"".join(values)
    else:
        yield from _pack_each(b"L", values)


class ValueReader:
    """Reads packed values one after another. Raises InvalidArgument for bytes that are not packed values."""

    def __init__(self, raw: bytes | memoryview, at: int = 0) -> None:
        self._raw = memoryview(raw)
        self._at = at
        self._depth = 0

    @property
    def has_more(self) -> bool:
        """Whether bytes are left."""
        return self._at < len(self._raw)

    def read(self) -> Any:  # noqa: ANN401
        """Return the next value."""
        kind = bytes(self._take(1))
        self._depth += 1
        if kind not in _READ or self._depth > _MOST_DEPTH:
            raise _damaged(f"no value begins at byte {self._at - 1}")
        value = _READ[kind](self)
        self._depth -= 1
        return value

    def _take(self, count: int) -> memoryview:
        if count > len(self._raw) - self._at:
            raise _damaged(f"{count} bytes are missing at byte {self._at}")
        self._at += count
        return self._raw[self._at - count : self._at]

    def _count(self) -> int:
        return int(struct.unpack("<I", self._take(4))[0])

    def _int(self) -> int:
        return int(struct.unpack("<q", self._take(8))[0])

    def _bytes(self) -> bytes:
        return bytes(self._take(self._count()))

    def _text(self) -> str:
        try:
            return self._bytes().decode()
        except UnicodeDecodeError as error:
            raise _damaged("a text is not UTF-8") from error

    def _ints(self, code: str) -> array[int]:
        values = array(code)
        values.frombytes(self._take(self._count() * values.itemsize))
        return values

    def _array(self) -> array[int]:
        code = bytes(self._take(1))
        if code not in (b"I", b"Q"):
            raise _damaged(f"an array has the type {code!r}")
        return self._ints(code.decode())

    def _bools(self) -> list[bool]:
        return [bool(one) for one in self._take(self._count())]

    def _digests(self) -> list[bytes]:
        lengths = self._ints(_U32)
        joined = bytes(self._take(sum(lengths)))
        return [joined[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]

    def _many(self) -> list[Any]:
        return [self.read() for _ in range(self._count())]

    def _dict(self) -> dict[Any, Any]:
        return {self._hashable(): self.read() for _ in range(self._count())}

    def _set(self) -> set[Any]:
        return {self._hashable() for _ in range(self._count())}

    def _hashable(self) -> Any:  # noqa: ANN401
        value = self.read()
        try:
            hash(value)
        except TypeError as error:
            raise _damaged(f"a key is a {type(value).__name__}") from error
        return value


_READ: dict[bytes, Callable[[ValueReader], Any]] = {
    b"N": lambda _: None,
    b"T": lambda _: True,
    b"F": lambda _: False,
    b"i": ValueReader._int,
    b"s": ValueReader._text,
    b"b": ValueReader._bytes,
    b"U": lambda reader: reader._ints(_U32).tolist(),
    b"V": lambda reader: reader._ints(_S64).tolist(),
    b"B": ValueReader._bools,
    b"H": ValueReader._digests,
    b"A": ValueReader._array,
    b"L": ValueReader._many,
    b"Q": lambda reader: deque(reader._many()),
    b"t": lambda reader: tuple(reader._many()),
    b"S": ValueReader._set,
    b"d": ValueReader._dict,
}


def _damaged(problem: str) -> InvalidArgument:
    return InvalidArgument(problem, field="state", remedy="export the state again")
