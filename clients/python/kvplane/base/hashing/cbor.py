"""Canonical CBOR (RFC 8949, section 4.2.1) of the few types that a block hash is made of.

Written here because the base package depends on nothing, and because encoding a block's tokens through a
general encoder costs several times the hash. Equal to `cbor2.dumps(value, canonical=True)` byte by byte
(tested).
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TypeAlias

CborValue: TypeAlias = "int | str | bytes | tuple[CborValue, ...] | None"

_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _ARRAY = range(5)  # the major types in use
_NULL = b"\xf6"


def encode(value: CborValue) -> bytes:
    """The canonical encoding of `value`. Integers must be within -2^64..2^64-1."""
    if value is None:
        return _NULL
    if isinstance(value, int):
        return encode_int(value)
    if isinstance(value, str):
        text = value.encode()
        return _head(_TEXT, len(text)) + text
    if isinstance(value, bytes):
        return _head(_BYTES, len(value)) + value
    return encode_array([encode(item) for item in value])


@lru_cache(maxsize=1 << 16)
def encode_int(value: int) -> bytes:
    """An integer in its shortest form. Cached, since the tokens of a prompt repeat."""
    return _head(_UNSIGNED, value) if value >= 0 else _head(_NEGATIVE, -1 - value)


def encode_array(items: list[bytes]) -> bytes:
    """An array of items that are encoded already."""
    return _head(_ARRAY, len(items)) + b"".join(items)


def _head(major: int, argument: int) -> bytes:
    """Major type and argument, the argument in the fewest bytes that hold it."""
    high = major << 5
    if argument < 24:
        return bytes((high | argument,))
    if argument < 1 << 8:
        return struct.pack(">BB", high | 24, argument)
    if argument < 1 << 16:
        return struct.pack(">BH", high | 25, argument)
    if argument < 1 << 32:
        return struct.pack(">BI", high | 26, argument)
    return struct.pack(">BQ", high | 27, argument)
