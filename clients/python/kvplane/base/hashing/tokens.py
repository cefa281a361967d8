"""Conversions between token ids and packed columns: bytes with four per token, little-endian unsigned.

The wire and the hashes use packed columns, so that a long prompt is never converted to a list of Python integers.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable
from functools import cache

from kvplane.base.errors import InvalidArgument
from kvplane.base.hashing import native

TOKEN_BYTES = 4
MAX_TOKEN_ID = 2**32 - 1

assert array("I").itemsize == TOKEN_BYTES, "kvplane needs a platform whose unsigned int has 32 bits"


def pack_tokens(tokens: Iterable[int], field: str = "tokens") -> bytes:
    """Return the token ids as one packed column.

    Raises:
        InvalidArgument: an id is not an integer of 0..2^32-1 (ids are never truncated). The error's field is `field`
            with the position of the id.
    """
    if isinstance(tokens, array) and tokens.typecode == "I":
        return _little_endian(tokens[:]).tobytes()
    compiled = _compiled()
    if compiled is not None and (packed := compiled(tokens)) is not None:
        return packed
    ids = list(tokens)
    try:
        column = array("I", ids)
    except (OverflowError, TypeError):
        raise _bad_token(ids, field) from None
    return _little_endian(column).tobytes()


@cache
def _compiled() -> Callable[[object], bytes | None] | None:
    return native.pack_ids()


def unpack_tokens(packed: bytes, field: str = "tokens") -> list[int]:
    """Return the token ids of a packed column.

    Raises:
        InvalidArgument: the length is not a multiple of four bytes.
    """
    check_packed(packed, field)
    column = array("I")
    column.frombytes(packed)
    return _little_endian(column).tolist()


def check_packed(packed: bytes, field: str = "tokens") -> None:
    """Raise InvalidArgument if the length of a packed column is not a multiple of four bytes."""
    if len(packed) % TOKEN_BYTES:
        raise InvalidArgument(
            f"a column of {len(packed)} bytes does not contain a whole number of tokens",
            field=field,
            remedy=f"send {TOKEN_BYTES} bytes per token, as little-endian unsigned integers",
        )


def _little_endian(column: array[int]) -> array[int]:
    if sys.byteorder == "big":
        column.byteswap()
    return column


def _bad_token(ids: list[int], field: str) -> InvalidArgument:
    for position, token in enumerate(ids):
        try:
            array("I", (token,))
        except (OverflowError, TypeError):
            return InvalidArgument(
                f"{token!r} is not a token id",
                field=f"{field}[{position}]",
                remedy=f"token ids are integers of 0..{MAX_TOKEN_ID}",
            )
    raise AssertionError("every token id is valid alone, but all of them together were not")
