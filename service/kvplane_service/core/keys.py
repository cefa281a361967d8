"""Keys: the names under which look-ups find the content of blocks. Loads no numpy: the command line imports it too."""

from __future__ import annotations

from typing import Final, NamedTuple

from kvplane.base.groups import NULL_BLOCK as NULL_BLOCK


class Key(NamedTuple):
    """A name of a block's content: the digest of the prefix that ends in it, in a group and a domain."""

    domain: str
    group: int
    digest: bytes


LAZY_KEY: Final = Key("", -1, b"")  # in `BlockPool.key`: the key is still packed in the pool's table
