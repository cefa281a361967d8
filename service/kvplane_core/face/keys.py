"""Keys: the names under which look-ups find the content of blocks. Loads no numpy: the command line imports it too."""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

from kvplane.base.groups import NULL_BLOCK as NULL_BLOCK

# A name of a block's content: (domain, group, digest of the prefix that ends in the block). A plain tuple, since a pool
# keeps one per block: the cycle collector stops tracking a plain tuple of strings, numbers and bytes at the first
# collection that it survives, but visits a named tuple in every full collection.
Key: TypeAlias = tuple[str, int, bytes]

_FNV_START, _FNV_PRIME, _WORD = 0xCBF29CE484222325, 0x100000001B3, (1 << 64) - 1


def seal_key(key: Key) -> int:
    """Return a key as seals of slots have it, see `Orders.load_key`."""
    domain, _, digest = key
    return int.from_bytes(digest[-8:], "big") ^ (_domain_mask(domain) if domain else 0)


@lru_cache(maxsize=1024)
def _domain_mask(domain: str) -> int:
    mask = _FNV_START
    for byte in domain.encode():
        mask = (mask ^ byte) * _FNV_PRIME & _WORD
    return mask
