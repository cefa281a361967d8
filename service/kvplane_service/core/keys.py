"""The names of a block's content."""

from __future__ import annotations

from typing import Final, NamedTuple

from kvplane.base.groups import NULL_BLOCK as NULL_BLOCK


class Key(NamedTuple):
    """One name of a block's content: the digest of the prefix that ends in it, within a group and a domain."""

    domain: str
    group: int
    digest: bytes


UNTOUCHED: Final = Key("", -1, b"")  # stands for the key of a block whose key is a row of the pool's key table
