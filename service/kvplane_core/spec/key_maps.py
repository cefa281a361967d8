"""The maps from keys to blocks of a pool."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from itertools import chain, repeat
from typing import Final, TypeAlias

from kvplane_core.face.keys import Key

LAZY_KEY: Final[Key] = ("", -1, b"")  # in `BlockPool.key`: the key is a row of the pool's packed KeyTable


Entry: TypeAlias = int | list[int]  # the block that has a key, or the blocks, first one first


DigestMap: TypeAlias = MutableMapping[bytes, Entry]  # the keys of one domain and group: a dict, or a ShardedMap


WHOLE_MAP_BLOCKS = 1 << 17  # a dict of as many keys grows within five milliseconds


_SHARDS = 32


class ShardedMap(DigestMap):
    """Entries by digest in 32 dicts, chosen by the first byte of the digest.

    A dict that grows moves all its entries within one insertion: with a million keys this takes 60 milliseconds, during
    which the service answers no call. The dicts of a sharded map grow one at a time.
    """

    __slots__ = ("dicts", "of_byte")

    def __init__(self) -> None:
        self.dicts: list[dict[bytes, Entry]] = [{} for _ in range(_SHARDS)]
        self.of_byte = self.dicts * (256 // _SHARDS)

    def __getitem__(self, digest: bytes) -> Entry:
        return self.of_byte[digest[0]][digest]

    def __setitem__(self, digest: bytes, entry: Entry) -> None:
        self.of_byte[digest[0]][digest] = entry

    def __delitem__(self, digest: bytes) -> None:
        del self.of_byte[digest[0]][digest]

    def __iter__(self) -> Iterator[bytes]:
        return chain.from_iterable(self.dicts)

    def __len__(self) -> int:
        return sum(map(len, self.dicts))

    def __bool__(self) -> bool:
        return any(self.dicts)

    def get(self, digest: bytes, default: Entry | None = None) -> Entry | None:  # type: ignore[override]
        """Return the entry of the digest, or `default`."""
        return self.of_byte[digest[0]].get(digest, default)


def new_map(num_blocks: int) -> DigestMap:
    """Return an empty map for a pool of this size."""
    return {} if num_blocks <= WHOLE_MAP_BLOCKS else ShardedMap()


def take_entries(by_digest: DigestMap, digests: Sequence[bytes]) -> list[Entry | None]:
    """Remove the entries of these digests and return them; None for a digest that has none any more."""
    if isinstance(by_digest, ShardedMap):
        takes = [one.pop for one in by_digest.of_byte]
        return [takes[digest[0]](digest, None) for digest in digests]
    return list(map(by_digest.pop, digests, repeat(None)))


def parts_of(by_digest: DigestMap) -> list[object]:
    """Return the dicts that a map consists of, so that they can be freed one at a time."""
    return [*by_digest.dicts] if isinstance(by_digest, ShardedMap) else [by_digest]
