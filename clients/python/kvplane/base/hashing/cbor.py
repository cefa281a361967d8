"""An encoder of canonical CBOR (RFC 8949, section 4.2.1), for the few types that a block hash consists of.

The package has its own encoder because `kvplane.base` depends on no other package, and because a general encoder takes
several times as long as the hash. The tests compare it byte by byte with `cbor2.dumps(value, canonical=True)`.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TypeAlias

CborValue: TypeAlias = "int | str | bytes | tuple[CborValue, ...] | None"

_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _ARRAY = range(5)  # the major types in use
_NULL = b"\xf6"


def encode(value: CborValue) -> bytes:
    """Return the canonical encoding of `value`. Its integers must be within -2^64..2^64-1."""
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
    """Return the shortest encoding of an integer. The result is cached, since the tokens of a prompt repeat."""
    return _head(_UNSIGNED, value) if value >= 0 else _head(_NEGATIVE, -1 - value)


def encode_array(items: list[bytes]) -> bytes:
    """Return the encoding of an array whose items are encoded already."""
    return _head(_ARRAY, len(items)) + b"".join(items)


def _head(major: int, argument: int) -> bytes:
    """Return the head of a CBOR item: its major type, and its argument in as few bytes as possible."""
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
