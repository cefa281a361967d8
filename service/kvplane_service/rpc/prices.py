"""What a call counts of its owner's bytes per second: not its length alone, but the work inside it.

Tokens count 4 bytes and hashes 32, as in a message of a session, whatever their length on the wire. What a call reads
of the replica, such as the hashes of an open request, counts before it is read; its answer counts too.

    reserve(length)      before the request is parsed, the most that its tokens can count
    price_of(request)    once it is parsed; the rest of the reservation is given back

A registration counts the time for which it was planned, and the blocks that are built.

A message of a session counts its length, or the effort of its steps where that is more: a few bytes can look up or
admit requests of a million tokens repeatedly.

The weights are about 30 ns of a core per byte: an owner that uses 16 MiB in a second uses half a core.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message

CALL_BYTES = 16 << 10  # the work of any call
TOKEN_BYTES = 4
HASH_BYTES = 32
BLOCK_BYTES = 8  # of a pool that is built, or passed over
DECISION_BYTES = 2048  # of a decision log that is read, and its size
BYTE_NS = 30  # of the effort of a step, estimated for the core that applies it
_COUNTED = ("content", "appended", "prompt", "block_ids")


def reserve(num_bytes: int) -> int:
    """Return what a request of this length can count at most: a token has at least one byte."""
    return CALL_BYTES + TOKEN_BYTES * num_bytes


def price_of(request: Message, num_bytes: int) -> int:
    """Return what a parsed request of this length counts."""
    known = request.DESCRIPTOR.fields_by_name
    fields: dict[str, Any] = {name: getattr(request, name) for name in _COUNTED if name in known}
    items = HASH_BYTES * len(fields.pop("block_ids", ()))
    items += sum(map(_items_of, fields.values()))
    return CALL_BYTES + max(num_bytes, items)


def _items_of(content: object) -> int:
    """Return what tokens and hashes count. A text has none; keys of a prompt count their length."""
    return TOKEN_BYTES * len(getattr(content, "token_ids", ())) + HASH_BYTES * len(getattr(content, "hashes", ()))
