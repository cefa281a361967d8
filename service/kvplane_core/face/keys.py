"""Keys: the names under which look-ups find the content of blocks. Loads no numpy: the command line imports it too."""

from __future__ import annotations

from typing import TypeAlias

from kvplane.base.groups import NULL_BLOCK as NULL_BLOCK

# A name of a block's content: (domain, group, digest of the prefix that ends in the block). A plain tuple, since a pool
# keeps one per block: the cycle collector stops tracking a plain tuple of strings, numbers and bytes at the first
# collection that it survives, but visits a named tuple in every full collection.
Key: TypeAlias = tuple[str, int, bytes]
